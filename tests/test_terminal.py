import io
import json
import os
import subprocess
import sys
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from scale_cli import terminal
from scale_cli.console import quieten_libraries
from scale_cli.report import Interval
from scale_cli.storage.atomic import new_folder, verify_folder
from scale_cli.terminal import not_counted, print_json, printable, progress_bar, without_passwords
from scale_cli.upscale.preservation import own_logits
from tests.widening import random_ids, tiny_llama


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a bar write a line whenever it moves."""
    monkeypatch.setattr(terminal, "_SECONDS_APART", 0.0)
    monkeypatch.setattr(terminal, "_form", "lines")


@given(st.text(st.characters()))
def test_no_control_character_is_printed_and_nothing_else_is_changed(text: str) -> None:
    shown = printable(text)
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t"]
    shown.encode()
    if not [c for c in text if unicodedata.category(c) in ("Cc", "Cs")]:
        assert shown == text


def test_what_stands_before_the_host_of_a_url_is_left_out() -> None:
    assert without_passwords("a https://user:pass@host/x b") == "a https://***@host/x b"
    assert without_passwords("https://host/x a@b") == "https://host/x a@b"


@pytest.mark.usefixtures("moving")
@pytest.mark.parametrize("seconds_apart", [0.0, 30.0])
def test_a_log_gets_whole_lines_seldom_and_nothing_that_moves_a_cursor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seconds_apart: float
) -> None:
    monkeypatch.setattr(terminal, "_SECONDS_APART", seconds_apart)
    with progress_bar(total=4, desc="training", unit="step") as outer:
        for _ in range(4):
            with progress_bar(total=2, desc="evaluating", leave=False) as inner:
                inner.update(2)
            outer.update()
    written = capsys.readouterr().err
    assert not set(written) & {"\r", "\x1b"}
    lines = written.splitlines()
    assert all(line.startswith(("training: ", "evaluating: ")) for line in lines)
    assert bool(lines) == (seconds_apart == 0.0)


@pytest.mark.usefixtures("moving")
def test_a_large_folder_moves_a_bar_by_bytes_while_it_is_hashed_but_not_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(terminal, "_MANY_BYTES", 3_000_000)

    def write_and_check(name: str) -> None:
        with new_folder(tmp_path / name) as partial:
            (partial / "weights").write_bytes(bytes(3_000_000))
        verify_folder(tmp_path / name)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(write_and_check, "checkpoint").result()
    write_and_check("final")
    monkeypatch.setenv("RANK", "1")
    write_and_check("another")
    written = capsys.readouterr().err
    assert "checkpoint" not in written and "another" not in written
    for label in ("hashing final", "checking final"):
        states = [line for line in written.splitlines() if line.startswith(label)]
        assert "0.00/3.00M" in states[0] and "2.10M/3.00M" in "".join(states)


@pytest.mark.usefixtures("moving")
@pytest.mark.parametrize(("form", "shown"), [("lines", True), ("figures", False)])
def test_downloads_and_weights_that_load_move_a_bar_where_lines_are_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str, shown: bool
) -> None:
    monkeypatch.setattr(terminal, "_form", form)
    monkeypatch.setattr(transformers_logging, "_tqdm_hook", None)
    enable_progress_bars()
    quieten_libraries()
    assert are_progress_bars_disabled() != shown
    assert list(transformers_logging.tqdm(range(3), desc="Loading weights")) == [0, 1, 2]
    assert ("Loading weights:" in capsys.readouterr().err) == shown


@pytest.mark.usefixtures("moving")
def test_the_proof_that_a_base_is_preserved_moves_a_bar_by_prompt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own_logits(tiny_llama(), [random_ids(1, 4), random_ids(1, 5)])
    assert "asking the base: 100%" in capsys.readouterr().err


def test_figures_are_json_and_one_that_is_not_finite_is_null(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "_form", "figures")
    print_json({"folder": Path("a"), "change": Interval(float("nan"), 0.5, None)})
    assert json.loads(capsys.readouterr().out) == {
        "folder": "a",
        "change": {"value": None, "low": 0.5, "high": None},
    }


# Typer takes ASCII for an encoding that nobody has set, and writes UTF-8.
@pytest.mark.parametrize(
    ("encoding", "smile"),
    [("cp949", rb"\U0001f600"), ("latin-1", rb"\U0001f600"), ("ascii", "😀".encode())],
)
def test_text_that_a_terminal_cannot_show_is_escaped(
    encoding: str, smile: bytes, tmp_path: Path
) -> None:
    words = ["-m", "scale_cli", "generate", str(tmp_path / "없음 😀"), "--prompt", "x"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    shown = subprocess.run([sys.executable, *words], capture_output=True, env=environment)
    assert shown.returncode == 2
    assert b"Traceback" not in shown.stderr and smile in shown.stderr


def test_what_is_not_counted_moves_neither_speed_nor_elapsed_time_of_a_bar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.time", lambda: now_s)
    with tqdm(total=9, mininterval=0, file=io.StringIO()) as bar:
        monkeypatch.setattr(bar, "_time", lambda: now_s)
        bar.start_t = bar.last_print_t = now_s
        for _ in range(3):
            now_s += 2.0
            bar.update(1)
            before = bar.format_dict
            with not_counted(bar):
                now_s += 300.0
                assert bar.format_dict == before, "as a line printed meanwhile draws it"
        assert bar.format_dict["elapsed"] == pytest.approx(6.0)
        assert bar.format_dict["rate"] == pytest.approx(0.5)
