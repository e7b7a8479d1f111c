"""Attacks by configs, folders, places and names: none runs code, or writes or reads outside."""

import json
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from scale_cli.commands.run import run_pipeline
from scale_cli.config.sources import BenchmarkSource
from scale_cli.evaluation.lm_eval_heads import open_benchmarks
from tests.command_line import Scale
from tests.evaluation.task_files import add_task, know_only
from tests.small_runs import held_out, small_run, write_config
from tests.torture.attacker import (
    REMOTE_MODEL,
    edit_json,
    evil_pickle,
    evil_python,
    reseal,
    write_benchmark,
)

TWO_STEPS = {"max_steps": 2, "save_every_steps": 1}
Configured = Callable[..., Path]


@pytest.fixture(scope="module")
def finished_once(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of the four verbs, beside its text."""
    folder = tmp_path_factory.mktemp("finished")
    kept = held_out("news", folder / "news.txt")
    evaluation = {"perplexity": [kept], "bootstrap_resamples": 100}
    run_pipeline(small_run(folder, stories, train=TWO_STEPS, evaluation=evaluation), lambda _: None)
    return folder


@pytest.fixture
def finished(finished_once: Path, tmp_path: Path, stories: Path) -> Configured:
    """A function that writes the config of a finished run, which lies in `tmp_path`, with other sections if need be."""
    shutil.copytree(finished_once / "run", tmp_path / "run")
    news = {"name": "news", "path": str(finished_once / "news.txt"), "language": "en"}
    fixed = {"train": TWO_STEPS, "corpus": {"sources": [news]}}
    return lambda **sections: write_config(tmp_path, stories, **fixed, **sections)


# What is more than data


def test_a_yaml_tag_runs_nothing(scale: Scale, base: Path, tmp_path: Path, canary: Path) -> None:
    config = write_config(tmp_path, base)
    good = config.read_text()
    for tag in (
        "!!python/object/apply:os.mkdir [{}]",
        "!!python/object/new:os.mkdir [[{}]]",
        "!!python/name:os.mkdir",
    ):
        evil = tag.format(canary)
        assert "not valid YAML" in scale("upscale", config, f"seed={evil}").error()
        config.write_text(f"seed: {evil}\n" + good)
        assert scale("upscale", config).error().startswith(f"{config}:1: not valid YAML")
        config.write_text(good)
    assert not canary.exists()


def test_a_yaml_tag_in_a_run_or_in_a_task_of_a_benchmark_runs_nothing(
    scale: Scale, finished: Configured, tmp_path: Path, canary: Path
) -> None:
    evil = f"seed: !!python/object/apply:os.mkdir [{canary}]\n"
    config = finished(evaluation={"benchmarks": [write_benchmark(tmp_path)]})
    final = tmp_path / "run" / "final"
    for tagged in (evil, "doc_to_text: !function os.getcwd\n"):
        (tmp_path / "mine.yaml").write_text(tagged)
        assert re.search(r"mine\.yaml(:1)?: not valid YAML", scale("evaluate", config).error())
    (final / "scale.yaml").write_text(evil)
    reseal(final)
    for arguments in (("generate", final, "--prompt", "x"), ("verify", final)):
        done = scale(*arguments)
        assert done.exit_code in (2, 3) and "not valid YAML" in done.stdout + done.stderr
    assert not canary.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{{{ cycler.__init__.__globals__.os.mkdir({canary!r}) }}}}",
        "{{{{ query.format.__func__ }}}}",
        "{{{{ range(10 ** 9) | list }}}}",
        "{{% include '/etc/passwd' %}}",
    ],
)
def test_the_template_of_a_benchmark_runs_in_a_sandbox(
    scale: Scale, finished: Configured, tmp_path: Path, canary: Path, template: str
) -> None:
    benchmark = write_benchmark(tmp_path, doc_to_text=template.format(canary=str(canary)))
    config = finished(evaluation={"benchmarks": [benchmark]})
    assert f"{tmp_path / 'mine.yaml'}: " in scale("evaluate", config).error()
    assert not canary.exists()


def test_a_metric_of_lm_evals_that_lies_in_the_folder_is_not_run(
    tmp_path: Path, canary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task of lm-eval asks `evaluate` for f1 by its name, which would first look for f1/f1.py here."""
    (tmp_path / "f1").mkdir()
    (tmp_path / "f1" / "f1.py").write_bytes(evil_python(canary))
    f1 = {"metric": "f1", "aggregation": "mean", "higher_is_better": True, "hf_evaluate": True}
    know_only(tmp_path, monkeypatch)
    item = {"question": "One", "choices": ["cat", "dog"], "answer": 0}
    add_task(tmp_path, "words", [item], metric_list=[f1])
    monkeypatch.chdir(tmp_path)
    (skipped,) = open_benchmarks([BenchmarkSource.model_validate("words")]).skipped
    assert "f1/f1.py" in skipped.reason
    assert not canary.exists()


def test_nothing_of_a_zip_lands_outside_and_nothing_of_it_stays(
    scale: Scale, finished: Configured, tmp_path: Path
) -> None:
    with zipfile.ZipFile(tmp_path / "items.jsonl", "w") as archive:
        for member in ("../evil.jsonl", "/tmp/evil.jsonl", "a/../../evil.jsonl", "C:\\evil.jsonl"):
            archive.writestr(member, '{"query": "One", "choices": ["a", "b"], "gold": 0}\n')
    config = finished(evaluation={"benchmarks": [write_benchmark(tmp_path)]})

    def outside() -> set[Path]:
        return {path for path in tmp_path.rglob("*") if "run" not in path.parts}

    before = outside()
    assert scale("evaluate", config).exit_code in (0, 2)
    assert outside() == before
    assert not Path("/tmp/evil.jsonl").exists()


@pytest.mark.parametrize("script", ["corpus.py", "dataset.py"])
def test_a_loading_script_of_a_dataset_is_not_run(
    scale: Scale, base: Path, tmp_path: Path, canary: Path, script: str
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / script).write_bytes(evil_python(canary))
    source = json.dumps({"name": "x", "dataset": str(folder), "language": "en"})
    told = scale("prepare", write_config(tmp_path, base), f"corpus.sources.0={source}").error()
    assert f"x: the dataset {folder} cannot be loaded" in told
    assert not canary.exists()


# Folders of ours that were tampered with, manifest and all


@pytest.mark.parametrize("name", ["trained.safetensors", "optimiser.safetensors"])
def test_a_pickle_in_a_checkpoint_is_not_read(
    scale: Scale, finished: Configured, tmp_path: Path, canary: Path, name: str
) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    config = finished()
    shutil.rmtree(tmp_path / "run" / "final")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000002")
    (checkpoint / name).write_bytes(evil_pickle(canary))
    reseal(checkpoint)
    error = scale("train", config, "--resume", "auto").error(1)
    assert "damaged" in error and str(checkpoint) in error
    assert not canary.exists()
    assert not (tmp_path / "run" / "final").exists()


@pytest.mark.usefixtures("finished")
def test_an_export_with_code_is_opened_without_it_and_without_asking(
    scale: Scale, tmp_path: Path, canary: Path
) -> None:
    exported = tmp_path / "run" / "export" / "llama"
    (exported / "modeling_evil.py").write_bytes(evil_python(canary))
    evil = {"model_type": "evil", "architectures": ["Evil"]}
    edit_json(exported / "config.json", REMOTE_MODEL | evil)
    reseal(exported)
    for exit_code, verb, *options in ((1, "generate", "--prompt", "x"), (3, "verify")):
        done = scale(verb, exported, *options)
        said = done.stdout + done.stderr
        assert done.exit_code == exit_code
        assert f"{exported}: cannot be loaded: " in said and "[y/N]" not in said
    assert not canary.exists()


@pytest.mark.usefixtures("finished")
def test_a_manifest_does_not_lead_out_of_its_folder(scale: Scale, tmp_path: Path) -> None:
    final, outside = tmp_path / "run" / "final", tmp_path / "outside"
    outside.mkdir()
    for secret in (tmp_path / "run" / "secret", outside / "file"):
        secret.write_text("secret")
    (final / "link").symlink_to(tmp_path / "run" / "secret")
    (final / "linked").symlink_to(outside)
    assert f"{final / 'link'}: is not a file that scale wrote" in scale("verify", final).stdout
    for name in ("../secret", "/etc/hostname", "link", "linked/file", "./base.json"):
        reseal(final, name)
        done = scale("verify", final)
        assert f"{name} points outside the folder" in done.stdout
        assert done.exit_code == 3


# Places and names that lead elsewhere

FOLDERS = (
    "upscaled checkpoints checkpoints/step-00000001 final evaluation export export/llama tokens"
)
FILES = "metrics.jsonl .metrics.jsonl.partial .final.partial tokens/.news.unfinished/tokens.bin"
OTHERS = ("upscale", "prepare", "evaluate", "export", "run")


# A verb looks at all places, by one function, before it does anything.
@pytest.mark.parametrize(
    ("place", "verb"),
    [
        *((place, "train") for place in f"{FOLDERS} {FILES}".split()),
        *(("final", verb) for verb in OTHERS),
    ],
)
def test_a_link_out_of_output_dir_is_refused_before_anything_is_written(
    scale: Scale, base: Path, tmp_path: Path, place: str, verb: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    link = tmp_path / "run" / place
    link.parent.mkdir(parents=True)
    link.symlink_to(outside / "precious" if place in FILES.split() else outside)
    told = scale(verb, write_config(tmp_path, base)).error()
    assert told.startswith(f"{link}: points outside output_dir")
    assert {file.name: file.read_text() for file in outside.iterdir()} == {"precious": "precious"}


def test_a_link_that_stays_inside_is_no_escape(scale: Scale, base: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "elsewhere").mkdir(parents=True)
    (tmp_path / "run" / "tokens").symlink_to("elsewhere")
    (tmp_path / "link").symlink_to("run")  # output_dir itself may be one
    config = write_config(tmp_path, base)
    assert scale("prepare", config, f"output_dir={tmp_path / 'link'}").exit_code == 0
    assert list((tmp_path / "run" / "elsewhere").iterdir())


def test_a_name_of_a_source_is_no_path(scale: Scale, base: Path, tmp_path: Path) -> None:
    """The three sections have one type of names."""
    config = write_config(tmp_path, base)
    for name in ("/etc/passwd", "a/b", "..", ".hidden", "a\nb", "a" * 65, "<script>"):
        told = scale("prepare", config, f"corpus.sources.0.name={json.dumps(name)}").error()
        assert "corpus.sources.0.name" in told
    evil = "{name: ../../evil, path: x.txt, language: en, role: retention}"
    for section, entry in (("perplexity", evil), ("benchmarks", "../../evil")):
        told = scale("prepare", config, f"evaluation.{section}=[{entry}]").error()
        assert f"{section}.0.name" in told


# What is shown of names and texts that others chose

RED = "\x1b[31mred\x1b]0;title\x07\x9b2J"


def test_control_characters_of_a_file_name_do_not_reach_the_terminal(
    scale: Scale, base: Path, tmp_path: Path
) -> None:
    (tmp_path / f"{RED}.jsonl").write_text('{"text": "One."}\n' * 3 + "{\n")
    config = write_config(tmp_path, base)
    path = f"corpus.sources.0.path={json.dumps(str(tmp_path / '*.jsonl'))}"
    refused = scale("prepare", config, path)
    kept = scale("prepare", config, path, "corpus.max_bad_fraction=1.0")
    assert "\\x1b[31mred" in refused.error()
    assert "\\x1b[31mred" in kept.stdout
    assert kept.exit_code == 0
    for done in (refused, kept):
        assert not {"\x1b", "\x07", "\x9b"} & set(done.stdout + done.stderr.replace("\x1b[A", ""))
