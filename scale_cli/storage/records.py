"""The folders of a run, and the JSON files in them: one type per file.

`corpora.json`, beside the state, names the text that was trained on; the token ledger is in `data/ledger.py`.
`metrics.jsonl` is the log: one JSON object per line; interruptions neither repeat nor drop a step.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar, Final, Required, Self, TypedDict, cast

from pydantic import TypeAdapter, ValidationError

from scale_cli.errors import RunFolderError, StorageError
from scale_cli.storage.atomic import (
    MANIFEST,
    described_files,
    read_json,
    sync,
    write_json,
    write_text,
    writing,
)

TRAINED = "trained.safetensors"
CORPORA = "corpora.json"


class RunFolder:
    """The folders and files of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.upscaled = root / "upscaled"  # the expansion as `scale upscale` made it
        self.checkpoints = root / "checkpoints"  # from which `scale train` resumes
        self.final = root / "final"  # the trained expansion
        self.tensorboard = root / "tensorboard"  # TensorBoard's files
        self.tokens = root / "tokens"  # tokenised corpora, unless corpus.cache_dir says otherwise
        self.evaluation = root / "evaluation"  # the forgetting report
        self.exports = root / "export"  # a folder per format
        self.profile = root / "profile"  # traces of `train.profile_steps`
        self.metrics = (
            root / "metrics.jsonl"
        )  # a line for every logged step and periodic evaluation

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def export(self, export_format: str, dtype: str = "float32") -> Path:
        return self.exports / (export_format if dtype == "float32" else f"{export_format}-{dtype}")

    @property
    def config(self) -> Path:
        """The config file of the run's newest folder."""
        newest_first = sorted(self.checkpoints.glob("step-*"), reverse=True)
        for folder in (self.root, self.final, *newest_first, self.upscaled):
            if (folder / "scale.yaml").is_file():
                return folder / "scale.yaml"
        raise RunFolderError(
            f"{self.root}: is a folder, but not that of a run; give a config (YAML), or the folder of a run"
        )

    def check(self) -> None:
        """Raise RunFolderError, before any work, if results cannot be written here or would land elsewhere."""
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
                raise RunFolderError(
                    f"{place}: is not a folder, but a folder must be written there; move it away"
                )


def _links(place: Path) -> Iterator[Path]:
    """Yield the symbolic links at and below a place that may be written to, half-written folders included."""
    for path in (place, *place.parent.glob(f".{place.name}.*")):
        yield from (found for found in (path, *path.rglob("*")) if found.is_symlink())


def check_folder(key: str, folder: Path) -> None:
    """Raise RunFolderError unless a folder exists or can be made, and can be written to."""
    there = folder.absolute()
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        raise RunFolderError(f"{key} {folder}: {there} is not a folder")
    try:
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError
        if not folder.exists():  # root passes os.access, but some file systems hold no folders
            Path(
                mkdtemp(dir=there)
            ).rmdir()  # under a name of its own: other processes check the same folder
    except OSError:
        raise RunFolderError(f"{key} {folder}: {there} cannot be written to") from None


def check_replaceable(output: Path, kind: str) -> None:
    """Raise RunFolderError unless a folder is empty, or holds a result of this kind and nothing else."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    there = {path.relative_to(output).as_posix() for path in output.rglob("*")}
    try:
        ours = {*described_files(output), MANIFEST}
        replaceable = there <= ours and read_json(output / "report.json")["kind"] == kind
    except (StorageError, KeyError, TypeError):
        replaceable = False
    if not replaceable:
        raise RunFolderError(
            f"--output {output}: holds something other than a {kind}; choose a new folder"
        )


class RunRecord:
    """A dataclass that is saved in a folder as JSON; unknown keys are ignored."""

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
        """Read the file; StorageError if it is missing, or holds something else."""
        value = read_json(folder / cls.FILE)
        try:
            return cls.from_json(value)
        except (ValidationError, KeyError, TypeError):
            raise StorageError(
                f"{folder / cls.FILE}: damaged, or written by another version"
            ) from None

    @classmethod
    def load_if_there(cls, folder: Path) -> Self | None:
        return cls.load(folder) if cls.is_in(folder) else None


@cache  # building one takes longer than a hundred validations
def _adapter_of(record: type[RunRecord]) -> TypeAdapter[Any]:
    return TypeAdapter(record)


@dataclass(frozen=True)
class BaseRecord(RunRecord):
    """The base model that an expansion belongs to; in every method folder."""

    FILE = "base.json"
    name: str  # hub id or folder, as the config gave it
    revision: str | None  # the hub's commit, if it came from there
    dtype: str  # of the hashed tensors
    tensors: dict[str, str]  # SHA-256 of every tensor, by name
    config_sha256: str  # of the configuration's keys that affect computing: sizes, norms, RoPE
    tokenizer_sha256: str  # of the files that the tokenizer saves; empty if not recorded

    @property
    def content_sha256(self) -> str:
        """One hash for the whole model, independent of its folder."""
        lines = "".join(f"{name} {sha256}\n" for name, sha256 in sorted(self.tensors.items()))
        return hashlib.sha256(lines.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {"content_sha256": self.content_sha256, **asdict(self)}


@dataclass(frozen=True)
class Score:
    """A periodic evaluation's score of the weights at a step, in bits/byte of the served head."""

    step: int
    acquisition: float  # mean loss over the corpora with that role; lower is better
    forgetting: float  # largest loss increase over the base on any corpus with the role retention
    texts: list[str]  # names of the held-out corpora, which contain hashes of their text


