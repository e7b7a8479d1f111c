"""Attacks by what is read: none runs code, writes outside output_dir, or reads what it names elsewhere."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from scale_cli.storage.atomic import write_json
from tests.torture.command_line import Scale, command_line


class _Evil:
    """What a pickle can do."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._canary),)


def evil_pickle(canary: Path) -> bytes:
    return pickle.dumps(_Evil(canary))


def evil_python(canary: Path) -> str:
    """A module that leaves its mark when it is imported, whatever class is asked of it."""
    return f"import os\nos.mkdir({str(canary)!r})\nclass Evil:\n    pass\n"


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Scale:
    return command_line(monkeypatch, capfd)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """What exists only where an attack has come through."""
    return tmp_path / "canary"


@pytest.fixture
def base(shared_data: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared_data / "ckpt-stories260K" / "hf", tmp_path / "base"))


def write_config(folder: Path, base: Path, news: Path | None = None, **changes: Any) -> Path:
    if news is None:
        news = folder / "news.txt"
        news.write_text("Once upon a time there was a cat.\n\nThe cat was happy.\n", encoding="utf-8")
    source = {"name": "news", "path": str(news), "language": "en"}
    tree = {
        "output_dir": str(folder / "run"),
        "model": {"base": str(base)},
        "corpus": {"sequence_length": 16, "sources": [source]},
        "train": {"max_steps": 2, "global_batch_size": 1, "micro_batch_size": 1, "save_every_steps": 1},
        "evaluation": {"perplexity": [source | {"role": "retention"}], "bootstrap_resamples": 100},
        **changes,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return folder / "config.yaml"


@pytest.fixture(scope="module")
def finished_once(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the four verbs."""
    from scale_cli.config.load import load_config
    from scale_cli.pipeline import run_pipeline

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


def reseal(folder: Path) -> None:
    """Write the manifest that a folder would have, had it been written as it is now."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "manifest.json"]
    entries = {
        file.relative_to(folder).as_posix(): {
            "bytes": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in files
    }
    write_manifest(folder, entries)


def write_manifest(folder: Path, entries: dict[str, Any]) -> None:
    """Put other files into a folder's manifest, and its own hash with them."""
    tree = json.loads((folder / "manifest.json").read_text(encoding="utf-8")) | {"files": entries}
    tree.pop("manifest_sha256", None)
    sha256 = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    write_json(folder / "manifest.json", tree | {"manifest_sha256": sha256})


def edit_json(path: Path, **changes: Any) -> None:
    tree = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(tree | changes), encoding="utf-8")


def test_the_payloads_bite(canary: Path) -> None:
    pickle.loads(evil_pickle(canary))  # noqa: S301 (that is the point)
    canary.rmdir()
    exec(evil_python(canary))
    assert canary.is_dir()


# A base that is more than weights


def pickled_weights(base: Path, canary: Path) -> None:
    (base / "model.safetensors").write_bytes(evil_pickle(canary))


def pickled_weights_only(base: Path, canary: Path) -> None:
    (base / "model.safetensors").unlink()
    (base / "pytorch_model.bin").write_bytes(evil_pickle(canary))


def torch_weights_only(base: Path, canary: Path) -> None:
    (base / "model.safetensors").unlink()
    torch.save({"model.norm.weight": _Evil(canary)}, base / "pytorch_model.bin")


def remote_model_of_a_known_family(base: Path, canary: Path) -> None:
    (base / "modeling_evil.py").write_text(evil_python(canary), encoding="utf-8")
    auto_map = {"AutoConfig": "modeling_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    edit_json(base / "config.json", auto_map=auto_map)


def remote_model_of_its_own_family(base: Path, canary: Path) -> None:
    remote_model_of_a_known_family(base, canary)
    edit_json(base / "config.json", model_type="evil", architectures=["Evil"])


def remote_tokenizer(base: Path, canary: Path) -> None:
    (base / "tokenization_evil.py").write_text(evil_python(canary), encoding="utf-8")
    names = ["tokenization_evil.Evil", "tokenization_evil.Evil"]
    edit_json(base / "tokenizer_config.json", auto_map={"AutoTokenizer": names}, tokenizer_class="Evil")


def pickled_tokenizer(base: Path, canary: Path) -> None:
    (base / "tokenizer.json").unlink()
    for name in ("tokenizer.model", "vocab.json", "tokenizer.pkl", "added_tokens.json"):
        (base / name).write_bytes(evil_pickle(canary))


def custom_generation(base: Path, canary: Path) -> None:
    (base / "custom_generate").mkdir()
    (base / "custom_generate" / "generate.py").write_text(evil_python(canary), encoding="utf-8")
    edit_json(base / "generation_config.json", custom_generate=str(base), do_sample=True)


def escaping_chat_template(base: Path, canary: Path) -> None:
    template = "{{ cycler.__init__.__globals__.os.mkdir(" + repr(str(canary)) + ") }}"
    edit_json(base / "tokenizer_config.json", chat_template=template)
    (base / "chat_template.jinja").write_text(template, encoding="utf-8")


def kernel_of_the_hub(base: Path, canary: Path) -> None:
    edit_json(base / "config.json", attn_implementation="evil/kernel", _attn_implementation="evil/kernel")


def pickled_adapter(base: Path, canary: Path) -> None:
    (base / "adapter_model.bin").write_bytes(evil_pickle(canary))
    edit_json(base / "adapter_config.json", peft_type="LORA", base_model_name_or_path=str(base), r=1)


def quantised_by_code(base: Path, canary: Path) -> None:
    (base / "evil.py").write_text(evil_python(canary), encoding="utf-8")
    edit_json(base / "config.json", quantization_config={"quant_method": "evil.Evil"})


BASE_ATTACKS = [
    pickled_weights,
    pickled_weights_only,
    torch_weights_only,
    remote_model_of_a_known_family,
    remote_model_of_its_own_family,
    remote_tokenizer,
    pickled_tokenizer,
    custom_generation,
    escaping_chat_template,
    kernel_of_the_hub,
    pickled_adapter,
    quantised_by_code,
]
# What a family of ours has without that code, and what no verb asks for, is no error.
HARMLESS = {
    remote_model_of_a_known_family,
    remote_tokenizer,
    custom_generation,
    escaping_chat_template,
    quantised_by_code,
}


@pytest.mark.parametrize("attack", BASE_ATTACKS, ids=lambda attack: attack.__name__)
def test_no_code_of_a_base_is_run(
    scale: Scale, base: Path, tmp_path: Path, canary: Path, attack: Callable[[Path, Path], None]
) -> None:
    attack(base, canary)
    config = write_config(tmp_path, base)
    done = scale("upscale", config)
    assert not canary.exists()
    if done.exit_code == 0:
        assert attack in HARMLESS
        assert scale("train", config).exit_code == 0
        assert scale("generate", tmp_path / "run", "--prompt", "One", "--max-new-tokens", "2").exit_code == 0
    else:
        assert "model.base" in done.error()
        assert done.exit_code == 2
        assert not (tmp_path / "run").exists()
    assert not canary.exists()


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/elsewhere.safetensors", "a/b.safetensors", ["x"]])
def test_an_index_of_shards_names_only_files_of_its_folder(scale: Scale, base: Path, tmp_path: Path, name: Any) -> None:
    (base / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    edit_json(base / "model.safetensors.index.json", metadata={}, weight_map={"model.norm.weight": name})
    done = scale("upscale", write_config(tmp_path, base))
    assert "model.safetensors.index.json names" in done.error()
    assert done.exit_code == 2


def header(size: int, tensors: dict[str, Any]) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", size or len(text)) + text


def tensor(start: int, end: int, num: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [num], "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "content",
    [
        header(2**63, {}),
        header(100_000_001, {}) + bytes(1000),
        header(0, {"a": tensor(0, 16, 4), "b": tensor(8, 24, 4)}) + bytes(24),
        header(0, {"a": tensor(0, 2**40, 2**38)}),
        header(0, {"a": tensor(-4, 4, 1)}) + bytes(8),
        header(0, {"a": {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]}}),
        struct.pack("<Q", 100_000) + b"[" * 100_000,
    ],
    ids=["longest header", "long header", "overlapping", "huge", "negative", "overflowing", "deep"],
)
def test_a_safetensors_bomb_is_one_error(scale: Scale, base: Path, tmp_path: Path, content: bytes) -> None:
    (base / "model.safetensors").write_bytes(content)
    done = scale("upscale", write_config(tmp_path, base))
    assert done.error().startswith("model.base: ")
    assert done.exit_code == 2
    assert not (tmp_path / "run").exists()


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
    row = {"query": "One", "choices": ["a", "b"], "gold": 0}
    (tmp_path / "items.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    prompt = template.format(canary=str(canary))
    benchmark = {"name": "mine", "path": str(tmp_path / "items.jsonl"), "language": "en", "prompt": prompt}
    done = scale("evaluate", finished(evaluation={"benchmarks": [benchmark]}))
    assert "evaluation.benchmarks: mine: prompt: " in done.stderr
    assert done.exit_code == 2
    assert not canary.exists()


@pytest.mark.parametrize("name", ["../../evil", "/etc/passwd", "a/b", "..", ".hidden", "a\nb", "a" * 65, "<script>"])
@pytest.mark.parametrize("section", ["corpus.sources.0", "evaluation.perplexity.0", "evaluation.benchmarks.0"])
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
    content = Path(final, name).read_bytes()
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_manifest(final, manifest["files"])
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

PLACES = ["upscaled", "checkpoints", "checkpoints/step-00000001", "final", "evaluation", "export", "export/llama"]
PLACES += ["tokens", "metrics.jsonl", ".metrics.jsonl.partial", ".final.partial", "tokens/.news.unfinished/tokens.bin"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("verb", ["upscale", "prepare", "train", "evaluate", "export", "run"])
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


@pytest.mark.parametrize("member", ["../evil.jsonl", "/tmp/evil.jsonl", "a/../../evil.jsonl", "C:\\evil.jsonl"])
def test_nothing_of_a_zip_is_unpacked(scale: Scale, finished: Configured, tmp_path: Path, member: str) -> None:
    with zipfile.ZipFile(tmp_path / "items.zip", "w") as archive:
        archive.writestr(member, json.dumps({"sentence_good": "One cat.", "sentence_bad": "One cats."}) + "\n")
    benchmark = {"name": "pairs", "path": str(tmp_path / "items.zip"), "language": "en"}
    config = finished(evaluation={"benchmarks": [benchmark]})
    before = {path for path in tmp_path.rglob("*") if "run" not in path.parts}
    done = scale("evaluate", config)
    assert done.exit_code == 0, done.stderr
    assert {path for path in tmp_path.rglob("*") if "run" not in path.parts} == before
    items = [file.name for file in (tmp_path / "run" / "evaluation" / "items").iterdir()]
    assert items == ["pairs.jsonl"]
    assert not Path("/tmp/evil.jsonl").exists()


def test_a_zip_bomb_is_refused(scale: Scale, finished: Configured, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "items.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("items.jsonl", b" " * (1 << 28) + b" ")
    benchmark = {"name": "pairs", "path": str(tmp_path / "items.zip"), "language": "en"}
    done = scale("evaluate", finished(evaluation={"benchmarks": [benchmark]}))
    assert "items.zip/items.jsonl: unpacks to more than" in done.error()
    assert done.exit_code == 2


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


def test_a_run_is_named_in_a_report_as_text(scale: Scale, finished: Configured, tmp_path: Path) -> None:
    name = "<script>alert(1)</script>\"'&"
    other = tmp_path / name.replace("/", "-")
    shutil.copytree(tmp_path / "run", other)
    done = scale("compare", tmp_path / "run", other, "--output", tmp_path / "report")
    assert done.exit_code == 0, done.stderr
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
