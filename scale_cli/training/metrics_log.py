"""`metrics.jsonl`, the log: one JSON object per line; interruptions neither repeat nor drop a step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final, Required, TypedDict

from scale_cli.errors import StorageError
from scale_cli.storage.atomic import (
    sync,
    write_text,
    writing,
)

EVALUATION: Final = "evaluation_nats_per_token"

BITS: Final = "evaluation_bits_per_byte"

SHARES: Final = "evaluation_base_share"

SAMPLES: Final = "samples"

# By corpus, then by head; None: not finite.
Losses = dict[str, dict[str, float | None]]

# By corpus, the share of tokens for which the router chose the base head.
Shares = dict[str, float | None]


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
    data_wait_s: float  # wait for batches since the previous record
    peak_memory_bytes: int  # of this process so far; on a GPU, of the GPU
    elapsed_s: float
    evaluating_s: float
    saving_s: float
    skipped: str  # why the step was skipped
    evaluation_nats_per_token: Losses
    evaluation_bits_per_byte: Losses
    evaluation_base_share: Shares
    samples: dict[str, dict[str, str]]  # by corpus, a prompt and the served head's continuation
    best_step: int  # step of the evaluation whose weights are kept, if one is chosen


def read_records(path: Path) -> list[MetricsRecord]:
    """Read every record of a log, without a last line that a kill cut off; [] if there is no log."""
    if not path.exists():
        return []
    records = []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    for number, line in enumerate(whole.splitlines(), start=1):
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
    return int(record["step"]), EVALUATION in record


class MetricsLog:
    """Append records to a file; a resumed run first drops the records after its checkpoint.

    If the run begins with that step's evaluation (`evaluation_due`), its record is dropped too.
    """

    def __init__(self, path: Path, resumed_step: int, *, evaluation_due: bool = False) -> None:
        self.path = path
        # Called with every written record.
        self.listeners: list[Callable[[MetricsRecord], None]] = []
        last = (resumed_step, not evaluation_due)
        kept = [record for record in read_records(path) if place_of(record) <= last]
        write_text(path, "".join(json.dumps(record) + "\n" for record in kept))

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
