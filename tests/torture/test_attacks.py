"""Attacks by configs, folders, places and names: none runs code, or writes or reads outside."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_line import Scale
from tests.torture.attacker import (
    entry_of,
    evil_pickle,
    evil_python,
    remote_model_of_its_own_family,
    reseal,
    write_benchmark,
    write_config,
    write_manifest,
)


@pytest.fixture(scope="module")
def finished_once(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the four verbs."""
    from scale_cli.commands.run import run_pipeline
    from scale_cli.config.load import load_config

    folder = tmp_path_factory.mktemp("finished")
    config = write_config(folder, shared_data / "ckpt-stories260K" / "hf")
    run_pipeline(load_config(config), lambda _: None)
    return folder / "run"


Configured = Callable[..., Path]


@pytest.fixture
def finished(finished_once: Path, tmp_path: Path, shared_data: Path) -> Configured:
    """A function that writes the config of a finished run, which lies in `tmp_path`, with other sections if need be."""
    shutil.copytree(finished_once, tmp_path / "run")
    base, news = shared_data / "ckpt-stories260K" / "hf", finished_once.parent / "news.txt"
    return lambda **changes: write_config(tmp_path, base, news, **changes)


# Configs that are more than data


@pytest.mark.parametrize(
    "tag",
    ["!!python/object/apply:os.mkdir [{}]", "!!python/object/new:os.mkdir [[{}]]", "!!python/name:os.mkdir", "!ruby x"],
)
def test_a_yaml_tag_runs_nothing(scale: Scale, base: Path, tmp_path: Path, canary: Path, tag: str) -> None:
    config, evil = write_config(tmp_path, base), tag.format(canary)
    assert "not valid YAML" in scale("upscale", config, f"seed={evil}").error()
    config.write_text(f"seed: {evil}\n" + config.read_text(encoding="utf-8"), encoding="utf-8")
    done = scale("upscale", config)
    assert done.error().startswith(f"{config}:1: not valid YAML")
    assert not canary.exists()


@pytest.mark.parametrize("verb", ["generate", "verify"])
def test_a_yaml_tag_in_the_config_of_a_run_runs_nothing(
    scale: Scale, finished: Configured, tmp_path: Path, canary: Path, verb: str
) -> None:
    final = tmp_path / "run" / "final"
    (final / "scale.yaml").write_text(f"seed: !!python/object/apply:os.mkdir [{canary}]\n", encoding="utf-8")
    reseal(final)
    done = scale(verb, *([final, "--prompt", "x"] if verb == "generate" else [final]))
    assert "not valid YAML" in done.stdout + done.stderr
    assert done.exit_code in (2, 3)
    assert not canary.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{{{ cycler.__init__.__globals__.os.mkdir({canary!r}) }}}}",
        "{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}",
        "{{{{ query.__class__.__init__.__globals__ }}}}",
        "{{{{ query.format.__func__ }}}}",
        "{{{{ range(10 ** 9) | list }}}}",
        "{{% include '/etc/passwd' %}}",
    ],
)
def test_the_template_of_a_benchmark_runs_in_a_sandbox(
    scale: Scale, finished: Configured, tmp_path: Path, canary: Path, template: str
) -> None:
    benchmark = write_benchmark(tmp_path, doc_to_text=template.format(canary=str(canary)))
    done = scale("evaluate", finished(evaluation={"benchmarks": [benchmark]}))
    assert f"{tmp_path / 'mine.yaml'}: " in done.stderr
    assert done.exit_code == 2
    assert not canary.exists()


@pytest.mark.parametrize("tag", ["!function os.getcwd", "!!python/object/apply:os.getcwd []"])
def test_a_task_of_a_benchmark_names_no_code(scale: Scale, finished: Configured, tmp_path: Path, tag: str) -> None:
    benchmark = write_benchmark(tmp_path)
    (tmp_path / "mine.yaml").write_text(f"dataset_path: json\ndoc_to_text: {tag}\n", encoding="utf-8")
    done = scale("evaluate", finished(evaluation={"benchmarks": [benchmark]}))
    assert done.exit_code == 2
    assert re.search(r"mine\.yaml(:2)?: not valid YAML", done.stderr)


