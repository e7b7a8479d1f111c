"""Attacks by configs, bases, folders, places and names: none runs code, or writes or reads outside."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from scale_cli.commands.run import run_pipeline
from tests.command_line import Scale
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
    run_pipeline(small_run(folder, stories, train=TWO_STEPS, evaluation=evaluation))
    return folder


@pytest.fixture
def finished(finished_once: Path, tmp_path: Path, stories: Path) -> Configured:
    """A function that writes the config of a finished run, which lies in `tmp_path`, with other sections if need be."""
    shutil.copytree(finished_once / "run", tmp_path / "run")
    news = {"name": "news", "path": str(finished_once / "news.txt"), "language": "en"}
    fixed = {"train": TWO_STEPS, "corpus": {"sources": [news]}}
    return lambda **sections: write_config(tmp_path, stories, **fixed, **sections)


# What is more than data


def test_the_payloads_bite(canary: Path) -> None:
    pickle.loads(evil_pickle(canary))  # noqa: S301 (that is the point)
    canary.rmdir()
    exec(evil_python(canary))  # noqa: S102 (the attack)
    assert canary.is_dir()


def test_pickled_weights_and_the_code_of_a_base_are_not_run(
    scale: Scale, base: Path, tmp_path: Path, canary: Path
) -> None:
    config = write_config(tmp_path, base)
    (base / "modeling_evil.py").write_bytes(evil_python(canary))
    edit_json(base / "config.json", REMOTE_MODEL)
    assert scale("upscale", config).exit_code == 0, "a family of ours, without that code"
    shutil.rmtree(tmp_path / "run")
    (base / "model.safetensors").unlink()
    (base / "pytorch_model.bin").write_bytes(evil_pickle(canary))
    assert "model.base" in scale("upscale", config).error()
    edit_json(base / "config.json", {"model_type": "evil", "architectures": ["Evil"]})
    assert "model.base" in scale("upscale", config).error()
    assert not canary.exists() and not (tmp_path / "run").exists()


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


@pytest.mark.parametrize("verb", ["evaluate", "run"])
def test_a_benchmarks_file_that_names_python_is_not_read_unless_it_is_trusted(
    scale: Scale, finished: Configured, tmp_path: Path, canary: Path, verb: str
) -> None:
    benchmark = write_benchmark(tmp_path)
    (tmp_path / "utils.py").write_bytes(evil_python(canary))
    with (tmp_path / "mine.yaml").open("a") as file:
        file.write("doc_to_text: !function utils.said\n")
    config = finished(evaluation={"benchmarks": [benchmark]})
    shutil.rmtree(tmp_path / "run" / "evaluation")
    told = scale(verb, config).error()
    assert f"{tmp_path / 'mine.yaml'} may run code; if you trust it, give --trust-tasks" in told
    assert not canary.exists()


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
    exported = tmp_path / "run" / "export" / "plain"
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
    "upscaled checkpoints checkpoints/step-00000001 final evaluation export export/plain tokens"
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
