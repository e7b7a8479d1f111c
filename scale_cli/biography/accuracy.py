"""Hard first-token accuracy: is the likeliest token after a question the first one of its answer?

Shapes: K heads (base, trained), B questions, T positions, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from scale_cli.biography.tasks import Question
from scale_cli.config.schema import RouterConfig
from scale_cli.model.observing import TwoHeaded, observe_logits
from scale_cli.model.routing import (
    cosine_serves_base,
    head_log_probs,
    log_prior,
    logit_cosine,
    mix_log_probs,
    posterior_log_weights,
)

# The two heads alone, and both routing rules over them.
SERVED = ("base", "adapted", "posterior", "cosine")
_QUESTIONS_AT_ONCE = 256


def first_token_accuracy(
    model: TwoHeaded, questions: Sequence[Question], router: RouterConfig, mixed_precision: str
) -> dict[str, float]:
    """Return the share of questions answered, for each of SERVED.

    The router has seen the question before it comes to the answer, as it has when the model is served.

    Args:
        model: in evaluation mode.
        questions: what is asked.
        router: settings of both rules.
        mixed_precision: `no` | `bf16`.

    Source: SCALE, arXiv 2511.03270 (its biography benchmark).
    """
    by_length = defaultdict(list)
    for asked in questions:
        by_length[len(asked.prompt)].append(asked)  # questions of one length need no padding
    answered = dict.fromkeys(SERVED, 0)
    for group in by_length.values():
        for first in range(0, len(group), _QUESTIONS_AT_ONCE):
            batch = group[first : first + _QUESTIONS_AT_ONCE]
            for name, right_B in _answered(model, batch, router, mixed_precision).items():
                answered[name] += int(right_B.sum())
    return {name: count / len(questions) for name, count in answered.items()}


def _answered(
    model: TwoHeaded, batch: Sequence[Question], router: RouterConfig, mixed_precision: str
) -> dict[str, Tensor]:
    device = next(model.parameters()).device
    prompt_BT = torch.tensor([asked.prompt for asked in batch], device=device)
    answer_B = torch.tensor([asked.first_answer_id for asked in batch], device=device)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=mixed_precision == "bf16"):
        logits_at = model.head_logits(prompt_BT)
        base_B1V, adapted_B1V = logits_at(slice(-1, None))
        said_KBT = observe_logits(logits_at, prompt_BT[:, 1:], base_B1V.shape[-1]).log_probs_KBT
    base_BV, adapted_BV = base_B1V[:, 0].float(), adapted_B1V[:, 0].float()
    prior_K = log_prior(router.prior, device=device)
    start_KB = prior_K[:, None].expand(-1, len(batch))
    log_weights_KB = posterior_log_weights(said_KBT, start_KB, prior_K, router.switch_rate)[..., -1]
    said_KBV = torch.stack([head_log_probs(base_BV), head_log_probs(adapted_BV)])
    serves_base_B = cosine_serves_base(logit_cosine(base_BV, adapted_BV), router.threshold)
    predicted = {
        "base": base_BV.argmax(-1),
        "adapted": adapted_BV.argmax(-1),
        "posterior": mix_log_probs(log_weights_KB.unsqueeze(-1).to(said_KBV.dtype), said_KBV).argmax(-1),
    }
    predicted["cosine"] = torch.where(serves_base_B, predicted["base"], predicted["adapted"])
    return {name: ids_B == answer_B for name, ids_B in predicted.items()}
