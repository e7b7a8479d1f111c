"""What an export was made from, and how far it is from the trained model."""

from __future__ import annotations

from dataclasses import dataclass

from scale_cli.report import percent, quantity
from scale_cli.storage.records import RunRecord

_LEAST_LEARNED = 1e-3  # nats a token; 5 % of less would be rounding


@dataclass(frozen=True)
class Losses:
    """What held-out text that was to be learned costs, in nats a token."""

    base: float
    run: float
    export: float

    @property
    def kept(self) -> float | None:
        """What the export keeps, as a share of what the run learned; None if that is nothing."""
        learned = self.base - self.run
        return (self.base - self.export) / learned if learned >= _LEAST_LEARNED else None

    def __str__(self) -> str:
        if self.kept is None:
            return (
                f"the run learned nothing that could be lost: held-out text costs {self.run:.4f} nats a token, by the "
                f"base {self.base:.4f}"
            )
        return f"keeps {percent(self.kept) if self.kept > 0.0 else 'nothing'} of what was learned"


@dataclass(frozen=True)
class Parity:
    """How far an export is from the trained model; one that is too far is never written."""

    nats: float  # of a position, the mean: its divergence from the trained model's prediction
    num_positions: int  # compared
    losses: Losses | None = None  # None: the run has no held-out text of the role acquisition
    # the same figures for a plain export served with routing, against the trained model's router
    routed: Parity | None = None

    def __str__(self) -> str:
        if self.losses is not None and self.losses.kept is not None:
            return str(self.losses)
        unknown = self.losses or "no held-out text of the role acquisition shows what was learned"
        return (
            f"its predictions at {self.num_positions:,} positions are {self.nats:.1e} nats from the trained model's on "
            f"average; {unknown}"
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
