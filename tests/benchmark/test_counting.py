from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from scale_cli.config.schema import MethodConfig
from scale_cli.upscale.method import start_model
from scripts.benchmark.counting import peak_bytes, saved_activation_bytes
from tests.widening import tiny_llama


def saved(method: dict[str, Any], batch_size: int = 2) -> int:
    model = start_model(tiny_llama(num_hidden_layers=4), MethodConfig.model_validate(method), seed=0)
    ids = torch.randint(0, 61, (batch_size, 16), generator=torch.Generator().manual_seed(0))
    return saved_activation_bytes(model, ids, "no")


def test_peak_memory_is_the_most_that_lives_at_once() -> None:
    def step() -> None:
        first = torch.zeros(1000)
        second = first + 1  # both live
        del first
        third = second.view(10, 100).mul_(2)  # nothing new
        del second, third
        torch.zeros(1500)

    assert peak_bytes(step) == 2 * 1000 * 4


def test_saved_activations_of_a_linear_map_are_its_input_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.zeros(4, 8)) for _ in range(2)])

        def get_decoder(self) -> Any:
            return lambda ids, use_cache: [ids.float() @ w.T for w in self.weights[:1]] + [use_cache]

    assert saved_activation_bytes(Twice(), torch.zeros(5, 8, dtype=torch.long), "no") == 5 * 8 * 4


@pytest.mark.parametrize("batch_size", [2, 3])
def test_layers_below_the_first_that_trains_save_nothing(batch_size: int) -> None:
    whole, *fewer = (
        saved({"variant": "freeze", "freeze": {"num_layers": frozen}}, batch_size) for frozen in (0, 1, 2, 3)
    )
    per_layer = whole - fewer[0]
    assert per_layer > 0
    assert [whole - less for less in fewer] == [per_layer, 2 * per_layer, 3 * per_layer]


def test_a_preserving_expansion_saves_less_the_fewer_layers_write_into_the_base() -> None:
    none, top, every = (
        saved({"variant": "route", "collaboration": {"layers": layers}}) for layers in ("none", "top:1", "all")
    )
    assert none < top < every
    assert none < saved({"variant": "full"})
