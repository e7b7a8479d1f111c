"""What the folders of a run say, where they lie, and the log."""

import json
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scale_cli.data.ledger import Ledger, TokenLedger
from scale_cli.errors import RunFolderError, StorageError
from scale_cli.export.records import ExportRecord
from scale_cli.runs.folder import RunFolder, check_replaceable
from scale_cli.storage.atomic import new_folder, write_json
from scale_cli.storage.records import RunRecord
from scale_cli.training.metrics_log import MetricsLog, MetricsRecord, read_records
from scale_cli.training.records import BranchPoint, Cost, TrainState
from scale_cli.upscale.base_record import BaseRecord

RECORDS: list[type[RunRecord]] = [
    BaseRecord,
    TrainState,
    BranchPoint,
    Cost,
    ExportRecord,
    Ledger,
    TokenLedger,
]


@settings(max_examples=5)
@given(st.data())
@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_a_record_is_read_as_it_was_written(
    kind: type[RunRecord], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
    folder, record = tmp_path_factory.mktemp("records"), data.draw(st.from_type(kind))
    assert kind.load_if_there(folder) is None
    record.save(folder)
    assert kind.load(folder) == record


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_what_is_no_record_is_an_error_that_names_the_file(
    kind: type[RunRecord], tmp_path: Path
) -> None:
    for content in ("[]", "null", '{"tensors": 1, "step": "x", "read": 2, "sources": []}', "{"):
        (tmp_path / kind.FILE).write_text(content)
        with pytest.raises(StorageError, match=kind.FILE):
            kind.load(tmp_path)


# Where results land


@pytest.mark.parametrize("name", ["run", "a/b/run"])
def test_processes_that_check_one_new_folder_at_once_all_find_it_free_and_leave_nothing(
    tmp_path: Path, name: str
) -> None:
    with ThreadPool(
        8
    ) as pool:  # the checks are system calls, during which Python runs the other threads
        pool.map(lambda _: RunFolder(tmp_path / name).check(), range(400), chunksize=1)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["run", "a/b/c", ".", ".."])
def test_what_is_free_or_a_folder_is_fine_and_what_is_not_ours_in_it_no_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "data").symlink_to("/")
    (tmp_path / "upscaled").mkdir()
    (tmp_path / "upscaled" / "inside").symlink_to("../upscaled")
    monkeypatch.chdir(tmp_path)
    RunFolder(Path(name)).check()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "upscaled"]


@pytest.mark.parametrize(
    "name", ["file", "file/run", "file/a/b", "broken", "broken/run", "loop/run"]
)
def test_a_file_in_the_way_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "broken").symlink_to("absent")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(RunFolderError) as caught:
        RunFolder(tmp_path / name).check()
    assert f"{tmp_path / name.partition('/')[0]} is not a folder" in str(caught.value)


def result(folder: Path, kind: str) -> Path:
    with new_folder(folder) as partial:
        write_json(partial / "report.json", {"kind": kind})
    return folder


def test_only_nothing_an_empty_folder_and_an_earlier_result_of_the_kind_may_be_replaced(
    tmp_path: Path,
) -> None:
    (tmp_path / "empty").mkdir()
    for output in (
        tmp_path / "absent",
        tmp_path / "empty",
        result(tmp_path / "earlier", "scale join"),
    ):
        check_replaceable(output, "scale join")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["earlier", "empty"]
    (tmp_path / "file").write_text("mine")
    write_json(tmp_path / "unlisted" / "report.json", {"kind": "scale join"})
    result(tmp_path / "other", "scale comparison")
    (result(tmp_path / "added", "scale join") / "notes.txt").write_text("mine")
    for name in ("file", "unlisted", "other", "added"):
        with pytest.raises(
            RunFolderError, match=rf"^--output .*{name}: holds something other than a scale join"
        ):
            check_replaceable(tmp_path / name, "scale join")


# The log


def record(step: int) -> MetricsRecord:
    return {"step": step, "loss": 1.0 / (step + 1), "skipped": "뉴스\u2028"}


def read(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.split("\n")[:-1]]


@pytest.mark.parametrize("damage", [b"\xff", b'{"step": 1e400}', b"[" * 100_000, b"{}", b"3"])
def test_what_is_not_json_is_not_written_and_a_damaged_record_is_named_by_its_line(
    tmp_path: Path, damage: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, resumed_step=0)
    for step in (1, 2):
        log.append(record(step))
    with pytest.raises(ValueError, match="JSON"):
        log.append({"step": 3, "loss": float("nan")})
    assert len(read(path)) == 2
    path.write_bytes(path.read_bytes() + damage + b"\n")
    with pytest.raises(StorageError, match=r"metrics.jsonl:3: damaged"):
        read_records(path)
    with pytest.raises(StorageError, match=r"metrics.jsonl:3: damaged"):
        MetricsLog(path, resumed_step=1)


@settings(max_examples=60)
@given(st.data())
def test_a_run_stopped_anywhere_and_resumed_logs_every_step_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "stopped.jsonl"
    path.unlink(missing_ok=True)
    max_steps, resumed_step = 12, 0
    for _ in range(data.draw(st.integers(0, 3))):
        log = MetricsLog(path, resumed_step)
        stopped = data.draw(st.integers(resumed_step, max_steps))
        saved = data.draw(st.integers(resumed_step, stopped))
        for step in range(resumed_step + 1, stopped + 1):
            log.append(record(step))
        # What the last checkpoint counts on is synced; a cut may take any byte that was written after it.
        durable = sum(len(json.dumps(record(step))) + 1 for step in range(1, saved + 1))
        content = path.read_bytes()
        path.write_bytes(content[: data.draw(st.integers(durable, len(content)))])
        resumed_step = saved
    log = MetricsLog(path, resumed_step)
    for step in range(resumed_step + 1, max_steps + 1):
        log.append(record(step))
    assert read(path) == [record(step) for step in range(1, max_steps + 1)]


@pytest.mark.parametrize("due", [False, True])
def test_a_resumed_run_keeps_every_record_of_its_step_but_an_evaluation_that_is_to_be_made_up_for(
    tmp_path: Path, due: bool
) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, resumed_step=0)
    for step in (1, 2, 3):
        log.append(record(step))
        log.append({"step": step, "evaluation_nats_per_token": {}})
    MetricsLog(path, resumed_step=2, evaluation_due=due)
    kept = [(1, True), (1, False), (2, True), (2, False)]
    assert [(entry["step"], "loss" in entry) for entry in read(path)] == kept[: 3 if due else 4]
