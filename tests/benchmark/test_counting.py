from typing import Any

import torch
from torch import nn

from scripts.benchmark.counting import peak_bytes, saved_activation_bytes


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
            return lambda ids, use_cache: (
                [ids.float() @ w.T for w in self.weights[:1]] + [use_cache]
            )

    assert saved_activation_bytes(Twice(), torch.zeros(5, 8, dtype=torch.long), "no") == 5 * 8 * 4
