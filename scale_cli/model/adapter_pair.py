"""A base and LoRA adapters on its own weights: where both decode, their rows pass in one batch.

Every linear map then reads its weights once for both streams; behind it, the second half of the
rows gets what the adapter adds, (x A) B. That is exact to rounding, since a product of more rows
may round otherwise. Scoring runs both streams in passes of their own, so the base keeps its bits.

Shapes: B sequences, T positions; R rank.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache_scale import CACHE
from .heads import HeadLogits, ModelPair
from .pass_scale import ScaleCache


class Adapter(NamedTuple):
    """What is added behind one linear map."""

    down: Tensor  # (R, inputs)
    up: Tensor  # (outputs, R)
    scale: float


class CacheOfBothRows(ScaleCache):
    """The state of 2 B rows: those of the base, then those of the trained model."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        layers: list[Any] = self.layers
        num_sequences = len(layers[0].keys) // 2
        both = torch.cat([indices, indices + num_sequences])
        for layer in layers:
            layer.batch_select_indices(both)
        self.router = self.router and self.router.chosen(indices)


class AdapterPair(ModelPair):
    """A base, and a model of PEFT that runs on the base's own weights."""

    def __init__(self, base: Any, trained: Any) -> None:
        super().__init__(base, trained)
        self._adds = False
        adapters = linear_adapters(trained)
        if adapters is not None:
            self.decoding_cache = CacheOfBothRows
            for name, adapter in adapters.items():
                base.get_submodule(name).register_forward_hook(partial(self._add, adapter))

    def _add(self, adapter: Adapter, _module: Any, args: Any, output: Tensor) -> Tensor | None:
        if not self._adds:
            return None
        num_sequences = len(output) // 2
        x_BTI = args[0][num_sequences:].to(adapter.down.dtype)
        added_BTO = F.linear(F.linear(x_BTI, adapter.down), adapter.up) * adapter.scale
        output[num_sequences:] += added_BTO
        return output

    def head_logits(self, input_ids: Tensor, cache: Any = None, **given: Any) -> HeadLogits:
        if not isinstance(cache, CacheOfBothRows):
            return super().head_logits(input_ids, cache, **given)

        def added(run: Any, *args: Any, **options: Any) -> Any:
            self._adds = True
            try:
                return run(*args, **options)
            finally:
                self._adds = False

        twice = {
            name: torch.cat([tensor, tensor])
            for name, tensor in {"input_ids": input_ids, **given}.items()
            if tensor is not None
        }
        states_BTD = added(
            self.base.get_decoder(), use_cache=True, **{CACHE: cache}, **twice
        ).last_hidden_state
        head = self.base.get_output_embeddings()
        return lambda at: added(head, states_BTD[:, at].contiguous()).chunk(2)


def without_copies(base: Any) -> Any:
    """Return a second model of the same weights, which lie in memory once."""
    return copy.deepcopy(base, {id(weight): weight for weight in base.parameters()})


def linear_adapters(trained: Any) -> dict[str, Adapter] | None:
    """Return the adapters of a PEFT model by the linear map that each is beside; None if some part
    of it is another: a whole matrix, an embedding, or weights by DoRA.
    """
    adapters = {}
    for name, module in trained.get_base_model().named_modules():
        if hasattr(module, "modules_to_save") or hasattr(module, "token_adapter"):
            return None
        if not hasattr(module, "lora_A"):
            continue
        (active,) = module.active_adapters
        variants = getattr(module, "lora_variant", {})
        if type(module).__name__ != "Linear" or variants or module.lora_bias.get(active):
            return None
        adapters[name] = Adapter(
            module.lora_A[active].weight, module.lora_B[active].weight, module.scaling[active]
        )
    return adapters
