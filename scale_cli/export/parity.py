"""Whether an export computes what was trained: its logits on text, position by position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scale_cli.errors import ExportParityError, one_line
from scale_cli.terminal import progress_bar
from scale_cli.upscale.building import MethodModel

_POSITIONS_AT_ONCE = 32

Logits = Callable[[MethodModel, Tensor], Tensor]


@dataclass(frozen=True)
class Tolerance:
    """How far the logits of two models may be apart."""

    logits: float  # at most, as a share of the largest
    nats: float  # on average: the divergence of a position's prediction
    base_head: (
        float  # nats that a retained document of 256 tokens may cost the export's base head more
    )


# By the dtype of the weights. Merged with LoRA, SmolLM2-135M is 3e-4 from itself in float32; its
# weights in bfloat16, computed in float32, are 4e-4 nats off on average, and at the token after BOS
# one logit is 0.57 off. What of that matters, the loss says (`learned.py`). In bfloat16 Gemma 3's base
# head is 0.72 nats off on 400 tokens of a document, in float32 a toy's 1e-5. One matrix with the
# wrong sign is 1 nat.
TOLERANCES = {
    torch.float32: Tolerance(logits=1e-3, nats=1e-6, base_head=0.05),
    torch.float16: Tolerance(logits=0.25, nats=2e-3, base_head=0.5),
    torch.bfloat16: Tolerance(logits=1.0, nats=5e-2, base_head=2.0),
}


def coarser(one: Any, other: Any) -> Tolerance:
    """Return the tolerance of the coarser of two models' dtypes."""
    return max(TOLERANCES[one.dtype], TOLERANCES[other.dtype], key=lambda of: of.logits)


def served_logits(model: MethodModel, input_ids: Tensor) -> Tensor:
    """Return the logits that the trained model answers with: routed ones for `route`."""
    return model(input_ids=input_ids, use_cache=False).logits


def check_close(logits: Tensor, wanted: Tensor, share: float, problem: str) -> None:
    """Raise ExportParityError with a `problem` if logits differ by more than a share of the largest."""
    largest = wanted.abs().nan_to_num(0.0, posinf=0.0).max().item()
    allowed = share * largest
    try:
        torch.testing.assert_close(logits.float(), wanted.float(), rtol=0.0, atol=allowed)
    except AssertionError as error:
        raise ExportParityError(f"{problem}: logits differ: {one_line(error)}") from None


@torch.no_grad()
def measure_parity(
    exported: Any,
    trained: MethodModel,
    expected: Logits,
    prompts: list[Tensor],
    tolerance: Tolerance,
) -> float:
    """Return how far an export's predictions are from the trained model's on (1, T) prompts: the
    mean divergence of a position in nats.

    `expected` gives the trained model's logits: of the trained head, or routed.

    Raises:
        ExportParityError: they are further apart than the tolerance.
    """
    problem = "the export does not compute what the trained model computes"
    nats = []
    bar = progress_bar(
        iterable=prompts,
        desc="comparing the export",
        unit=" texts",
        leave=False,
    )
    for input_ids in bar:
        wanted_TV = expected(trained, input_ids)[0]
        logits_TV = served_logits(exported, input_ids)[0]
        for some_PV, wanted_PV in zip(
            logits_TV.split(_POSITIONS_AT_ONCE), wanted_TV.split(_POSITIONS_AT_ONCE), strict=True
        ):
            check_close(some_PV, wanted_PV, tolerance.logits, problem)
            of_some_PV, of_wanted_PV = (
                each_PV.double().log_softmax(dim=1) for each_PV in (some_PV, wanted_PV)
            )
            divergence = F.kl_div(of_some_PV, of_wanted_PV, reduction="none", log_target=True)
            nats.append(divergence.sum(dim=1))

    mean = torch.cat(nats).mean().item()
    if not mean <= tolerance.nats:
        raise ExportParityError(
            f"{problem}: its predictions are {mean:.1e} nats from that model's on average; "
            f"allowed: {tolerance.nats:g}"
        )
    return mean
