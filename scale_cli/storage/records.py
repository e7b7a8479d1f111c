"""The folders of a run: where its results land, and what they say in JSON beside their tensors, a type and a file each.

`corpora.json`, beside the state, names the text that was trained on; the token ledger is of `data/ledger.py`.
`metrics.jsonl` is the log: one JSON object a line, no step twice and none missing, whatever was interrupted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final, Required, Self, TypedDict, cast

from pydantic import TypeAdapter, ValidationError

from scale_cli.errors import RunFolderError, StorageError
from scale_cli.storage.atomic import MANIFEST, described_files, read_json, sync, write_json, write_text, writing

TRAINED = "trained.safetensors"
CORPORA = "corpora.json"


class RunFolder:
    """The folders and files of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.upscaled = root / "upscaled"  # the expansion as `scale upscale` made it
        self.checkpoints = root / "checkpoints"  # where `scale train` saves what it needs to go on
        self.final = root / "final"  # the trained expansion
        self.tensorboard = root / "tensorboard"  # TensorBoard's files
        self.tokens = root / "tokens"  # tokenised corpora, unless corpus.cache_dir says otherwise
        self.evaluation = root / "evaluation"  # the forgetting report
        self.exports = root / "export"  # a folder for each format
        self.profile = root / "profile"  # traces of `train.profile_steps`
        self.metrics = root / "metrics.jsonl"  # an object a line, for every logged step and periodic evaluation

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def export(self, export_format: str, dtype: str = "float32") -> Path:
        return self.exports / (export_format if dtype == "float32" else f"{export_format}-{dtype}")

    @property
    def config(self) -> Path:
        """The config that the run was made with, as far as it has come."""
        newest_first = sorted(self.checkpoints.glob("step-*"), reverse=True)
        for folder in (self.root, self.final, *newest_first, self.upscaled):
            if (folder / "scale.yaml").is_file():
                return folder / "scale.yaml"
        raise RunFolderError(
            f"{self.root}: is a folder, but not that of a run; give a config (YAML), or the folder of a run"
        )

    def check(self) -> None:
        """Find out before any work whether results can land here, and only here."""
        check_folder("output_dir", self.root)
        root = os.path.realpath(self.root)
        places = [path for path in vars(self).values() if path != self.root]
        for link in (link for place in places for link in _links(place)):
            if not Path(os.path.realpath(link)).is_relative_to(root):
                raise RunFolderError(
                    f"{link}: points outside output_dir, to {link.readlink()}; nothing is written there, so remove it"
                )
        for place in places:
            if os.path.lexists(place) and not place.is_dir() and place != self.metrics:
                raise RunFolderError(f"{place}: is not a folder, but a folder must be written there; move it away")


def _links(place: Path) -> Iterator[Path]:
    """Yield the symbolic links where something of ours may be written, half-written folders included."""
    for path in (place, *place.parent.glob(f".{place.name}.*")):
        yield from (found for found in (path, *path.rglob("*")) if found.is_symlink())


def check_folder(key: str, folder: Path) -> None:
    """Find out whether a folder is there, or can be made, and may be written to."""
    missing, there = None, folder.absolute()
    while not os.path.lexists(there):
        missing, there = there, there.parent
    if not there.is_dir():
        raise RunFolderError(f"{key} {folder}: {there} is not a folder")
    try:
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError
        if missing is not None:  # root may write anywhere, but for file systems that hold no folders of anybody's
            missing.mkdir()
            with suppress(OSError):  # another process is at work in it
                missing.rmdir()
    except FileExistsError:  # another process has just made it
        return
    except OSError:
        raise RunFolderError(f"{key} {folder}: {there} cannot be written to") from None


def check_replaceable(output: Path, kind: str) -> None:
    """Refuse a folder that holds anything but a result of one kind, whole and with nothing added."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    there = {path.relative_to(output).as_posix() for path in output.rglob("*")}
    try:
        ours = {*described_files(output), MANIFEST}
        replaceable = there <= ours and read_json(output / "report.json")["kind"] == kind
    except (StorageError, KeyError, TypeError):
        replaceable = False
    if not replaceable:
        raise RunFolderError(f"--output {output}: holds something other than a {kind}; choose a new folder")


class RunRecord:
    """A dataclass that lies in a folder as JSON; keys that it does not know are passed over."""

    FILE: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        return asdict(cast("Any", self))

    def save(self, folder: Path) -> None:
        write_json(folder / self.FILE, self.to_json())

    @classmethod
    def from_json(cls, value: Any) -> Self:
        return _adapter_of(cast("Any", cls)).validate_python(value)

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        return (folder / cls.FILE).is_file()

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the file; StorageError where it is missing, or holds something else."""
        value = read_json(folder / cls.FILE)
        try:
            return cls.from_json(value)
        except (ValidationError, KeyError, TypeError):
            raise StorageError(f"{folder / cls.FILE}: damaged, or written by another version") from None

    @classmethod
    def load_if_there(cls, folder: Path) -> Self | None:
        return cls.load(folder) if cls.is_in(folder) else None


