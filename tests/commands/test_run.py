"""`scale run`: what is certain to be refused is refused before anything is spent, and a finished run may go on."""

import gc
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from scale_cli.commands.run import run_pipeline
from scale_cli.config.load import dump_config
from scale_cli.config.schema import RunConfig
from scale_cli.data.encoding import Encoder
from scale_cli.export.records import ExportRecord
from scale_cli.report import quantity
from scale_cli.runs.folder import RunFolder, folder_bytes
from scale_cli.storage.atomic import load_tensors, read_json
from tests.command_line import Scale
from tests.data.test_conversations import PLAIN
from tests.small_runs import petitions_run


@pytest.fixture
def config(shared_data: Path, tmp_path: Path) -> RunConfig:
    return petitions_run(shared_data, tmp_path / "run")


@pytest.fixture(scope="module")
def finished_once(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = petitions_run(shared_data, tmp_path_factory.mktemp("finished") / "run")
    run_pipeline(config)
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


def test_freed_memory_is_handed_back_before_training_needs_it_and_kept_after_it(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    verbs = ["_upscale", "train", "evaluate", "_export"]
    for name in ("hand_back_large_tensors", "keep_freed_memory", *verbs):
        patched = f"scale_cli.commands.run.{name}"
        monkeypatch.setattr(patched, lambda *_, name=name, **__: called.append(name))
    run_pipeline(config)
    assert called == ["hand_back_large_tensors", *verbs[:2], "keep_freed_memory", *verbs[2:]]


def test_no_tokenizer_of_the_steps_before_is_held_while_training(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 262,144 tokens is a third of a gigabyte, and its encoder another."""
    held: list[int] = []

    def train(*_: object) -> None:
        gc.collect()
        kinds = (PreTrainedTokenizerBase, Encoder)
        held.append(sum(isinstance(one, kinds) for one in gc.get_objects()) - before)

    for name in ("evaluate", "_export"):
        monkeypatch.setattr(f"scale_cli.commands.run.{name}", lambda *_, **__: None)
    monkeypatch.setattr("scale_cli.commands.run.train", train)
    gc.collect()
    before = sum(isinstance(one, (PreTrainedTokenizerBase, Encoder)) for one in gc.get_objects())
    run_pipeline(config)
    assert held == [0]


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
    base = shutil.copytree(config.model.base, config.output_dir.parent / "base")
    (base / "chat_template.jinja").write_text(PLAIN)
    asked = ("export={}", "method.collaboration.layers=top:1", f"model.base={base}")
    done = of_config("run", *asked)
    assert done.exit_code == 0
    run = RunFolder(config.output_dir)
    chat = f"scale generate {run.root} --chat --prompt"
    for told in (f"scale generate {run.root} --prompt", chat, f"scale serve {run.root}"):
        assert told in done.stdout.splitlines()[-1]
    for one in ("plain", "transformers"):
        size = ExportRecord.load(run.export(one)).size
        assert f"\nserved         {one}: {size}\n" in done.stdout
    sizes = [quantity(folder_bytes(folder), "B") for folder in (run.root, run.checkpoints)]
    assert f"on disk        {sizes[0]} in {run.root}; " in done.stdout
    assert f"may be deleted: {run.checkpoints} ({sizes[1]}: only to train further)" in done.stdout
    heads = {run.export("plain"): "trained", run.export("transformers"): "posterior"}
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


def test_a_run_that_made_what_it_was_to_learn_worse_warns_once_says_it_last_and_exits_with_3(
    config: RunConfig, of_config: Scale
) -> None:
    news = config.corpus.sources[0].path
    tales = config.evaluation.perplexity[0].path
    sources = (
        f"{{name: petitions, path: {news}, language: ko, max_documents: 8}}",
        f"{{name: tales, path: {tales}, language: en, role: replay, max_documents: 2}}",
    )
    asked = (
        "method.variant=full",
        "train.lr=1.0",
        "train.optimiser=adamw",
        "train.eval_every_steps=6",
        f"corpus.sources=[{', '.join(sources)}]",
        f"evaluation.perplexity.1.path={tales}",  # what the base reads well is easily made worse
        "evaluation.perplexity.1.language=en",
    )
    run = RunFolder(config.output_dir)
    failed = of_config("run", *asked)
    assert failed.exit_code == 3
    worse = "English (petitions-held-out, also replay) was not learned: the trained head is worse"
    error = failed.stderr.splitlines()[-1]
    assert error.startswith(f"error: {worse}")
    (warned,) = re.findall(r"warning: step .*, petitions-held-out: .*", failed.stderr)
    assert "step 6" in warned and "bits/byte, without an interval, of the text that" in warned
    assert f"**{error.removeprefix('error: ')} " in (run.evaluation / "report.md").read_text()
    assert (run.export("plain") / "README.md").read_text().count(worse) == 1
    measured = of_config("evaluate", *asked)
    assert measured.exit_code == 0
    last = measured.stdout.splitlines()[-2:]
    assert last[0].startswith("report: ") and last[1].startswith(f"warning: {worse}")
    assert "\nEnglish, retention, also replay " in measured.stdout
    shutil.rmtree(config.output_dir.parent / "tokens")
    again = of_config("evaluate", *asked)
    assert "so held-out text is not looked for in it" in again.stdout
    assert not read_json(run.evaluation / "report.json")["searched_training_text"]


def test_a_part_of_a_run_is_no_run_and_the_whole_is_named(
    finished: RunConfig, scale: Scale
) -> None:
    for part in ("final", "export/plain"):
        for verb in ("run", "evaluate", "plan"):
            told = scale(verb, finished.output_dir / part).error()
            assert (
                f"is a part of a run, and no run itself; give the run, {finished.output_dir}"
                in told
            )
    assert not (finished.output_dir / "final" / "upscaled").exists()


def test_an_expansions_plain_export_is_said_to_be_a_poor_base(
    finished: RunConfig, of_config: Scale, tmp_path: Path
) -> None:
    base = finished.output_dir / "export" / "plain"
    other = (f"model.base={base}", f"output_dir={tmp_path / 'other'}")
    assert "is the plain export of a widened model" in of_config("upscale", *other).stdout


def test_the_next_step_of_a_run_with_several_exports_names_one(
    finished: RunConfig, of_config: Scale
) -> None:
    assert f"scale serve {finished.output_dir}\n" in of_config("run").stdout
    done = of_config("run", "export.dtype=bfloat16")
    assert f"scale serve {finished.output_dir / 'export' / 'plain-bfloat16'}\n" in done.stdout


def test_a_finished_run_goes_on_where_the_change_is_accepted_as_the_refusal_says(
    finished: RunConfig, of_config: Scale
) -> None:
    assert "(--accept train.max_steps)" in of_config("run", "train.max_steps=14").error()
    # `evaluate` does not know that option.
    assert "--accept" not in of_config("evaluate", "train.max_steps=14").error()
    assert of_config("run", "train.max_steps=14", "--accept", "train.max_steps").exit_code == 0
    position = read_json(finished.output_dir / "final" / "position.json")
    assert position["step"] == 14
    report = read_json(RunFolder(finished.output_dir).evaluation / "report.json")
    assert report["num_tokens_trained"] == position["num_tokens"]


def test_a_checkpoint_is_evaluated_as_if_the_run_had_ended_with_it_and_the_runs_report_stays(
    finished: RunConfig, scale: Scale
) -> None:
    run = RunFolder(finished.output_dir)
    before = (run.evaluation / "report.json").read_bytes()
    last = run.checkpoint(finished.train.max_steps)
    assert scale("evaluate", last).exit_code == 0
    (written,) = run.evaluations.iterdir()
    assert written.name == last.name
    of_checkpoint, of_final = (
        read_json(folder / "report.json") for folder in (written, run.evaluation)
    )
    assert of_checkpoint["corpora"] == of_final["corpora"]
    assert of_checkpoint["step"] == finished.train.max_steps
    shutil.rmtree(run.final)
    assert scale("evaluate", last, "evaluation.perplexity.0.max_documents=2").exit_code == 0
    assert read_json(written / "report.json")["corpora"][0]["num_documents"] == 2
    assert (run.evaluation / "report.json").read_bytes() == before


def test_a_changed_config_is_refused_with_what_may_be_accepted(
    finished: RunConfig, of_config: Scale
) -> None:
    shutil.rmtree(RunFolder(finished.output_dir).final)
    asked = ("run", "train.max_steps=14", "train.log_every_steps=3")
    assert "(--accept train.max_steps)" in of_config(*asked).error()
    told = of_config(*asked, "--accept", "seed").error()
    assert told.startswith("--accept seed: only these may change")
    # What changes freely may be named too.
    named = of_config(*asked, "--accept", "train.log_every_steps").error()
    assert "(--accept train.max_steps)" in named
    refused = of_config("generate", "--prompt", "x").error()
    newest = RunFolder(finished.output_dir).checkpoint(12)
    assert refused.endswith(f"scale generate {newest}")
    assert "run `scale train --resume auto` first" in of_config("export").error()


def test_a_finished_run_is_measured_again_where_the_held_out_text_has_changed(
    finished: RunConfig, of_config: Scale, tmp_path: Path
) -> None:
    text = tmp_path / "held-out.txt"
    asked = f"evaluation.perplexity.0.path={text}", "evaluation.perplexity.0.max_documents=null"

    def documents_in_report() -> int:
        assert of_config("run", *asked).exit_code == 0
        report = read_json(RunFolder(finished.output_dir).evaluation / "report.json")
        return int(report["corpora"][0]["num_documents"])

    text.write_text("Once upon a time.\n\nThe end.\n")
    assert documents_in_report() == 2
    text.write_text("Once upon a time.\n\nThe end.\n\nAnd once more.\n")
    assert documents_in_report() == 3


def test_the_folder_of_a_run_stands_for_its_config_wherever_it_lies(
    finished: RunConfig, scale: Scale, tmp_path: Path
) -> None:
    moved = finished.output_dir.rename(tmp_path / "moved")
    for line in (
        "evaluate",
        "export export.format=plain --dtype bfloat16",
        "verify",
        "plan --flops 1e12",
        f"compare --output {tmp_path}/compared",
    ):
        verb, *options = line.split()
        assert scale(verb, moved, *options).exit_code == 0
    assert (moved / "export/plain-bfloat16").is_dir()
    assert not finished.output_dir.exists()
    assert scale("evaluate", tmp_path).error(), "no run"


def test_the_dtype_of_an_export_is_the_one_asked_for_on_the_command_line(
    finished: RunConfig, scale: Scale
) -> None:
    run = finished.output_dir
    assert scale("export", run, "export.format=plain", "--dtype", "bfloat16").exit_code == 0
    folder = RunFolder(run).export("plain", "bfloat16")
    dtypes = {tensor.dtype for tensor in load_tensors(folder / "model.safetensors").values()}
    assert dtypes == {torch.bfloat16}
    assert "'float32', 'bfloat16', 'float16'" in scale("export", run, "--dtype", "int8").stderr
