"""Whether an export computes what the trained model computes, on real text."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scale_cli.errors import ExportParityError
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.upscale.folder import MethodModel

MAX_LOGIT_DIFFERENCE = 1e-4  # float32
# In bfloat16 an export may be this many times as far from the float32 model as the trained model in bfloat16 is.
MAX_BFLOAT16_RATIO = 2.0

Logits = Callable[[MethodModel, Tensor], Tensor]


@dataclass(frozen=True)
class Parity:
    """How far an export is from the trained model.

    Args:
        max_logit_difference: the largest, over all positions of all prompts.
        mean_logit_difference: the mean.
        own_mean_difference: how far the trained model itself moves when it is held in the export's dtype.
        num_positions: compared.
    """

    max_logit_difference: float
    mean_logit_difference: float
    own_mean_difference: float
    num_positions: int


def trained_logits(model: MethodModel, input_ids: Tensor) -> Tensor:
    """Return the trained head's logits: H x_a + H' u of a widened model, the only ones of any other."""
    if not isinstance(model, ScaleForCausalLM):
        return served_logits(model, input_ids)
    return model.adaptation_logits(model.final_states(input_ids, preserved=False))


def served_logits(model: MethodModel, input_ids: Tensor) -> Tensor:
    """Return what the trained model answers with: routed logits for `route`."""
    logits: Tensor = model(input_ids=input_ids, use_cache=False).logits
    return logits


@torch.no_grad()
def measure_parity(exported: MethodModel, trained: MethodModel, expected: Logits, prompts: list[Tensor]) -> Parity:
    """Compare an export with the trained model in float32.

    Args:
        exported: as loaded from the folder that was written.
        trained: the trained model.
        expected: which of its logits the export stands for.
        prompts: (1, T) token ids.
    """
    reference = copy.deepcopy(trained).float()
    lowered = copy.deepcopy(trained)
    nn.Module.to(lowered, exported.dtype)
    differences, own = [], []
    for input_ids in prompts:
        wanted = expected(reference, input_ids)
        differences.append((exported(input_ids=input_ids, use_cache=False).logits.float() - wanted).abs().flatten())
        own.append((expected(lowered, input_ids).float() - wanted).abs().flatten())
    all_differences = torch.cat(differences)
    return Parity(
        max_logit_difference=all_differences.max().item(),
        mean_logit_difference=all_differences.mean().item(),
        own_mean_difference=torch.cat(own).mean().item(),
        num_positions=sum(input_ids.shape[1] for input_ids in prompts),
    )


def check_parity(parity: Parity, dtype: str) -> None:
    """Refuse an export that computes something else.

    Raises:
        ExportParityError: with the figure; also where a logit is not finite.
    """
    if dtype == "float32":
        good = parity.max_logit_difference <= MAX_LOGIT_DIFFERENCE
        limit = f"{MAX_LOGIT_DIFFERENCE:g}"
    else:
        good = parity.mean_logit_difference <= MAX_BFLOAT16_RATIO * parity.own_mean_difference
        limit = f"a mean of {MAX_BFLOAT16_RATIO:g} x {parity.own_mean_difference:.2e}"
    if not good:
        raise ExportParityError(
            f"the export is not the trained model: logits differ by {parity.max_logit_difference:.2e} at most and "
            f"{parity.mean_logit_difference:.2e} in the mean, allowed is {limit} ({dtype}); nothing was written"
        )
