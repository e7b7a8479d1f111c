import gc
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from scale_cli.cli import main
from scale_cli.terminal import choose_form
from tests.command_line import ModelLoads, Outcome, Scale, handlers_put_back
from tests.unwaited import let_nothing_wait_for_the_disk

# No test asks the hub. Without a network each question would wait half a minute.
os.environ["HF_HUB_OFFLINE"] = "1"

FORKS = {
    "tests/test_processes.py",
    "tests/training/test_sharding.py",
    *(f"tests/torture/test_{name}.py" for name in ("damage", "faults", "signals")),
}

LONG_OPTIONS = ("--proofs", "--torture", "--runtimes", "--serving")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--torture", action="store_true", help="tests/torture in full length (make torture)"
    )
    parser.addoption("--runtimes", action="store_true", help="tests/runtimes too (make runtimes)")
    parser.addoption("--proofs", action="store_true", help="tests/integration too (make proofs)")
    parser.addoption(
        "--serving", action="store_true", help="tests/serving/engine too (make serving)"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    option = {"integration": "--proofs", "runtimes": "--runtimes", "engine": "--serving"}.get(
        collection_path.name
    )
    return True if option and not config.getoption(option) else None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "long: a file that begins first, so that no core is idle at the end"
    )
    let_nothing_wait_for_the_disk()
    # A busy machine is no fault of a property.
    settings.register_profile(
        "any-speed", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any-speed")
    # A process imports all code that comes with models from one folder: the first one that it asks.
    modules = tempfile.TemporaryDirectory(prefix="scale-tests-modules-")
    config.add_cleanup(modules.cleanup)
    os.environ["HF_MODULES_CACHE"] = modules.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of `make test`: files that fork processes go to one worker, since their server takes seconds to start."""
    if config.getoption("dist") != "loadfile":
        return None
    scheduling = import_module("xdist.scheduler").LoadFileScheduling(config, log)
    file_of = scheduling._split_scope
    scheduling._split_scope = lambda test: "forks" if file_of(test) in FORKS else file_of(test)
    return scheduling


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    # Before its fixtures: a model that a test or a fixture makes has the same weights in every run.
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    # What has been imported by now stays: no collection of garbage need look through it again.
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print what the long proofs counted: `record_property(what, how_many)`."""
    if not any(map(config.getoption, LONG_OPTIONS)):
        return
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for what, how_many in report.user_properties:
                terminalreporter.write_line(
                    f"{outcome}  {report.nodeid.split('/')[-1]}: {what}: {how_many}"
                )


@pytest.fixture(autouse=True)
def lines_are_shown() -> None:
    """Print lines, whatever a test before has chosen by --json or --quiet."""
    choose_form(None)


@pytest.fixture(scope="session", autouse=True)
def short_proofs(pytestconfig: pytest.Config) -> Iterator[None]:
    """Have `scale upscale`, `export` and `verify` prove what they make on less text.

    `make proofs`, `torture`, `runtimes` and `serving` prove it on all that users have.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not any(map(pytestconfig.getoption, LONG_OPTIONS)):
            in_full = import_module("scale_cli.upscale.preservation").SAMPLE_TEXTS
            for module in ("upscale.preservation", "commands.upscale"):
                # An English one and a Korean one.
                patch.setattr(f"scale_cli.{module}.SAMPLE_TEXTS", (in_full[0], in_full[5]))
            patch.setattr("scale_cli.export.cached_decoding._NUM_PROMPTS", 1)
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The real models and corpora that lie beside the repository, or wherever SCALE_SHARED_DATA says."""
    beside = Path(__file__).resolve().parents[1] / "../shared/data"
    folder = Path(os.environ.get("SCALE_SHARED_DATA", beside)).resolve()
    if not folder.is_dir():
        message = f"{folder}: not there; set SCALE_SHARED_DATA"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return folder


@pytest.fixture(scope="session")
def stories(shared_data: Path) -> Path:
    """The smallest of the real models."""
    return shared_data / "ckpt-stories260K" / "hf"


@pytest.fixture
def base(stories: Path, tmp_path: Path) -> Path:
    """A copy of it that may be tampered with."""
    return Path(shutil.copytree(stories, tmp_path / "base"))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    """A group of one process: enough for a model to be sharded in all but number."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Scale:
    """The command line, without a process of its own, which would spend seconds on importing torch."""

    def run(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["scale", *map(str, arguments)])
        capfd.readouterr()
        code: int | None
        try:
            with handlers_put_back():
                main()
        except SystemExit as ended:
            assert ended.code is None or isinstance(ended.code, int)
            code = ended.code or 0
        except ModelLoads:
            code = None
        shown = capfd.readouterr()
        assert "Traceback" not in shown.out + shown.err
        return Outcome(
            code, shown.out, re.sub(r"\r[^\r\n]*(?=\r)|\r *\r?(?=[^\n]|$)", "", shown.err)
        )

    return run
