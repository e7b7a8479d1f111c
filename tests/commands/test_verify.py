from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from scale_cli.commands.export import export
from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.commands.verify import FolderCheck, verify
from scale_cli.config.schema import RunConfig
from scale_cli.data.tokenise import NUM_BYTES
from scale_cli.errors import RunFolderError, VerificationError
from scale_cli.storage.atomic import new_folder, save_tensors
from tests.export.conftest import configured
from tests.widening import load_widened, lower_stories


@pytest.fixture(scope="module")
def finished(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A widened run with an export."""
    folder = tmp_path_factory.mktemp("verified")
    base = folder / "base"
    shutil.copytree(lower_stories(shared_data), base)
    config = configured(shared_data, folder / "run", {"variant": "route", "collaboration": {"layers": "top:1"}})
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"base": str(base)}),
            "corpus": config.corpus.model_copy(update={"cache_dir": None}),
        }
    )
    upscale(config)
    train(config, None, print)
    export(config)
    return config


@pytest.fixture
def run(finished: RunConfig, tmp_path: Path) -> Path:
    """A copy of that run, to be damaged."""
    shutil.copytree(finished.output_dir, tmp_path / "run")
    return tmp_path / "run"


def found(path: Path) -> dict[str, FolderCheck]:
    return {check.folder.name: check for check in verify(path).checks}


def test_a_run_that_nobody_touched_holds_everything(run: Path) -> None:
    checks = found(run)
    assert not [line for check in checks.values() for line in (*check.failed, *check.unchecked)]
    assert checks["final"].held == ["hashes", "base and its preservation", "token ledger", "log"]
    assert checks["llama"].held == ["hashes", "parity"]
    assert checks["upscaled"].held == ["hashes", "base and its preservation"]
    assert "ledger" in next(check for name, check in checks.items() if name.startswith("petitions")).held
    verify(run).require()


def test_one_flipped_bit_in_any_file_is_found_and_the_folder_named(run: Path) -> None:
    files = [file for file in run.rglob("*") if file.is_file() and file.name not in ("manifest.json", "metrics.jsonl")]
    assert len(files) > 20
    for file in files:
        content = file.read_bytes()
        file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        with pytest.raises(VerificationError) as caught:
            verify(file.parent).require()
        assert str(file.parent) in str(caught.value)
        file.write_bytes(content)


def test_a_file_that_came_in_later_is_found(run: Path) -> None:
    (run / "final" / "surprise.py").write_text("print('hello')")
    assert "surprise.py: is not among the files that were written" in found(run / "final")["final"].failed[0]


@pytest.mark.parametrize("name", ["upscaled", "checkpoints/step-00000002", "final", "export/llama"])
def test_a_folder_that_was_published_hollow_is_found(run: Path, name: str) -> None:
    with new_folder(run / name) as partial:
        (partial / "scale.yaml").write_text("{}")
    (check,) = verify(run / name).checks
    assert "was never whole" in check.failed[0]


def test_an_evaluation_that_was_published_hollow_is_found(tmp_path: Path) -> None:
    with new_folder(tmp_path / "evaluation") as partial:
        (partial / "scale.yaml").write_text("{}")
    with pytest.raises(VerificationError, match="evaluation"):
        verify(tmp_path).require()


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("final", "export/mine"),
        ("export/llama", "final/mine"),
        ("upscaled", "evaluation/start"),
        ("tokens", "export"),
        ("tokens", "final"),
    ],
)
def test_a_whole_folder_is_good_wherever_it_lies_and_whatever_that_is_called(
    run: Path, tmp_path: Path, name: str, place: str
) -> None:
    shutil.copytree(run / name, tmp_path / "elsewhere" / place)
    verify(tmp_path / "elsewhere" / place).require()


@pytest.mark.parametrize("name", ["upscaled", "final"])
def test_another_tokenizer_is_found(run: Path, finished: RunConfig, name: str) -> None:
    file = Path(finished.model.base) / "tokenizer.json"
    content = file.read_text(encoding="utf-8")
    changed = json.loads(content)
    changed["model"]["merges"].pop()
    try:
        file.write_text(json.dumps(changed), encoding="utf-8")
        assert "the tokenizer of" in found(run / name)[name].failed[0]
    finally:
        file.write_text(content, encoding="utf-8")


def write_again(folder: Path, change: Callable[[Path], None]) -> None:
    """Change a folder and give it a manifest that fits, as one who means to deceive would."""
    with new_folder(folder) as partial:
        for file in folder.iterdir():
            if file.name != "manifest.json":
                shutil.copy(file, partial / file.name)
        change(partial)


def test_a_log_with_a_step_missing_or_twice_is_found(run: Path) -> None:
    log = run / "metrics.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    for changed in (lines[1:], [lines[0], *lines]):
        log.write_text("".join(changed), encoding="utf-8")
        assert "log" not in found(run / "final")["final"].held
    first = json.loads(lines[-1])
    log.write_text("".join([*lines[:-1], json.dumps({**first, "num_tokens": 1}) + "\n"]), encoding="utf-8")
    assert "tokens" in found(run / "final")["final"].failed[0]


@pytest.mark.parametrize(
    ("logged", "good"),
    [
        ([(2, 2), (4, 2), (6, 2), (9, 3), (12, 3)], True),  # resumed at another cadence after step 6, 7 or 8
        ([(2, 2), (6, 2), (9, 3), (12, 3)], False),
        ([(2, 2), (4, 2), (9, 3), (12, 3)], False),
        ([(2, 2), (4, 2), (6, 2), (12, 3)], False),
        ([(2, 2), (4, 2), (6, 2), (9, 3)], False),
        ([(10, 10), (12, 10)], True),
    ],
)
def test_a_log_whose_cadence_has_changed_at_a_resume_is_held_to_each(
    run: Path, logged: list[tuple[int, int]], good: bool
) -> None:
    last = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    records = [{**last, "step": step, "log_every_steps": cadence} for step, cadence in logged]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    assert ("log" in found(run / "final")["final"].held) is good


def test_a_log_without_its_cadence_is_damaged(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [{key: value for key, value in json.loads(line).items() if key != "log_every_steps"} for line in lines]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    assert "log_every_steps is not there" in found(run / "final")["final"].failed[0]


def test_a_ledger_that_does_not_add_up_is_found(run: Path) -> None:
    folder = next((run / "tokens").glob("petitions-*"))

    def drop_a_document(partial: Path) -> None:
        np.fromfile(folder / NUM_BYTES, dtype=np.int64)[:-1].tofile(partial / NUM_BYTES)

    write_again(folder, drop_a_document)
    assert "documents kept" in found(folder)[folder.name].failed[0]


def test_a_token_ledger_that_does_not_add_up_is_found(run: Path) -> None:
    told = json.loads((run / "final" / "token_ledger.json").read_text(encoding="utf-8"))
    (source,) = told.values()
    assert source["num_trained"] > 0

    def lose_a_token(partial: Path) -> None:
        source["num_trained"] -= 1
        (partial / "token_ledger.json").write_text(json.dumps(told), encoding="utf-8")

    write_again(run / "final", lose_a_token)
    assert "targets" in found(run / "final")["final"].failed[0]


def test_an_export_of_another_model_is_found_by_its_logits(run: Path, finished: RunConfig) -> None:
    def swap(partial: Path) -> None:
        shutil.copy(Path(finished.model.base) / "model.safetensors", partial / "model.safetensors")
        shutil.copy(Path(finished.model.base) / "config.json", partial / "config.json")

    write_again(run / "export" / "llama", swap)
    assert "logits differ" in found(run / "export" / "llama")["llama"].failed[0]


def test_another_base_is_found_and_a_base_not_at_hand_is_no_failure(run: Path, finished: RunConfig) -> None:
    base = Path(finished.model.base)
    moved = base.rename(base.with_name("moved"))
    try:
        check = found(run / "final")["final"]
        assert not check.failed
        assert "base and its preservation" in check.unchecked[0]
        shutil.copytree(moved, base)
        model = load_widened(run / "final", finished.model)
        tensors = {name: tensor.clone() for name, tensor in model.base.state_dict().items() if name != "lm_head.weight"}
        tensors["model.norm.weight"][0] += 1e-3
        save_tensors(base / "model.safetensors", tensors)
        assert "model.norm.weight differs" in found(run / "final")["final"].failed[0]
    finally:
        shutil.rmtree(base, ignore_errors=True)
        moved.rename(base)


def test_a_folder_that_is_not_ours_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no folder of ours"):
        verify(tmp_path)
