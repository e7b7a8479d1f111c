"""A token in the environment is in nothing that is written or said, and no pickle is read or written."""

import ast
import pickle
import secrets
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Scale
from tests.small_runs import write_config
from tests.torture.attacker import write_benchmark

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path for part in ("scale_cli", "scripts") for path in (REPOSITORY / part).rglob("*.py")
)
NAMES = [
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "SCALE_SECRET",
]


def write_whole_config(folder: Path, base: Path) -> Path:
    """Write a config that reads, evaluates and exports."""
    evaluation = {"benchmarks": [write_benchmark(folder)], "bootstrap_resamples": 100}
    return write_config(folder, base, evaluation=evaluation, export={"format": "transformers"})


def plant(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """Put tokens into the environment, and one where `hf auth login` leaves it; return all of them."""
    planted = {name: f"hf_{secrets.token_hex(17)}" for name in NAMES}
    stored = f"hf_{secrets.token_hex(17)}"
    (folder / "hub").mkdir()
    (folder / "hub" / "token").write_text(stored)
    for name, value in (planted | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub")}).items():
        monkeypatch.setenv(name, value)
    return [*planted.values(), stored]


def files_of(run: Path) -> list[Path]:
    return [file for file in run.rglob("*") if file.is_file()]


def assert_not_repeated(planted: list[str], said: str, run: Path) -> None:
    searched = [said.encode()]
    for file in files_of(run):
        searched += [file.read_bytes(), str(file).encode()]
    assert not [
        secret for secret in planted if any(secret.encode() in content for content in searched)
    ]


def test_a_password_in_a_url_is_not_repeated(scale: Scale, tmp_path: Path) -> None:
    config = write_whole_config(tmp_path, tmp_path / "absent")
    keys = "model.base corpus.sources.0.path output_dir corpus.cache_dir corpus.sources.9.path a.b"
    for key in keys.split():
        done = scale("upscale", config, f"{key}=https://user:hunter2@example.org/x.jsonl")
        assert "hunter2" not in done.stdout + done.error()
    assert not (tmp_path / "run").exists()


def refuse_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of files, that is: several processes of one run talk to each other in pickles, which is not tried here."""

    def refused(*_: object, **__: object) -> Any:
        raise AssertionError("a pickle")

    class NoUnpickler(pickle.Unpickler):
        load = refused

    class NoPickler(pickle.Pickler):
        dump = refused

    monkeypatch.setattr(pickle, "Unpickler", NoUnpickler)
    monkeypatch.setattr(pickle, "Pickler", NoPickler)
    for name in ("pickle.load", "pickle.dump", "torch.load", "torch.save"):
        monkeypatch.setattr(name, refused)


def test_a_whole_run_repeats_no_token_of_the_environment_and_neither_reads_nor_writes_a_pickle(
    monkeypatch: pytest.MonkeyPatch,
    scale: Scale,
    tmp_path: Path,
    stories: Path,
) -> None:
    config, run = write_whole_config(tmp_path, stories), tmp_path / "run"
    planted = plant(monkeypatch, tmp_path)
    said = ""
    with monkeypatch.context() as patch:
        refuse_pickles(patch)
        adapter = ["export", config, "export.format=adapter"]
        for command in (["run", config, "--trust-tasks"], ["verify", run], adapter):
            done = scale(*command)
            assert done.exit_code == 0, done.stderr
            said += done.stdout + done.stderr
    written = files_of(run)
    assert run / "export" / "transformers" / "config.json" in written
    assert_not_repeated(planted, said, run)
    kinds = ".safetensors .json .jsonl .yaml .md .html .png .svg .py .bin .jinja .lock"
    assert {file.suffix for file in written} <= {"", *kinds.split()}
    pickles = (b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5", b"PK")  # the last is torch.save's
    assert not [file for file in written if file.read_bytes().startswith(pickles)]


def test_no_call_of_ours_asks_for_what_runs_code() -> None:
    """What ruff's rules in pyproject.toml do not see: pickles in arrays, code that comes with a model."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                called = ast.unparse(node.func)
                assert called != "__import__", path
                assert called not in ("np.load", "np.save") or "allow_pickle" in given, path
                for name in ("allow_pickle", "trust_remote_code"):
                    value = given.get(name)
                    assert not isinstance(value, ast.Constant) or value.value is False, path
