"""What an export was made from, and how far it is from the trained model."""

from __future__ import annotations

from dataclasses import dataclass

from scale_cli.report import quantity
from scale_cli.storage.records import RunRecord


@dataclass(frozen=True)
class Parity:
    """How far an export is from the trained model; one that is too far is never written."""

    max_logit_difference: float  # largest over all positions of all prompts
    mean_logit_difference: float
    # mean change of the trained model's own logits when it is held in the export's dtype
    own_mean_difference: float
    num_positions: int  # compared
    own_max_difference: float = 0.0  # largest such change
    # the same figures for a plain export served with routing, against the trained model's router
    routed: Parity | None = None

    def __str__(self) -> str:
        return (
            f"its logits at {self.num_positions:,} positions are {self.mean_logit_difference:.1e} from "
            f"the trained model's on average, and {self.max_logit_difference:.1e} at most; that model's "
            f"own rounding is {self.own_mean_difference:.1e} and {self.own_max_difference:.1e}"
        )


@dataclass(frozen=True)
class ServedSize:
    """The size of a plain export, beside the base's."""

    parameters: int
    num_bytes: int
    base_parameters: int
    base_bytes: int
    # added channels of the stream, as a share of the base's; None: nothing is widened
    ratio: float | None

    def __str__(self) -> str:
        return (
            f"{quantity(self.parameters)} parameters, {quantity(self.num_bytes, 'B')} as a plain export (the base: "
            f"{quantity(self.base_parameters)}, {quantity(self.base_bytes, 'B')})"
        )


@dataclass(frozen=True)
class ExportRecord(Parity, RunRecord):
    """What an export was made from, and how far it is from that."""

    FILE = "parity.json"
    trained_sha256: str | None = None  # of the trained tensors
    report_sha256: str | None = None  # of the report that its card cites; None: none
    size: ServedSize | None = None
