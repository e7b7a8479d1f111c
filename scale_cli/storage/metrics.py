"""metrics.jsonl: one JSON object a line, no step twice and none missing, whatever was interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final, Required, TypedDict

from scale_cli.errors import StorageError
from scale_cli.storage.atomic import sync, write_text, writing

EVALUATION: Final = "evaluation_nats_per_token"
EVALUATION_OF_AVERAGE: Final = "evaluation_of_average_nats_per_token"
BITS: Final = "evaluation_bits_per_byte"
BITS_OF_AVERAGE: Final = "evaluation_of_average_bits_per_byte"
SHARES: Final = "evaluation_base_share"
SHARES_OF_AVERAGE: Final = "evaluation_of_average_base_share"
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
    evaluation_of_average_nats_per_token: Losses
    evaluation_bits_per_byte: Losses
    evaluation_of_average_bits_per_byte: Losses
    evaluation_base_share: Shares
    evaluation_of_average_base_share: Shares
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
            raise StorageError(f"{path}:{number}: damaged, not a record of ours; remove the line") from None
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
