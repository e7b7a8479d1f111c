"""A base and a model trained from all of it in vLLM: two trunks in one model, and a pass of each.

The folder that is served has the trained model, whose class runs it. The base is a second model of
that class, beside it. Each has layers of the KV cache, which share their blocks' numbers. The last
row is [x | y].

Shapes: T tokens of a step, D channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from vllm.compilation.backends import set_model_tag
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.transformers_utils.config import get_config

from .head_parts import Weights, products_of_heads
from .stream_heads import HeadProducts

_BASE = "base."


class CopyStreams:
    """A pass of the base, and one of the trained model."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        self.sizes: Sequence[int] = [model.config.hidden_size] * 2  # channels of x and of y
        self._model = model
        router = model.config.scale_router
        base = router["base"]
        revision = router["revision"]
        config = get_config(base, trust_remote_code=False, revision=revision)
        if config.hidden_size != model.config.hidden_size:
            raise ValueError(
                f"{vllm_config.model_config.model}: its hidden_size is {model.config.hidden_size}, "
                f"but that of {base} is {config.hidden_size}: not the base that it was trained from"
            )
        family = next(of for of in type(model).__mro__ if of.__module__.startswith("vllm."))
        with set_model_tag("base"):
            model.base = family(
                vllm_config=vllm_config.with_hf_config(config, [family.__name__]),
                prefix=_BASE.removesuffix("."),
            )
        model.secondary_weights = [DefaultModelLoader.Source(base, revision, prefix=_BASE)]

    def run(self, trunk: Callable[..., Tensor], ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Return [x | y], the last rows of both trunks."""
        x_TD = self._model.base(ids_T, positions_T)
        return torch.cat([x_TD, trunk(ids_T, positions_T)], dim=-1)

    def load(self, load: Callable[..., set[str]], weights: Weights) -> set[str]:
        """Load the trained model's weights by its own `load`, and the base's, which follow them."""
        loaded = set()
        for is_of_base, of_one in groupby(weights, lambda named: named[0].startswith(_BASE)):
            if is_of_base:
                of_base = ((name.removeprefix(_BASE), tensor) for name, tensor in of_one)
                loaded |= {f"{_BASE}{name}" for name in self._model.base.load_weights(of_base)}
            else:
                loaded |= load(of_one)
        return loaded

    def head_products(self) -> HeadProducts:
        """Return products of x with the base's head, and of y with the trained model's."""
        return products_of_heads([self._model.base.lm_head, self._model.lm_head], self.sizes)
