"""Whether an export computes what the trained model computes, on real text."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from scale_cli.errors import ExportParityError
from scale_cli.export.dense import lower_weights
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.storage.records import Parity
from scale_cli.upscale.folder import MethodModel

MAX_LOGIT_DIFFERENCE = 1e-4  # float32
# An export may be this many times as far from the exact model as the trained model itself, held in the export's dtype:
# in the mean, which any wrong weight raises, and, where a float32 model rounds by more than the figure above, at the
# worst position, which is one of hundreds of thousands and scatters.
MAX_OWN_RATIO = 2.0
MAX_OWN_RATIO_AT_WORST = 10.0

Logits = Callable[[MethodModel, Tensor], Tensor]


def trained_logits(model: MethodModel, input_ids: Tensor) -> Tensor:
    """Return the trained head's logits: H x_a + H' u of a widened model, the only ones of any other."""
    if not isinstance(model, ScaleForCausalLM):
        return served_logits(model, input_ids)
    return model.adaptation_logits(model.final_states(input_ids, preserved=False))


def served_logits(model: MethodModel, input_ids: Tensor) -> Tensor:
    """Return what the trained model answers with: routed logits for `route`."""
    return model(input_ids=input_ids, use_cache=False).logits


@torch.no_grad()
def measure_parity(exported: MethodModel, trained: MethodModel, expected: Logits, prompts: list[Tensor]) -> Parity:
    """Compare an export with what it stands for of the trained model, on (1, T) ids.

    In float64, but for what its norms round to float32.
    """
    reference, lowered = copy.deepcopy(trained).double(), copy.deepcopy(trained)
    lower_weights(lowered, exported.dtype)
    differences, own = [], []
    for input_ids in prompts:
        wanted = expected(reference, input_ids)
        differences.append((exported(input_ids=input_ids, use_cache=False).logits.double() - wanted).abs().flatten())
        own.append((expected(lowered, input_ids).double() - wanted).abs().flatten())
    all_differences, all_own = torch.cat(differences), torch.cat(own)
    return Parity(
        max_logit_difference=all_differences.max().item(),
        mean_logit_difference=all_differences.mean().item(),
        own_mean_difference=all_own.mean().item(),
        num_positions=sum(input_ids.shape[1] for input_ids in prompts),
        own_max_difference=all_own.max().item(),
    )


def check_parity(parity: Parity, dtype: str) -> None:
    """Refuse an export that computes something else."""
    good = parity.mean_logit_difference <= MAX_OWN_RATIO * parity.own_mean_difference
    limit = f"a mean of {MAX_OWN_RATIO:g} x {parity.own_mean_difference:.2e}"
    if dtype == "float32":
        at_worst = MAX_OWN_RATIO_AT_WORST * parity.own_max_difference
        good = good and parity.max_logit_difference <= at_worst
        good = good or parity.max_logit_difference <= MAX_LOGIT_DIFFERENCE
        limit = f"{MAX_LOGIT_DIFFERENCE:g} at most, or {limit} and {at_worst:.2g} at most"
    if not good:
        raise ExportParityError(
            f"the export is not the trained model: logits differ by {parity.max_logit_difference:.2e} at most and "
            f"{parity.mean_logit_difference:.2e} in the mean, allowed is {limit} ({dtype})"
        )
