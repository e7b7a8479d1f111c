"""Every error a user can meet; the command line prints its message and exits with its code.

If a library is missing that only some verbs need, `require` names the extra of this package that
installs it.
"""

from __future__ import annotations

from importlib.util import find_spec
from textwrap import shorten

_LONGEST_REASON = 200
# What the hub's own errors come to, whose messages are long; by name, since its library loads slowly.
_OF_THE_HUB = {
    "GatedRepoError": "it is gated: ask for access on its page on the hub, then run `hf auth login`",
    "RepositoryNotFoundError": "the hub has no such name; if it is private, run `hf auth login`",
    "RevisionNotFoundError": "the hub has no such revision of it",
    "LocalEntryNotFoundError": "it is not in the hub's cache, and the hub is not reached",
    "OfflineModeIsEnabled": "it is not in the hub's cache, and HF_HUB_OFFLINE forbids to ask the hub",
}
EXTRA_OF = {
    "lm_eval": "eval",
    "scipy": "eval",
    "peft": "lora",
    "matplotlib": "report",
    "tensorboard": "track",
    "fastapi": "serve",
    "uvicorn": "serve",
    "torchao": "quantised",
}


class ScaleError(Exception):
    """Base class of all: a message for the user, and an exit code."""

    exit_code = 1


class UsageError(ScaleError):
    """What was asked for cannot be done."""

    exit_code = 2


class ConfigError(UsageError):
    """A config field is unknown, of the wrong type or out of range."""


class BaseModelError(UsageError):
    """The base model is missing, unsupported, or not the one that a run began with."""


class ChangedBaseError(BaseModelError):
    """The base model or its tokenizer was found, but is not the one that was upscaled."""


class CorpusError(UsageError):
    """A corpus is missing, has an unknown format, or too much of it is bad (names file:line)."""


class RunFolderError(UsageError):
    """An output folder is already in use, incomplete, or not one of ours."""


class MissingExtraError(UsageError):
    """A library that only some verbs need is not installed.

    An extra of this package installs it.
    """


class RunError(ScaleError):
    """A verb failed while it ran."""


class TrainingError(RunError):
    """Training cannot go on (names the step)."""


class NonFiniteError(TrainingError):
    """One step's loss or gradient is not finite; nothing was updated."""


class GradientOverflow(NonFiniteError):
    """A gradient left the range of float16; the next loss is scaled by less."""


class OutOfMemory(RunError):
    """A device, or the process itself, has no memory left."""


class StorageError(RunError):
    """A folder of ours is damaged, or cannot be written."""


class CheckFailed(ScaleError):
    """A guarantee of this package, or the limit of `--fail-above`, did not hold."""

    exit_code = 3


class PreservationError(CheckFailed):
    """The base logits or the base tensors are not those of the base model."""


class ExportParityError(CheckFailed):
    """An export does not compute what the trained model computes."""


class EndedElsewhere(ScaleError):
    """Another process of the launch failed and reports why.

    This one only ends with the same exit code.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__("another process has failed; its own message says why")
        self.exit_code = exit_code


class Interrupted(ScaleError):
    """A signal or the time budget stopped a run that wrote a checkpoint: 128 + signal, or 0."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of torch or Python says that memory ran out; imports nothing."""
    told = ("out of memory", "can't allocate memory")  # by CUDA, by the CPU's allocator
    of_torch = isinstance(error, RuntimeError) and any(words in str(error) for words in told)
    return of_torch or isinstance(error, MemoryError)


def one_line(error: BaseException) -> str:
    """Return a library's error message as one line, cut after a word if it is long."""
    told = ""
    cause: BaseException | None = error
    while cause is not None:
        told = _OF_THE_HUB.get(type(cause).__name__, told)
        cause = cause.__cause__
    return told or shorten(str(error), _LONGEST_REASON, placeholder=" ...") or type(error).__name__


def is_installed(module: str) -> bool:
    return find_spec(module) is not None


def require(module: str, needed_by: str) -> None:
    """Raise MissingExtraError if a library is missing.

    `needed_by` is the config key or verb that needs it.
    """
    if not is_installed(module):
        package = f"'scale-cli[{EXTRA_OF[module]}]'" if module in EXTRA_OF else module
        raise MissingExtraError(
            f"{needed_by}: needs {module.replace('_', '-')}: pip install {package}"
        )
