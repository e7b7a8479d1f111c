from typing import Any

import pytest
import torch
from torch import nn

from scripts.benchmark.counting import count_flops, peak_bytes, saved_activation_bytes


@pytest.mark.parametrize("num_key_value_heads", [8, 2])
def test_grouped_heads_of_a_gpu_kernel_count_like_repeated_ones(num_key_value_heads: int) -> None:
    """Transformers passes grouped heads to SDPA on a GPU; tensors without numbers take its kernel."""
    q_BNTA, k_BNTA = (
        torch.empty(2, heads, 16, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, num_key_value_heads)
    )

    def attend() -> None:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        attended = kernel(q_BNTA, k_BNTA, k_BNTA, 0.0, True)[0]
        attended.backward(torch.empty_like(attended))

    one_product = 2 * 2 * 8 * 16 * 16 * 64
    assert count_flops(attend) == (2 + 5) * one_product


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
