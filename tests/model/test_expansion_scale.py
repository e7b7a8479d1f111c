"""What reaches the attention kernel: of the base's heads and of the added ones, the very same as in
the base itself.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.model.test_families import BASES, IDS, tiny
from tests.widening import as_if_trained, widen

ATTENTIONS = ("sdpa", "eager", "flex_attention", "flash_attention_2")
# Two documents in the first row and three in the second, some longer than the window of a family
# that has one.
ISOLATED = torch.tensor([[*range(25), *range(15)], [*range(9), *range(20), *range(11)]])
PADDED = torch.ones_like(IDS).index_fill_(1, torch.arange(5), 0)
INPUTS: dict[str, dict[str, Tensor]] = {
    "plain": {},
    "isolated documents": {"position_ids": ISOLATED},
    "padded on the left": {"attention_mask": PADDED},
}


def comparable(value: Any) -> Any:
    """A kernel's argument as something that `==` can be asked of."""
    if isinstance(value, BlockMask):
        value = create_mask(value.mask_mod, len(IDS), 1, IDS.shape[1], IDS.shape[1], device="cpu")
    return value.tolist() if isinstance(value, Tensor) else value


class Kernel:
    """Stands in for an attention function: gives every head the values of its own position, and
    remembers.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        # The base's layers hand them on, and no kernel reads them.
        for unread in ("use_cache", "output_router_logits"):
            options.pop(unread, None)
        options |= {"layer": module.layer_idx, "mask": attention_mask}
        options.setdefault("sliding_window")
        if query.shape[1] == module.config.num_attention_heads:
            options |= {"query": query, "key": key, "value": value}
        self.calls.append({name: comparable(argument) for name, argument in options.items()})
        return value.repeat_interleave(module.num_key_value_groups, dim=1).transpose(1, 2), None

    def taken(self) -> list[dict[str, Any]]:
        calls = self.calls
        self.calls = []
        return calls


# Of every family two ways to attend, each way of half the families.
@pytest.mark.parametrize(
    ("family", "attention"),
    [
        (family, ATTENTIONS[(number + place) % 4])
        for number, family in enumerate(BASES)
        for place in range(2)
    ],
)
def test_a_kernel_gets_of_every_layer_what_it_gets_in_the_base_and_the_same_for_added_heads(
    monkeypatch: pytest.MonkeyPatch, family: str, attention: str
) -> None:
    kernel = Kernel()
    model = as_if_trained(widen(tiny(family), "preserve", ratio=0.5))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, attention, kernel)
    model.base.config._attn_implementation = attention
    for inputs in INPUTS.values():
        # Flex attention's masks need no compiler.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            model.base(input_ids=IDS, use_cache=False, **inputs)
            of_base = kernel.taken()
            model(input_ids=IDS, use_cache=False, **inputs)
        of_widened = kernel.taken()
        assert of_widened[::2] == of_base
        shared = of_base[0].keys() - {"query", "key", "value"}
        for added, of_layer in zip(of_widened[1::2], of_base, strict=True):
            assert {name: added[name] for name in shared} == {
                name: of_layer[name] for name in shared
            }