@pytest.mark.parametrize("member", ["../evil.jsonl", "/tmp/evil.jsonl", "a/../../evil.jsonl", "C:\\evil.jsonl"])
def test_nothing_of_a_zip_lands_outside_and_nothing_of_it_stays(
    scale: Scale, finished: Configured, tmp_path: Path, member: str
) -> None:
    with zipfile.ZipFile(tmp_path / "items.jsonl", "w") as archive:
        archive.writestr(member, json.dumps({"query": "One", "choices": ["a", "b"], "gold": 0}) + "\n")
    config = finished(evaluation={"benchmarks": [write_benchmark(tmp_path)]})
    before = {path for path in tmp_path.rglob("*") if "run" not in path.parts}
    done = scale("evaluate", config)
    assert done.exit_code in (0, 2), done.stderr
    assert {path for path in tmp_path.rglob("*") if "run" not in path.parts} == before
    assert not Path("/tmp/evil.jsonl").exists()


# The three sections have one type of names.
@pytest.mark.parametrize(
    ("section", "name"),
    [
        *(("corpus.sources.0", name) for name in ("/etc/passwd", "a/b", "..", ".hidden", "a\nb", "a" * 65, "<script>")),
        ("evaluation.perplexity.0", "../../evil"),
        ("evaluation.benchmarks.0", "../../evil"),
    ],
)
def test_a_name_of_a_source_is_no_path(scale: Scale, base: Path, tmp_path: Path, name: str, section: str) -> None:
    config = write_config(tmp_path, base)
    overrides = ["evaluation.benchmarks=[arc_easy]"] if "benchmarks" in section else []
    key = section if "benchmarks" in section else f"{section}.name"
    done = scale("prepare", config, *overrides, f"{key}={json.dumps(name)}")
    assert f"{section}.name" in done.error()
    assert done.exit_code == 2


# Folders of ours that were tampered with, manifest and all


@pytest.mark.parametrize("name", ["trained.safetensors", "optimiser.safetensors"])
def test_a_pickle_in_a_checkpoint_is_not_read(
    scale: Scale, finished: Configured, tmp_path: Path, canary: Path, name: str
) -> None:
    shutil.rmtree(tmp_path / "run" / "final")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000002")
    (checkpoint / name).write_bytes(evil_pickle(canary))
    reseal(checkpoint)
    done = scale("train", finished(), "--resume", "auto")
    assert "damaged" in done.error()
    assert str(checkpoint) in done.error()
    assert not canary.exists()
    assert not (tmp_path / "run" / "final").exists()


def test_an_export_with_code_is_opened_without_it_and_without_asking(
    scale: Scale, finished: Configured, tmp_path: Path, canary: Path
) -> None:
    exported = tmp_path / "run" / "export" / "llama"
    remote_model_of_its_own_family(exported, canary)
    reseal(exported)
    for arguments, exit_code in ((("generate", exported, "--prompt", "x"), 1), (("verify", exported), 3)):
        done = scale(*arguments)
        assert done.exit_code == exit_code
        assert f"{exported}: cannot be loaded: " in done.stdout + done.stderr
        assert "[y/N]" not in done.stdout + done.stderr
    assert not canary.exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "link", "linked/file", "./base.json"])
def test_a_manifest_does_not_lead_out_of_its_folder(
    scale: Scale, finished: Configured, tmp_path: Path, name: str
) -> None:
    final = tmp_path / "run" / "final"
    (tmp_path / "run" / "secret").write_text("secret", encoding="utf-8")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("secret", encoding="utf-8")
    (final / "link").symlink_to(tmp_path / "run" / "secret")
    (final / "linked").symlink_to(tmp_path / "outside")
    manifest = json.loads((final / "manifest.json").read_text(encoding="utf-8"))
    write_manifest(final, manifest["files"] | {name: entry_of(final / name)})
    done = scale("verify", final)
    assert f"{name} leads out of the folder" in done.stdout
    assert done.exit_code == 3