@cache  # building one takes longer than a hundred validations
def _adapter_of(record: type[RunRecord]) -> TypeAdapter[Any]:
    return TypeAdapter(record)


@dataclass(frozen=True)
class BaseRecord(RunRecord):
    """Which base model an expansion belongs to; in every method folder."""

    FILE = "base.json"
    name: str  # hub id or folder, as the config gave it
    revision: str | None  # the commit the hub served, where it came from one
    dtype: str  # what the hashed tensors are held in
    tensors: dict[str, str]  # SHA-256 of every tensor, by name
    config_sha256: str  # of what the configuration says about computing: sizes, norms, RoPE
    tokenizer_sha256: str  # of the files the tokenizer saves; empty where none was recorded

    @property
    def content_sha256(self) -> str:
        """One hash for the whole model, whatever folder it lies in."""
        lines = "".join(f"{name} {sha256}\n" for name, sha256 in sorted(self.tensors.items()))
        return hashlib.sha256(lines.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {"content_sha256": self.content_sha256, **asdict(self)}


@dataclass(frozen=True)
class Score:
    """What a periodic evaluation says of the weights at a step, in bits/byte of the head that is served."""

    step: int
    acquisition: float  # a loss, in bits/byte: the mean over the corpora of that role; less is better
    forgetting: float  # the most lost against the base on any corpus of role retention


@dataclass(frozen=True)
class TrainState(RunRecord):
    """How far a run has come; in checkpoints and `final/`."""

    FILE = "position.json"
    step: int = 0  # optimiser steps done
    num_tokens: int = 0  # target tokens trained on
    # seconds of training, evaluating and saving, over all resumes, as are the three that follow
    elapsed_s: float = 0.0
    stepping_s: float = 0.0  # of those, seconds in steps
    evaluating_s: float = 0.0  # of those, seconds in periodic evaluations
    saving_s: float = 0.0  # of those, seconds that training has waited for checkpoints
    skipped_steps: int = 0  # of the steps done, those left out because their loss or gradient was not finite
    skipped_tokens: int = 0  # the target tokens of those, and of those whose gradient overflowed float16
    loss_scale: float | None = None  # that the next loss is multiplied by; None: float16 is not computed in
    loss_scale_steps: int = 0  # since it changed
    evaluation_due: bool = False  # a signal came in this step's periodic evaluation, which a resume begins with
    # since the last record of the log, of every source: the summed loss, and of how many targets; empty: nothing yet
    since_logged: tuple[tuple[float, int], ...] = ()
    best: Score | None = None  # whose checkpoint is kept, where `train.max_forgetting` asks for one

    @property
    def tokens_per_s(self) -> float | None:
        """Target tokens a second of training, without evaluations and checkpoints; None before the first step."""
        return self.rate_since(TrainState())

    def rate_since(self, earlier: TrainState) -> float | None:
        """Return target tokens a second of training since an earlier state; None where no step lies between."""
        between_s = self.stepping_s - earlier.stepping_s
        return (self.num_tokens - earlier.num_tokens) / between_s if between_s > 0 else None

    def advanced(self, num_tokens: int, by_source: Sequence[tuple[float, int]] = ()) -> TrainState:
        """Return the state one step on, in which every source had some summed loss on some targets."""
        since = self.since_logged
        if by_source:
            before = since or ((0.0, 0),) * len(by_source)
            since = tuple((loss + more, num + n) for (loss, num), (more, n) in zip(before, by_source, strict=True))
        return replace(self, step=self.step + 1, num_tokens=self.num_tokens + num_tokens, since_logged=since)

    def skipped(self, num_tokens: int) -> TrainState:
        return replace(self.overflowed(num_tokens), skipped_steps=self.skipped_steps + 1)

    def overflowed(self, num_tokens: int) -> TrainState:
        """Return the state one step on, that step left out by the loss scale's own rule."""
        return replace(self.advanced(0), skipped_tokens=self.skipped_tokens + num_tokens)


@dataclass(frozen=True)
class BranchPoint(RunRecord):
    """What a run began with, where another run had trained that (`train.init_from`); beside its states."""

    FILE = "init_from.json"
    content_sha256: str  # of the manifest of the checkpoint or `final/`, which has the hash of each of its files
    step: int  # that it was written after, in the run it is of
    num_tokens: int  # that run had trained on
    moments: str  # of the optimiser: `fresh`, or `kept` from there

    def __str__(self) -> str:
        message = f"step {self.step:,} of a run, {self.num_tokens:,} tokens"
        return f"{message}, {self.moments} moments, sha256 {self.content_sha256[:12]}"


@dataclass(frozen=True)
class Cost(RunRecord):
    """What a training run cost; in `final/`."""

    FILE = "cost.json"
    trainable_parameters: int  # that an optimiser moved
    total_parameters: int  # of the whole model in training, frozen ones included; a tied one counts once
    # target tokens over all processes, during optimiser steps only: no periodic evaluation, no checkpoint; over all
    # resumes; None where no step was taken
    tokens_per_s: float | None
    # of the main process since it started; on a GPU what PyTorch allocated there, elsewhere resident memory, the
    # libraries' own included
    peak_memory_bytes: int
    device: str  # `cpu`, or what the GPU calls itself
    num_processes: int  # that shared the work
    saving_s: float  # seconds that training has waited for checkpoints, over all resumes


@dataclass(frozen=True)
class Parity:
    """How far an export is from the trained model."""

    max_logit_difference: float  # the largest, over all positions of all prompts
    mean_logit_difference: float  # the mean
    own_mean_difference: float  # how far the trained model itself moves when it is held in the export's dtype
    num_positions: int  # compared
    own_max_difference: float = 0.0  # as own_mean_difference, the largest
    # the same figures of a plain export that is served routed, against the trained model's router
    routed: Parity | None = None


@dataclass(frozen=True)
class ExportRecord(Parity, RunRecord):
    """What an export was made from, and how far it is from that."""

    FILE = "parity.json"
    trained_sha256: str | None = None  # of the training
    report_sha256: str | None = None  # that its card tells of; None: of none


def trained_sha256(folder: Path) -> str:
    try:
        return str(described_files(folder)[TRAINED]["sha256"])
    except KeyError:
        raise StorageError(f"{folder / MANIFEST}: does not name {TRAINED}") from None


def read_corpora(folder: Path) -> list[str]:
    """Return what names the content of every corpus that a checkpoint or `final/` was trained on."""
    return list(read_json(folder / CORPORA))


EVALUATION: Final = "evaluation_nats_per_token"
BITS: Final = "evaluation_bits_per_byte"
SHARES: Final = "evaluation_base_share"
SAMPLES: Final = "samples"
BENCHMARKS: Final = "benchmark_accuracies"
Losses = dict[str, dict[str, float | None]]  # by head, by corpus or benchmark; None: not finite
Shares = dict[str, float | None]  # by corpus, the share of tokens that the base head served under the router's rule


class MetricsRecord(TypedDict, total=False):
    """One line: of a step that is logged or left out, or of the periodic evaluation that follows a step."""

    step: Required[int]
    stream_ratios: list[float | None]  # rms(u)/rms(x) by layer
    loss: float
    loss_by_source: dict[str, float]  # the mean since the record before
    grad_norm: float
    lr: float
    num_tokens: int  # target tokens trained on by then
    tokens_per_s: float  # since the record before
    mfu: float  # of the devices' peak, the share that those are; where the peak is known
    data_wait_s: float  # since the record before, waiting for batches
    peak_memory_bytes: int  # of this process so far; on a GPU, of the GPU
    elapsed_s: float
    evaluating_s: float
    saving_s: float
    log_every_steps: int  # it may change at a resume
    skipped: str  # why the step was left out
    evaluation_nats_per_token: Losses
    evaluation_bits_per_byte: Losses
    evaluation_base_share: Shares
    samples: dict[str, dict[str, str]]  # by corpus a prompt, and how the served head goes on
    benchmark_accuracies: Losses
    best_step: int  # of the evaluation whose weights are kept, where one is chosen


def _whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a log; one without its newline was cut off in the middle of a write."""
    return path.read_bytes().rpartition(b"\n")[0].splitlines() if path.exists() else []


def read_records(path: Path) -> list[MetricsRecord]:
    """Read every whole record of a log; there is none where there is no log."""
    records = []
    for number, line in enumerate(_whole_lines(path), 1):
        try:
            record = json.loads(line)
            int(record["step"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise StorageError(f"{path}:{number}: damaged, not a record of the log; remove the line") from None
        records.append(record)
    return records


def place_of(record: MetricsRecord) -> tuple[int, bool]:
    """Return what records are in order of: the step, and whether it is the evaluation that follows it."""
    return int(record["step"]), EVALUATION in record or BENCHMARKS in record


class MetricsLog:
    """Appends records to a file; a resumed run first drops what came after its checkpoint.

    Where the run begins with the evaluation of that step (`evaluation_due`), what the log has of it goes too.
    """

    def __init__(self, path: Path, resumed_step: int, *, evaluation_due: bool = False) -> None:
        self.path = path
        self.listeners: list[Callable[[MetricsRecord], None]] = []  # called with every record that is written
        lines = zip(_whole_lines(path), read_records(path), strict=True)
        kept = [line for line, record in lines if place_of(record) <= (resumed_step, not evaluation_due)]
        write_text(path, "".join(f"{line.decode()}\n" for line in kept))

    def append(self, record: MetricsRecord) -> None:
        """Write one record; it is on its way to the disk before the next step starts."""
        line = json.dumps(record, allow_nan=False) + "\n"
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(line)
        for listen in self.listeners:
            listen(record)

    def sync(self) -> None:
        """Make what was appended durable, before a checkpoint that counts on it."""
        with writing(self.path):
            sync(self.path)
