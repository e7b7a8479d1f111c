"""A base and a model trained from all of it in vLLM: two trunks in one model, and a pass of each.

The folder that is served has the trained model, whose class runs it. The base is a second model of
that class, beside it. Each has layers of the KV cache, which share their blocks' numbers. The last
row is [x | y].

Shapes: T tokens of a step, D channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.backends import set_model_tag
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.transformers_utils.config import get_config

from .head_parts import HeadProducts, Weights, is_readable, of_streams, products_with
from .stream_heads import second

_BASE = "base."


class CopyStreams:
    """A pass of the base, and one of the trained model."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        self.sizes: Sequence[int] = [model.config.hidden_size] * 2  # channels of x and of y
        self._model = model
        router = model.config.scale_router
        base, revision = router["base"], router["revision"]
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
        """Load the trained model's weights by its own `load`, then the base's."""
        given = iter(weights)
        first_of_base = []

        def of_trained() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in given:
                if name.startswith(_BASE):
                    first_of_base.append((name, tensor))
                    return
                yield name, tensor

        loaded = load(of_trained())
        of_base = (
            (name.removeprefix(_BASE), tensor) for name, tensor in chain(first_of_base, given)
        )
        return loaded | {f"{_BASE}{name}" for name in self._model.base.load_weights(of_base)}

    def head_products(self) -> HeadProducts:
        """Return products of x with the base's head, and of y with the trained model's."""
        heads = [self._model.base.lm_head, self._model.lm_head]
        if all(map(is_readable, heads)):
            return products_with([head.weight.data for head in heads], self.sizes, second)

        def multiplied(stream_TD: Tensor, head: Any) -> Tensor:
            product_TV: Tensor = head.quant_method.apply(head, stream_TD.contiguous())
            return product_TV

        of_each = [partial(multiplied, head=head) for head in heads]
        return HeadProducts(nn.ModuleList(), [of_streams(of_each, self.sizes)], None, second)
