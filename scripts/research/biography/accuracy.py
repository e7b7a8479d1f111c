"""Hard first-token accuracy: is the most likely token after a question the first token of its answer?

Shapes: K heads (base, trained), B questions, T positions, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scale_cli.evaluation.results import HEADS_AND_RULES
from scale_cli.methods.widened import RouterConfig
from scale_cli.model.heads import Streams, token_log_probs
from scale_cli.model.routing import mix_log_probs
from scripts.research.biography.tasks import Question

_QUESTIONS_AT_ONCE = 256


def first_token_accuracy(
    model: Streams, questions: Sequence[Question], router: RouterConfig, mixed_precision: str
) -> dict[str, float]:
    """Return, for each of HEADS_AND_RULES, the share of questions that a model in evaluation mode answers correctly.

    The router reads the question before the answer, as it does when the model is served.

    Source: SCALE, arXiv 2511.03270 (its biography benchmark).
    """
    by_length = defaultdict(list)
    for asked in questions:
        by_length[len(asked.prompt)].append(asked)  # questions of one length need no padding
    answered = dict.fromkeys(HEADS_AND_RULES, 0)
    for group in by_length.values():
        for first in range(0, len(group), _QUESTIONS_AT_ONCE):
            batch = group[first : first + _QUESTIONS_AT_ONCE]
            for name, right_B in _answered(model, batch, router, mixed_precision).items():
                answered[name] += int(right_B.sum())
    return {name: count / len(questions) for name, count in answered.items()}


def _answered(
    model: Any, batch: Sequence[Question], router: RouterConfig, mixed_precision: str
) -> dict[str, Tensor]:
    device = next(model.parameters()).device
    prompt_BT = torch.tensor([asked.prompt for asked in batch], device=device)
    answer_B = torch.tensor([asked.answer[0] for asked in batch], device=device)
    next_BT = torch.cat([prompt_BT[:, 1:], answer_B[:, None]], dim=1)
    with (
        torch.no_grad(),
        torch.autocast(device.type, torch.bfloat16, enabled=mixed_precision == "bf16"),
    ):
        last = model.head_logits(prompt_BT)(slice(-1, None))
        logits_KBV = torch.stack([logits[:, 0].float() for logits in last])
        tokens = token_log_probs(model, prompt_BT, next_BT)
    likeliest = dict(zip(HEADS_AND_RULES[:2], logits_KBV.argmax(dim=-1), strict=True))
    log_probs_KBV = logits_KBV.log_softmax(dim=-1)
    for rule in HEADS_AND_RULES[2:]:
        weights_KB1 = tokens.log_weights(rule, router)[..., -1:]
        likeliest[rule] = mix_log_probs(weights_KB1.to(log_probs_KBV.dtype), log_probs_KBV).argmax(
            dim=-1
        )
    return {name: ids_B == answer_B for name, ids_B in likeliest.items()}
