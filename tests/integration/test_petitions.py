"""The whole loop on real text: a model of English novels learns Korean from 512,000 tokens of petitions."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from scale_cli.commands.evaluate import check_forgetting
from scale_cli.commands.run import run_pipeline
from scale_cli.config.load import load_config
from scale_cli.config.schema import RunConfig
from scale_cli.errors import CheckFailed
from scale_cli.evaluation.results import Report
from scale_cli.export.records import ExportRecord
from scale_cli.processes import cpu_precision
from scale_cli.runs.folder import RunFolder
from scale_cli.storage.atomic import read_json
from scale_cli.upscale.base import load_base
from scale_cli.upscale.base_files import BaseRecord
from scale_cli.upscale.base_hashes import changed_tensors

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "petitions.yaml"


@pytest.fixture(scope="module")
def config(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """configs/petitions.yaml as it is shipped, but for the folders, and for a precision that takes this CPU hours."""
    sources = ("corpus.sources.0", "evaluation.perplexity.0", "evaluation.perplexity.1")
    files = ("ko-petitions/train.txt.xz", "en-eltec/valid.txt.xz", "ko-petitions/valid.txt.xz")
    return load_config(
        CONFIG,
        [
            f"output_dir={tmp_path_factory.mktemp('petitions')}",
            f"model.base={shared_data}/ckpt-eltec/hf",
            f"train.mixed_precision={cpu_precision()}",
            f"evaluation.mixed_precision={cpu_precision()}",
            *(
                f"{source}.path={shared_data}/{file}"
                for source, file in zip(sources, files, strict=True)
            ),
        ],
    )


@pytest.fixture(scope="module")
def report(config: RunConfig) -> Report:
    """The forgetting report of the finished run."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scale_cli.commands.run.log", said.append)
        report = run_pipeline(config)
    assert report is not None
    assert not any("done already" in line for line in said)
    return report


def test_no_english_document_loses_more_than_ln_2_nats_when_routed(report: Report) -> None:
    (english,) = report.with_role("retention")
    assert english.num_documents == 114
    worst = english.heads["posterior"].worst_document_nats
    assert worst is not None and worst <= math.log(2) + 1e-6


def test_korean_is_learned_and_routing_gives_up_less_than_one_percent_of_it(report: Report) -> None:
    assert report.num_tokens_trained >= 500_000
    (korean,) = report.with_role("acquisition")
    base, trained, routed = (
        korean.heads[head].nats_per_token or math.nan for head in ("base", "trained", "posterior")
    )
    assert trained < 0.6 * base and routed <= 1.01 * trained
    gain = korean.heads["posterior"].bits_per_byte_difference
    assert gain.high is not None and gain.high < 0.0, "its interval excludes zero"


def test_the_written_report_shows_both_rules(config: RunConfig, report: Report) -> None:
    folder = RunFolder(config.output_dir).evaluation
    assert Report.from_json(read_json(folder / "report.json")) == report
    page = (folder / "report.md").read_text()
    assert "routed, posterior" in page and "routed, cosine" in page


def test_the_base_is_untouched_and_the_export_is_a_plain_model(
    config: RunConfig, report: Report
) -> None:
    run = RunFolder(config.output_dir)
    assert changed_tensors(load_base(config.model), BaseRecord.load(run.final)) == []
    folder = run.export("plain")
    assert {file.stem for file in folder.glob("*.py")} == {"cache_scale", "routed_scale", "routing"}
    exported = AutoModelForCausalLM.from_pretrained(folder)
    assert type(exported).__name__ == "LlamaForCausalLM"
    with torch.no_grad():
        assert torch.isfinite(exported(torch.tensor([[0, 5, 7]])).logits).all()
    parity = ExportRecord.load(folder)
    assert parity.routed is not None
    for way in (parity, parity.routed):
        assert way.nats <= 1e-6 and way.losses is not None
        assert way.losses.kept == pytest.approx(1.0, abs=1e-3)


def test_a_second_run_does_nothing_again(
    config: RunConfig, report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_pipeline(config) == report
    said = capsys.readouterr().out.splitlines()
    done = [line.split()[-1] for line in said if "done already" in line]
    run = RunFolder(config.output_dir)
    assert done == [
        str(folder) for folder in (run.upscaled, run.final, run.evaluation, run.export("plain"))
    ]


def test_the_gate_fails_only_where_more_was_forgotten_than_allowed(report: Report) -> None:
    check_forgetting(report, 0.01)
    lost = report.with_role("retention")[0].heads["posterior"].bits_per_byte_difference.value
    assert lost is not None and lost > 0.0
    with pytest.raises(CheckFailed, match="eltec"):
        check_forgetting(report, lost / 2)