@dataclass(frozen=True)
class TrainState(RunRecord):
    """How far a run has come; in checkpoints and `final/`."""

    FILE = "position.json"
    step: int = 0  # optimiser steps done
    num_tokens: int = 0  # target tokens trained on
    # seconds of training, evaluating and saving; like the next three, over all resumes
    elapsed_s: float = 0.0
    stepping_s: float = 0.0  # of those, seconds in steps
    evaluating_s: float = 0.0  # of those, seconds in periodic evaluations
    saving_s: float = 0.0  # of those, seconds that training waited for checkpoints
    skipped_steps: int = 0  # steps skipped because their loss or gradient was not finite
    skipped_tokens: int = (
        0  # target tokens of those steps, and of steps whose gradient overflowed float16
    )
    loss_scale: float | None = None  # factor of the next loss; None: no float16
    loss_scale_steps: int = 0  # steps since it changed
    evaluation_due: bool = (
        False  # a signal interrupted this step's periodic evaluation; a resume begins with it
    )
    # by source, (summed loss, number of targets) since the last record of the log; empty: nothing yet
    since_logged: tuple[tuple[float, int], ...] = ()
    best: Score | None = None  # its checkpoint is kept, if `train.max_forgetting` is set

    @property
    def tokens_per_s(self) -> float | None:
        """Target tokens per second of training, without evaluations and checkpoints; None before the first step."""
        return self.rate_since(TrainState())

    def rate_since(self, earlier: TrainState) -> float | None:
        """Return target tokens per second of training since an earlier state; None if there was no step between."""
        between_s = self.stepping_s - earlier.stepping_s
        return (self.num_tokens - earlier.num_tokens) / between_s if between_s > 0 else None

    def advanced(self, num_tokens: int, by_source: Sequence[tuple[float, int]] = ()) -> TrainState:
        """Return the state after one more step; `by_source` has each source's (summed loss, number of targets)."""
        since = self.since_logged
        if by_source:
            before = since or ((0.0, 0),) * len(by_source)
            since = tuple(
                (loss + more, num + n)
                for (loss, num), (more, n) in zip(before, by_source, strict=True)
            )
        return replace(
            self, step=self.step + 1, num_tokens=self.num_tokens + num_tokens, since_logged=since
        )

    def skipped(self, num_tokens: int, *, counts: bool) -> TrainState:
        """Return the state after a step that was not finite; it does not count if it only overflowed float16."""
        tokens, steps = self.skipped_tokens + num_tokens, self.skipped_steps + counts
        return replace(self.advanced(0), skipped_tokens=tokens, skipped_steps=steps)


@dataclass(frozen=True)
class BranchPoint(RunRecord):
    """The folder of another run that a run began with (`train.init_from`); saved beside each state."""

    FILE = "init_from.json"
    content_sha256: str  # of the manifest of the checkpoint or `final/`, which has the hash of each of its files
    step: int  # of the other run, when it wrote that folder
    num_tokens: int  # the other run had trained on

    def __str__(self) -> str:
        message = f"step {self.step:,} of a run, {self.num_tokens:,} tokens"
        return f"{message}, sha256 {self.content_sha256[:12]}"


@dataclass(frozen=True)
class Cost(RunRecord):
    """What a training run cost; in `final/`."""

    FILE = "cost.json"
    trainable_parameters: int
    total_parameters: (
        int  # of the whole model in training, frozen ones included; a tied one counts once
    )
    # target tokens of all processes per second of optimiser steps, without periodic evaluations and checkpoints, over
    # all resumes; None if no step was taken
    tokens_per_s: float | None
    # of the main process since it started: on a GPU, what PyTorch allocated there; otherwise resident memory, with that
    # of the libraries
    peak_memory_bytes: int
    device: str  # `cpu`, or the GPU's name
    num_processes: int
    saving_s: float  # seconds that training waited for checkpoints, over all resumes


