"""`scale run`: what is certain to be refused is refused before anything is spent, and a finished run may go on."""

import shutil
from pathlib import Path

import pytest
import torch

from scale_cli.commands.run import run_pipeline
from scale_cli.config.load import dump_config
from scale_cli.config.schema import RunConfig
from scale_cli.export.records import ExportRecord
from scale_cli.report import quantity
from scale_cli.runs.folder import RunFolder, folder_bytes
from scale_cli.storage.atomic import load_tensors, read_json, write_json
from tests.command_line import Scale
from tests.small_runs import petitions_run


@pytest.fixture
def config(shared_data: Path, tmp_path: Path) -> RunConfig:
    return petitions_run(shared_data, tmp_path / "run")


@pytest.fixture(scope="module")
def finished_once(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = petitions_run(shared_data, tmp_path_factory.mktemp("finished") / "run")
    run_pipeline(config, lambda _: None)
    return config.output_dir


@pytest.fixture
def finished(config: RunConfig, finished_once: Path) -> RunConfig:
    """The config of a run that is finished."""
    shutil.copytree(finished_once, config.output_dir)
    return config


@pytest.fixture
def of_config(config: RunConfig, tmp_path: Path, scale: Scale) -> Scale:
    """Run a verb on the config."""
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    return lambda verb, *arguments: scale(verb, path, *arguments)


@pytest.mark.parametrize("verb", ["run", "evaluate"])
def test_a_gate_without_a_retention_corpus_is_refused_before_anything(
    config: RunConfig, of_config: Scale, verb: str
) -> None:
    refused = of_config(verb, "evaluation.perplexity.0.role=acquisition", "--fail-above", "0.1")
    assert "no corpus of role retention" in refused.error()
    assert not config.output_dir.exists()


def test_a_routed_run_exports_both_heads_and_its_cards_follow_the_report(
    config: RunConfig, of_config: Scale
) -> None:
    asked = ("export={}", "method.collaboration.layers=top:1")
    done = of_config("run", *asked)
    assert done.exit_code == 0
    run = RunFolder(config.output_dir)
    generating, serving = done.stdout.splitlines()[-1].split("; ")
    assert (
        generating == f"next           scale generate {run.root} --prompt '...' --temperature 0.8"
    )
    assert serving == f"scale serve {run.root} --plain"
    *_, plainly, with_code, disk, _ = done.stdout.splitlines()
    for line, one in ((plainly, "llama"), (with_code, "transformers")):
        size = ExportRecord.load(run.export(one)).size
        assert line == f"served         {one}: {size}"
    assert disk.startswith(
        f"on disk        {quantity(folder_bytes(run.root), 'B')} in {run.root}; "
    )
    checkpoints = f"{run.checkpoints} ({quantity(folder_bytes(run.checkpoints), 'B')}: "
    assert f"may be deleted: {checkpoints}only to train further)" in disk
    heads = {run.export("llama"): "trained", run.export("transformers"): "posterior"}
    assert [*heads] == sorted((run.root / "export").iterdir())
    assert of_config("run", *asked, "evaluation.perplexity.0.max_documents=3").exit_code == 0
    kept = read_json(run.evaluation / "report.json")["corpora"][0]
    assert kept["num_documents"] == 3
    for folder, head in heads.items():
        figures = (kept["heads"][name]["bits_per_byte"] for name in ("base", head))
        bytes_per_token = kept["num_bytes"] / kept["num_tokens"]
        row = "| 3 | {:.2f} | {:.3f} | {:.3f} |".format(bytes_per_token, *figures)
        assert row in (folder / "README.md").read_text()
    assert "choose one" in of_config("export", *asked, "--push-to-hub", "me/model").error()


def test_a_finished_run_goes_on_where_the_change_is_accepted_as_the_refusal_says(
    finished: RunConfig, of_config: Scale
) -> None:
    assert "(--accept train.max_steps)" in of_config("run", "train.max_steps=14").error()
    assert "--accept" not in of_config("evaluate", "train.max_steps=14").error(), (
        "evaluate does not know it"
    )
    assert of_config("run", "train.max_steps=14", "--accept", "train.max_steps").exit_code == 0
    position = read_json(finished.output_dir / "final" / "position.json")
    assert position["step"] == 14
    report = read_json(RunFolder(finished.output_dir).evaluation / "report.json")
    assert report["num_tokens_trained"] == position["num_tokens"]


def test_a_finished_run_is_measured_again_where_the_held_out_text_has_changed(
    finished: RunConfig, of_config: Scale, tmp_path: Path
) -> None:
    text = tmp_path / "held-out.txt"
    asked = f"evaluation.perplexity.0.path={text}", "evaluation.perplexity.0.max_documents=null"

    def documents_in_report() -> int:
        assert of_config("run", *asked).exit_code == 0
        return int(
            read_json(RunFolder(finished.output_dir).evaluation / "report.json")["corpora"][0][
                "num_documents"
            ]
        )

    text.write_text("Once upon a time.\n\nThe end.\n")
    assert documents_in_report() == 2
    text.write_text("Once upon a time.\n\nThe end.\n\nAnd once more.\n")
    assert documents_in_report() == 3


def test_the_folder_of_a_run_stands_for_its_config_wherever_it_lies(
    finished: RunConfig, scale: Scale, tmp_path: Path
) -> None:
    moved = finished.output_dir.rename(tmp_path / "moved")
    for verb, *options in (
        ["evaluate"],
        ["export", "export.format=adapter"],
        ["verify"],
        ["plan", "--flops", "1e12"],
        ["compare", "--output", tmp_path / "compared"],
    ):
        assert scale(verb, moved, *options).exit_code == 0
    assert (moved / "export" / "adapter").is_dir()
    assert not finished.output_dir.exists()
    assert scale("evaluate", tmp_path).error(), "no run"


def test_the_dtype_of_an_export_is_the_one_asked_for_on_the_command_line(
    finished: RunConfig, of_config: Scale
) -> None:
    done = of_config("export", "export.format=llama", "--dtype", "bfloat16")
    assert done.exit_code == 0
    folder = RunFolder(finished.output_dir).export("llama", "bfloat16")
    dtypes = {tensor.dtype for tensor in load_tensors(folder / "model.safetensors").values()}
    assert dtypes == {torch.bfloat16}
    assert "'float32', 'bfloat16', 'float16'" in of_config("export", "--dtype", "int8").stderr


def test_another_tokenizer_is_refused_by_every_verb(
    finished: RunConfig, of_config: Scale, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(finished.model.base, tmp_path / "base"))
    changed = read_json(base / "tokenizer.json")
    changed["model"]["merges"].pop()
    write_json(base / "tokenizer.json", changed)
    for verb, *options in (["evaluate"], ["export"], ["train", "--resume", "auto"]):
        assert "the tokenizer of" in of_config(verb, f"model.base={base}", *options).error(), verb
