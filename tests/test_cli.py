import json
import shutil
import signal
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.main import get_command_name

from scale_cli.cli import app
from scale_cli.commands.upscale import upscale
from scale_cli.console import ended_in_one_message, parse_share
from scale_cli.errors import StorageError, UsageError
from scale_cli.processes import Share
from tests.command_line import Outcome, Scale, handlers_put_back
from tests.small_runs import small_run, write_config

VERBS = ("plan", "upscale", "prepare", "train", "evaluate", "export", "run", "eval")


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_help_shows_every_verb_in_groups_in_a_line_that_is_whole(
    scale: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert scale("-h") == scale("--help")
    _, _, commands = scale("-h").stdout.partition("First:\n")
    titles = [line for line in commands.splitlines() if line.endswith(":")]
    shown = dict(line.split(maxsplit=1) for line in commands.splitlines() if line.startswith("  "))
    assert titles == ["One verb at a time:", "Serving:", "Research:"]
    assert list(shown)[:3] == ["run", "init", "plan"]
    names = {
        get_command_name(command.name or str(getattr(command.callback, "__name__", "")))
        for command in app.registered_commands
    }
    assert shown.keys() == names - {"eval"}, "an alias"
    assert all(line.endswith(".") and not line.endswith("...") for line in shown.values())


def test_the_version_is_told(scale: Scale) -> None:
    assert scale("--version") == Outcome(0, f"scale {version('scale-cli')}\n", "")


def test_a_command_line_that_makes_no_sense_exits_2_and_a_missing_config_is_named(
    scale: Scale,
) -> None:
    for arguments in (["nosuch"], ["train"], ["train", "config.yaml", "--nosuch"]):
        done = scale(*arguments)
        assert done.exit_code == 2 and done.stderr
    assert "'--flops'" in scale("plan", "absent.yaml", "--flops", "inf").stderr
    for verb in VERBS:
        told = "error: absent.yaml: no such config file\n"
        assert scale(verb, "absent.yaml") == Outcome(2, "", told)


def test_a_pattern_without_quotes_gets_the_hint(scale: Scale, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.txt.xz", "b.txt.xz", "c.txt.xz")]
    for file in files:
        file.write_text("x")
    done = scale("init", "new.yaml", "--corpus", *files)
    assert done.exit_code == 2 and f"quote it: '{tmp_path}/*.txt.xz'" in done.stderr


@pytest.fixture(scope="module")
def upscaled_once(tmp_path_factory: pytest.TempPathFactory, stories: Path) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    upscale(small_run(folder, stories))
    return folder


@pytest.fixture
def upscaled(upscaled_once: Path, tmp_path: Path, stories: Path) -> Path:
    """The config of a folder that `scale upscale` has been through."""
    shutil.copytree(upscaled_once / "run", tmp_path / "run")
    return write_config(tmp_path, stories)


def test_what_cannot_be_resumed_is_named_and_changes_nothing(upscaled: Path, scale: Scale) -> None:
    run = upscaled.parent / "run"
    before = files_of(run / "upscaled")
    for place in ("nowhere", str(run)):
        assert place in scale("train", upscaled, "--resume", place).error()
    assert files_of(run / "upscaled") == before
    assert {entry.name for entry in run.iterdir()} <= {"upscaled", "tokens"}


def test_a_run_that_is_there_is_not_trained_over(upscaled: Path, scale: Scale) -> None:
    run = upscaled.parent / "run"
    trained = scale("train", upscaled, "--json")
    assert trained.exit_code == 0
    assert json.loads(trained.stdout)["step"] == 1
    finished = files_of(run)
    assert scale("train", upscaled).error().startswith(f"{run}: holds a finished run")
    assert files_of(run) == finished
    shutil.rmtree(run / "final")
    told = scale("train", upscaled).error()
    assert str(run) in told and "--resume" in told
    assert not (run / "final").exists()
    assert scale("train", upscaled, "--resume", "auto", "--quiet").stdout == ""
    assert (run / "final").is_dir()


def test_quiet_verbs_warn_all_the_same_and_json_is_alone_on_standard_output(
    upscaled: Path, scale: Scale
) -> None:
    shown = scale("prepare", upscaled, "train.max_steps=500")
    assert "warning: corpus news: " in shown.stdout
    for option in ("--quiet", "--json"):
        told = scale("prepare", upscaled, "train.max_steps=500", option)
        lines = told.stderr.splitlines()
        assert lines and all(line.startswith("warning: ") for line in lines)
        assert told.stdout == "" if option == "--quiet" else json.loads(told.stdout)["corpora"]


def test_a_signal_of_which_a_library_makes_an_error_is_the_signal_still(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with handlers_put_back(), pytest.raises(SystemExit) as ended, ended_in_one_message():
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit:
            raise StorageError("damaged") from None
    assert ended.value.code == 128 + signal.SIGTERM
    assert capsys.readouterr().err.startswith("stopped by SIGTERM; ")


def test_a_share_is_one_of_so_many() -> None:
    for written in ("", "3", "0/4", "5/4", "1/", "-1/4", "1.5/4", "1/4/4"):
        with pytest.raises(UsageError, match=r"^--part .*: not a share"):
            parse_share("--part", written)
    shares = [parse_share("--part", f"{index}/3") for index in (1, 2, 3)]
    assert shares == [Share(index, 3) for index in (0, 1, 2)]
