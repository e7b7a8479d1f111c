"""The proof that a widened model still is its base: logits bitwise equal, on text, at equal shapes."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

from scale_cli.errors import PreservationError
from scale_cli.model.modeling_scale import ScaleForCausalLM

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


@torch.no_grad()
def check_preservation(model: ScaleForCausalLM, tokenizer: PreTrainedTokenizerBase) -> int:
    """Compare the widened model's base logits with the base model's own, bit for bit, and count the prompts.

    Raises:
        PreservationError: naming the first text on which they differ.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    for text in SAMPLE_TEXTS:
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids.to(device)
        expected = model.base(ids, use_cache=False).logits
        if not torch.equal(model.base_logits(model.final_states(ids, preserved=True)), expected):
            raise PreservationError(f"the base logits are not preserved on {text!r}")
    model.train(was_training)
    return len(SAMPLE_TEXTS)
