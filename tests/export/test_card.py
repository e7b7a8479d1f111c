from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from scale_cli.config.schema import ModelConfig, RunConfig
from scale_cli.evaluation.run import evaluate
from scale_cli.export.card import model_card
from scale_cli.export.licence import base_licence
from scale_cli.export.parity import Parity
from scale_cli.export.run import export
from scale_cli.storage.atomic import read_json
from scale_cli.training.run import train
from scale_cli.upscale.run import upscale
from tests.export.conftest import configured

TrainedRun = Callable[..., RunConfig]
ROUTE = {"variant": "route"}
CARD = "---\nlicense: other\nlicense_name: ours\nlicense_link: https://example.org/licence\nlanguage: 7\n---\n# Base\n"


@pytest.mark.parametrize("export_format", ["llama", "transformers", "adapter"])
def test_every_export_has_a_card_with_the_data_the_budget_and_the_parity(
    trained_run: TrainedRun, export_format: str
) -> None:
    config = trained_run(ROUTE, format=export_format)
    summary = export(config)
    card = ModelCard.load(summary.folder / "README.md")
    ledger = read_json(config.output_dir / "final" / "token_ledger.json")["petitions"]
    assert card.data.language == ["en", "ko"]
    assert card.data.base_model is None  # a local folder is no repository of the hub
    assert "12 steps of 4 sequences of 64 tokens" in card.text
    assert f"| {ledger['corpus']['num_tokens']:,} | {ledger['num_trained']:,} |" in card.text
    assert f"{summary.parity.max_logit_difference:.1e}" in card.text
    assert "Not measured" in card.text
    assert ("trust_remote_code=True" in card.text) is (export_format == "transformers")


def test_a_card_tells_where_the_base_is_by_no_more_than_its_last_two_names(trained_run: TrainedRun) -> None:
    config = trained_run(ROUTE)
    text = (export(config).folder / "README.md").read_text(encoding="utf-8")
    assert "ckpt-stories260K/hf" in text
    assert str(Path(config.model.base).parent.parent) not in text
    assert str(config.output_dir) not in text


def test_the_forgetting_table_is_of_the_head_that_the_folder_answers_with(trained_run: TrainedRun) -> None:
    config = trained_run(ROUTE)
    report = evaluate(config).report
    dense = (export(config).folder / "README.md").read_text(encoding="utf-8")
    routed = config.model_copy(update={"export": config.export.model_copy(update={"format": "transformers"})})
    served = (export(routed).folder / "README.md").read_text(encoding="utf-8")
    for corpus in report.corpora:
        assert f"| {corpus.heads['base'].bits_per_byte:.3f} | {corpus.heads['adapted'].bits_per_byte:.3f} |" in dense
        assert f"| {corpus.heads['base'].bits_per_byte:.3f} | {corpus.heads['posterior'].bits_per_byte:.3f} |" in served
    assert "the router" in dense


def test_the_licence_of_the_base_is_carried_over_with_its_files(tmp_path: Path, trained_run: TrainedRun) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text(CARD, encoding="utf-8")
    (base / "LICENSE.txt").write_text("do as you like", encoding="utf-8")
    (base / "USE_POLICY.md").write_text("be kind", encoding="utf-8")
    licence = base_licence(ModelConfig(base=str(base)))
    assert (licence.identifier, licence.name, licence.link) == ("other", "ours", "https://example.org/licence")
    licence.copy_files(tmp_path)
    assert (tmp_path / "LICENSE.txt").read_text(encoding="utf-8") == "do as you like"
    assert (tmp_path / "USE_POLICY.md").is_file()
    assert "ours" in licence.told()
    assert "`LICENSE.txt`" in licence.told()


def test_a_base_without_a_licence_is_said_to_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Find it out" in base_licence(ModelConfig(base=str(tmp_path))).told()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "Find it out" in base_licence(ModelConfig(base="nobody/nothing")).told()


def test_the_card_of_a_stack_tells_what_every_stage_was_made_of(shared_data: Path, tmp_path: Path) -> None:
    below = configured(shared_data, tmp_path / "first", ROUTE)
    above = configured(shared_data, tmp_path / "second", ROUTE)
    above = above.model_copy(update={"model": ModelConfig(base=str(tmp_path / "first"))})
    for config in (below, above):
        upscale(config)
        train(config, None, print)
    card = ModelCard.load(export(above).folder / "README.md")
    first, second = (read_json(config.output_dir / "final" / "base.json") for config in (below, above))
    assert "# ckpt-stories260K/hf, taught Korean" in card.text
    assert ", upon first." in card.text
    assert f"| base, SHA-256 | `{first['content_sha256']}` |" in card.text
    assert f"| second: stands on, SHA-256 | `{second['content_sha256']}` |" in card.text
    for config in (below, above):
        name, ledger = config.output_dir.name, read_json(config.output_dir / "final" / "token_ledger.json")
        assert f"| {name}: trained | 12 steps" in card.text
        assert f"| {name} | petitions | Korean |" in card.text
        assert f"| {ledger['petitions']['num_trained']:,} |" in card.text


def test_where_only_benchmarks_were_measured_the_card_does_not_ask_to_measure_again(trained_run: TrainedRun) -> None:
    report = evaluate(trained_run(ROUTE)).report
    config = trained_run(ROUTE)
    parity, licence = Parity(0.0, 0.0, 0.0, 1), base_licence(config.model)
    text = model_card(config, dataclasses.replace(report, corpora=[]), parity, licence, "LlamaForCausalLM")
    assert "names no text to measure it on" in text
    assert "`scale evaluate`" not in text
