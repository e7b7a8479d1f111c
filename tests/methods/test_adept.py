"""ADEPT copies the layers that its own code does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from scale_cli.data.batches import MicroBatch
from scale_cli.methods.adept import Adept, AdeptConfig, bypass_losses
from tests.widening import TINY, tiny_llama


def windows(number: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, TINY["vocab_size"], (number, 12), generator=generator)
    return [MicroBatch(row[None, :-1], row[None, 1:], torch.tensor([0])) for row in ids]


def qwen3() -> PreTrainedModel:
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    sizes: dict[str, Any] = {**TINY, "head_dim": 8, "use_sliding_window": True, "sliding_window": 4}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, layer_types=kinds)).eval()


@pytest.mark.parametrize("base", [tiny_llama, qwen3])
@torch.no_grad()
def test_a_layers_score_is_the_loss_where_all_its_weights_are_zero(base: Any) -> None:
    model, probe = base(), windows(3)
    found = bypass_losses(model, probe)
    for index, layer in enumerate(model.model.layers):
        kept = [(parameter, parameter.clone()) for parameter in layer.parameters()]
        for parameter, _ in kept:
            parameter.zero_()
        losses = [model(w.input_ids, labels=w.targets, shift_labels=w.targets).loss for w in probe]
        assert found[index] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)
        for parameter, before in kept:
            parameter.copy_(before)
    assert len(set(found)) == len(model.model.layers)


def test_copied_are_those_that_hurt_least_in_order_and_as_many_as_asked_for() -> None:
    model, probe = tiny_llama(), windows(2)
    losses = bypass_losses(model, probe)
    for number in (1, 2, 3):
        layers = Adept().find(AdeptConfig(num_blocks=number), model, probe).layers
        assert layers == sorted(sorted(range(3), key=losses.__getitem__)[:number])