def test_a_link_beside_the_files_of_a_folder_is_told(scale: Scale, finished: Configured, tmp_path: Path) -> None:
    final = tmp_path / "run" / "final"
    (final / "more").symlink_to(tmp_path)
    done = scale("verify", final)
    assert f"{final / 'more'}: is not among the files that were written" in done.stdout
    assert done.exit_code == 3


# Places that lead elsewhere

PLACES = [
    "upscaled",
    "checkpoints",
    "checkpoints/step-00000001",
    "final",
    "evaluation",
    "export",
    "export/llama",
    "tokens",
    "metrics.jsonl",
    ".metrics.jsonl.partial",
    ".final.partial",
    "tokens/.news.unfinished/tokens.bin",
]


OTHERS = ("upscale", "prepare", "evaluate", "export", "run")


# A verb looks at all places, by one function, before it does anything.
@pytest.mark.parametrize(
    ("place", "verb"), [*((place, "train") for place in PLACES), *(("final", verb) for verb in OTHERS)]
)
def test_a_link_out_of_output_dir_is_refused_before_anything_is_written(
    scale: Scale, base: Path, tmp_path: Path, place: str, verb: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious", encoding="utf-8")
    link = tmp_path / "run" / place
    link.parent.mkdir(parents=True)
    link.symlink_to(outside / "precious" if place.endswith(("jsonl", "partial", "bin")) else outside)
    config = write_config(tmp_path, base)
    done = scale(verb, config)
    assert done.error().startswith(f"{link}: leads out of output_dir")
    assert done.exit_code == 2
    assert [file.name for file in outside.iterdir()] == ["precious"]
    assert (outside / "precious").read_text(encoding="utf-8") == "precious"


def test_a_link_that_stays_inside_is_no_escape(scale: Scale, base: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "elsewhere").mkdir(parents=True)
    (tmp_path / "run" / "tokens").symlink_to("elsewhere")
    (tmp_path / "link").symlink_to("run")  # output_dir itself may be one
    config = write_config(tmp_path, base)
    assert scale("prepare", config, f"output_dir={tmp_path / 'link'}").exit_code == 0
    assert list((tmp_path / "run" / "elsewhere").iterdir())


@pytest.mark.parametrize("script", ["{}.py", "dataset.py"])
def test_a_loading_script_of_a_dataset_is_not_run(
    scale: Scale, base: Path, tmp_path: Path, canary: Path, script: str
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / script.format(folder.name)).write_text(evil_python(canary), encoding="utf-8")
    config = write_config(tmp_path, base)
    source = json.dumps({"name": "x", "dataset": str(folder), "language": "en"})
    done = scale("prepare", config, f"corpus.sources.0={source}")
    assert f"x: the dataset {folder} cannot be loaded" in done.error()
    assert done.exit_code == 2
    assert not canary.exists()


# What is shown of names and texts that others chose

RED = "\x1b[31mred\x1b]0;title\x07\x9b2J"


def test_control_characters_of_a_file_name_do_not_reach_the_terminal(scale: Scale, base: Path, tmp_path: Path) -> None:
    (tmp_path / f"{RED}.jsonl").write_text('{"text": "One."}\n' * 3 + "{\n", encoding="utf-8")
    config = write_config(tmp_path, base)
    path = f"corpus.sources.0.path={json.dumps(str(tmp_path / '*.jsonl'))}"
    refused = scale("prepare", config, path)
    kept = scale("prepare", config, path, "corpus.max_bad_fraction=1.0")
    assert "\\x1b[31mred" in refused.error()
    assert "\\x1b[31mred" in kept.stdout
    assert kept.exit_code == 0
    for done in (refused, kept):
        assert not {"\x1b", "\x07", "\x9b"} & set(done.stdout + done.stderr.replace("\x1b[A", ""))
