"""Shared by all verbs of the command line: options, config, and how a verb ends."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from safetensors import SafetensorError
from typer.core import TyperGroup

from scale_cli.errors import (
    EndedElsewhere,
    Interrupted,
    OutOfMemory,
    RunFolderError,
    ScaleError,
    StorageError,
    UsageError,
    is_out_of_memory,
    one_line,
)
from scale_cli.processes import (
    Share,
    are_several,
    check_launch,
    is_first_to_end,
    is_main,
    leave,
    name_lost_peers,
    without_collections,
)
from scale_cli.terminal import printable, progress_bar, shows_lines, without_passwords

if TYPE_CHECKING:
    from scale_cli.config.schema import RunConfig

_GROUPS = {
    "First": ("run", "init", "plan"),
    "One verb at a time": ("upscale", "prepare", "train", "evaluate", "export"),
    "Serving": ("generate", "serve"),
    "Research": ("compare", "verify", "schema"),
}


class Verbs(TyperGroup):
    """The verbs; the help shows them in groups."""

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        for title, names in _GROUPS.items():
            with formatter.section(title):
                helps = {name: self.commands[name].get_short_help_str(80) for name in names}
                formatter.write_dl([(name.ljust(width), told) for name, told in helps.items()])


def ask(flag: str, meaning: str) -> str:
    """Ask for the value of a flag that was not given; raise UsageError if there is no terminal."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(
            f"{flag}: not given ({meaning}), and there is no terminal to ask at; add {flag}"
        )
    return str(typer.prompt(f"{flag}, {meaning}"))


def read(path: Path, overrides: Sequence[str] | None) -> RunConfig:
    """Return the config of a file, a run's folder or a checkpoint, after a check of its output
    folder.
    """
    from scale_cli.config.load import load_config
    from scale_cli.runs.folder import RunFolder, of_checkpoint

    if path.is_dir():  # a run's own config, or a checkpoint's; the run may have moved
        run = of_checkpoint(path)
        if run is None:
            run = RunFolder(path)
            run.check_is_whole()
        overrides = [f"output_dir={json.dumps(str(run.root))}", *(overrides or ())]
        path = RunFolder(path).config
    config = load_config(path, overrides or ())
    RunFolder(config.output_dir).check()
    return config


def load(
    path: Path, overrides: Sequence[str] | None, verb: str, fail_above: float | None = None
) -> RunConfig:
    """Return a config like `read`, after the checks of a verb that import no torch.

    Processes of a launch skip it: the verb's own check comes when they have joined, so that one
    says why they end.
    """
    config = read(path, overrides)
    if not are_several():
        from scale_cli.runs.early import check_early

        check_early(verb, config, fail_above)
    import_libraries()
    return config


def run_folder(path: Path) -> Path:
    """Return the run's folder for a config file; return any other path unchanged."""
    if not path.exists():
        from scale_cli.upscale.base_files import looks_local

        on_hub = (
            "" if looks_local(str(path)) else "; an adapter on the hub is given with its --base"
        )
        raise RunFolderError(f"{path}: no such folder or config{on_hub}")
    if not path.is_file():
        return path
    from scale_cli.config.load import load_config

    return load_config(path).output_dir


def parse_share(option: str, written: str) -> Share:
    """Return the share that an option names, such as 3/64."""
    index, _, number = written.partition("/")
    if not (index.isdecimal() and number.isdecimal() and 1 <= int(index) <= int(number)):
        raise UsageError(f"{option} {written}: not a share; give I/N, from 1/N to N/N")
    return Share(int(index) - 1, int(number))


def quieten_libraries() -> None:
    """Silence warnings and logs of libraries.

    Call it after the config check, since its errors must not wait for it.
    """
    warnings.simplefilter("ignore", FutureWarning)
    # torchao warns of kernels for other devices, pytree of torchao.
    for library in ("torchao", "torch.utils._pytree"):
        logging.getLogger(library).setLevel(logging.ERROR)
    from huggingface_hub.utils import logging as hub_logging
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    hub_logging.set_verbosity_error()
    transformers_logging.set_verbosity_error()
    transformers_logging.set_tqdm_hook(_bar_of_transformers)
    if not shows_lines():
        disable_progress_bars()  # of downloads


def _bar_of_transformers(_factory: Any, iterables: Any, options: dict[str, Any]) -> Any:
    """Return the bar of weights that are loaded, as the verbs' own bars are; short work has none."""
    options |= {"iterable": next(iter(iterables), None), "delay": 1.0, "leave": False}
    return progress_bar(**options)


def import_libraries() -> None:
    """Import and quieten torch and transformers, for a verb that loads a model."""
    # That takes seconds, so a terminal is told; a log is not.
    bar = progress_bar(desc="loading torch", bar_format="{desc}", leave=False)
    with without_collections(), bar:
        quieten_libraries()
        from transformers import PreTrainedModel  # noqa: F401 (brings torch)


@contextmanager
def ended_in_one_message() -> Iterator[None]:
    """Run a verb.

    A user error ends all processes with one message and its exit code, without a traceback.
    """
    stopped_by: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        """End at once; the training loop has its own way.

        A half-written folder is never taken for a whole one.
        """
        stopped_by.append(number)
        name = signal.Signals(number).name
        _end(
            f"stopped by {name}; run the same command to start again what was not finished",
            128 + number,
        )

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        with name_lost_peers():
            check_launch()
            try:
                yield
            except SystemExit as ended:
                if not ended.code:
                    leave()
                if ended.code == UsageError.exit_code:
                    _hint_at_quotes(sys.argv[1:])
                raise
            except Exception:
                if stopped_by:  # a library may have turned the stop into its own error
                    sys.exit(128 + stopped_by[0])
                raise
    except Interrupted as stopped:
        from scale_cli.training.interruption import command_to_go_on

        if is_main():  # all processes stop together
            _say(f"{stopped}\ncontinue with: {command_to_go_on(sys.argv[1:], os.environ)}")
        sys.exit(stopped.exit_code)
    except EndedElsewhere as ended:
        sys.exit(ended.exit_code)
    except ScaleError as error:
        _end(f"error: {error}", error.exit_code)
    except (OSError, SafetensorError) as error:
        place = getattr(error, "filename", None) or "input/output"
        _end(f"error: {place}: {getattr(error, 'strerror', None) or error}", StorageError.exit_code)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _end(f"error: out of memory: {one_line(error)}", OutOfMemory.exit_code)


def _hint_at_quotes(words: Sequence[str]) -> None:
    """If a flag's value is followed by further files, say that a pattern needs quotes."""
    for flag, value, after in zip(words, words[1:], words[2:], strict=False):
        if flag.startswith("--") and Path(value).is_file() and Path(after).is_file():
            from scale_cli.data.files import SourceFile

            pattern = Path(value).with_name(f"*{SourceFile(value, 0).ending}")
            _say(f"hint: the shell has listed the files of a pattern; quote it: '{pattern}'")
            return


def _end(message: str, exit_code: int) -> NoReturn:
    """Print why the process ends, unless another process of the launch has printed its reason.

    Then exit.
    """
    if is_first_to_end():
        _say(message)
    sys.exit(exit_code)


def _say(message: str) -> None:
    typer.echo(printable(without_passwords(message)), err=True)
