"""The proof that a widened model preserves its base: bitwise equal logits, on text, at equal
shapes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from scale_cli.data.encoding import prompt_ids
from scale_cli.errors import PreservationError
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.processes import device
from scale_cli.terminal import progress_bar
from scale_cli.upscale.building import MethodModel

SAMPLE_TEXTS = (
    "It was the best of times, it was the worst of times.",
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park.",
    "The committee shall report to the assembly within thirty days of receiving the petition.",
    "def main() -> None:\n    print('hello, world')\n",
    "3.14159 is not 22/7, but 22/7 is close: 3.142857...",
    "안녕하세요. 오늘은 날씨가 참 좋습니다.",
    "모든 국민은 법 앞에 평등하다. 누구든지 차별을 받지 아니한다.",
    'She asked: "¿Qué hora es?" — and he answered, "Es ist drei Uhr."',
)


def sample_ids(tokenizer: PreTrainedTokenizerBase) -> list[Tensor]:
    """Return the sample texts as (1, T) ids, on the device of this process."""
    return [torch.tensor([prompt_ids(tokenizer, text)], device=device()) for text in SAMPLE_TEXTS]


@torch.no_grad()
def own_logits(model: MethodModel, prompts: list[Tensor]) -> list[Tensor]:
    """Return the trained head's logits on (1, T) prompts, which must stay equal when the model
    becomes a base.
    """
    model.eval()
    return [trained_logits(model, ids) for ids in _bar(prompts, "asking the base")]


def _bar(prompts: list[Tensor], label: str) -> Iterable[Tensor]:
    bar: Iterable[Tensor] = progress_bar(
        iterable=prompts, desc=label, unit=" prompts", delay=1.0, leave=False
    )
    return bar


def trained_logits(model: MethodModel, input_ids: Tensor) -> Tensor:
    """Return the trained head's logits: H x_a + H' u for a widened model, the only logits of any
    other.
    """
    if isinstance(model, ScaleForCausalLM):
        return model.trained_logits(model.final_states(input_ids, with_base_head=False))
    return model(input_ids=input_ids, use_cache=False).logits


@torch.no_grad()
def check_preservation(
    model: MethodModel, prompts: list[Tensor], base_logits: list[Tensor]
) -> None:
    """Raise PreservationError unless a method's model has its base's logits, bit for bit.

    The base head of a widened model must equal them at any time; the only head of any other model,
    at its start. `base_logits` are the base's logits on `prompts` (`sample_ids`), computed before
    it became a part of the model.
    """
    model.eval()
    asked = _bar(prompts, "comparing with the base")
    for text, ids, expected in zip(SAMPLE_TEXTS, asked, base_logits, strict=True):
        if isinstance(model, ScaleForCausalLM):
            logits = model.base_logits(model.final_states(ids, with_base_head=True))
        else:
            logits = (
                model(input_ids=ids, use_cache=False)
                .logits[..., : expected.shape[-1]]
                .to(expected.dtype)
            )
        if not torch.equal(logits, expected):
            raise PreservationError(f"the base logits are not preserved on {text!r}")