@dataclass(frozen=True)
class Parity:
    """How far an export is from the trained model."""

    max_logit_difference: float  # largest over all positions of all prompts
    mean_logit_difference: float
    own_mean_difference: (
        float  # mean change of the trained model's own logits when held in the export's dtype
    )
    num_positions: int  # compared
    own_max_difference: float = 0.0  # largest such change
    # the same figures for a plain export served with routing, against the trained model's router
    routed: Parity | None = None


@dataclass(frozen=True)
class ExportRecord(Parity, RunRecord):
    """What an export was made from, and how far it is from that."""

    FILE = "parity.json"
    trained_sha256: str | None = None  # of the trained tensors
    report_sha256: str | None = None  # of the report that its card cites; None: none


def trained_sha256(folder: Path) -> str:
    try:
        return str(described_files(folder)[TRAINED]["sha256"])
    except KeyError:
        raise StorageError(f"{folder / MANIFEST}: does not name {TRAINED}") from None


def read_corpora(folder: Path) -> list[str]:
    """Return the content-hashed name of every corpus that a checkpoint or `final/` was trained on."""
    return list(read_json(folder / CORPORA))


EVALUATION: Final = "evaluation_nats_per_token"
BITS: Final = "evaluation_bits_per_byte"
SHARES: Final = "evaluation_base_share"
SAMPLES: Final = "samples"
BENCHMARKS: Final = "benchmark_accuracies"
Losses = dict[
    str, dict[str, float | None]
]  # by corpus or benchmark, then by head; None: not finite
Shares = dict[
    str, float | None
]  # by corpus, the share of tokens for which the router chose the base head


class MetricsRecord(TypedDict, total=False):
    """One line of the log: a logged or skipped step, or the periodic evaluation after a step."""

    step: Required[int]
    stream_ratios: list[float | None]  # rms(u)/rms(x) by layer
    loss: float
    loss_by_source: dict[str, float]  # mean since the previous record
    grad_norm: float
    lr: float
    num_tokens: int  # target tokens trained on so far
    tokens_per_s: float  # since the previous record
    mfu: float  # tokens_per_s as a share of the devices' peak, if that is known
    data_wait_s: float  # wait for batches since the previous record
    peak_memory_bytes: int  # of this process so far; on a GPU, of the GPU
    elapsed_s: float
    evaluating_s: float
    saving_s: float
    log_every_steps: int  # it may change at a resume
    skipped: str  # why the step was skipped
    evaluation_nats_per_token: Losses
    evaluation_bits_per_byte: Losses
    evaluation_base_share: Shares
    samples: dict[str, dict[str, str]]  # by corpus, a prompt and the served head's continuation
    benchmark_accuracies: Losses
    best_step: int  # step of the evaluation whose weights are kept, if one is chosen


def _whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a log, without a last line that a kill cut off before its newline."""
    return path.read_bytes().rpartition(b"\n")[0].splitlines() if path.exists() else []


def read_records(path: Path) -> list[MetricsRecord]:
    """Read every whole record of a log; [] if there is no log."""
    records = []
    for number, line in enumerate(_whole_lines(path), 1):
        try:
            record = json.loads(line)
            int(record["step"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise StorageError(
                f"{path}:{number}: damaged, not a record of the log; remove the line"
            ) from None
        records.append(record)
    return records


def place_of(record: MetricsRecord) -> tuple[int, bool]:
    """Return the sort key of a record: its step, and whether it is the evaluation after that step."""
    return int(record["step"]), EVALUATION in record or BENCHMARKS in record


class MetricsLog:
    """Append records to a file; a resumed run first drops the records after its checkpoint.

    If the run begins with that step's evaluation (`evaluation_due`), its record is dropped too.
    """

    def __init__(self, path: Path, resumed_step: int, *, evaluation_due: bool = False) -> None:
        self.path = path
        self.listeners: list[
            Callable[[MetricsRecord], None]
        ] = []  # called with every written record
        lines = zip(_whole_lines(path), read_records(path), strict=True)
        kept = [
            line for line, record in lines if place_of(record) <= (resumed_step, not evaluation_due)
        ]
        write_text(path, "".join(f"{line.decode()}\n" for line in kept))

    def append(self, record: MetricsRecord) -> None:
        """Write one record and pass it to the listeners; it is flushed, but not synced."""
        line = json.dumps(record, allow_nan=False) + "\n"
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(line)
        for listen in self.listeners:
            listen(record)

    def sync(self) -> None:
        """Sync the log to the disk, before a checkpoint that relies on it."""
        with writing(self.path):
            sync(self.path)
