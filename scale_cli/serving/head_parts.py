"""Both heads' products in vLLM: parts of a vocabulary head, which it prepares like whole ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from .stream_heads import HeadProducts, Products, TrainedOf, trained_alone

Weights = Iterable[tuple[str, Tensor]]  # by name, as files have them
# Used on a CPU: the logits of so many tokens stay in its cache.
_TOKENS_OF_A_TILE = 8192


def products_with(
    weights: Sequence[Tensor], sizes: Sequence[int], trained_of: TrainedOf
) -> HeadProducts:
    """Return products of each stream with a matrix of its own; a row holds `sizes` channels of each."""
    parts = [
        nn.ModuleList(map(HeadPart, tiles)) for tiles in zip(*map(tiles_of, weights), strict=True)
    ]
    tiles = [of_streams(of, sizes) for of in parts]
    return HeadProducts(nn.ModuleList(parts), tiles, weights, trained_of)


def products_of_heads(heads: Sequence[Any], sizes: Sequence[int]) -> HeadProducts:
    """Return products of each stream with a vocabulary head of its own: the base's, the trained."""
    if all(map(is_readable, heads)):
        return products_with([head.weight.data for head in heads], sizes, trained_alone)
    of_both = of_streams([partial(whole_product, head) for head in heads], sizes)
    return HeadProducts(nn.ModuleList(), [of_both], None, trained_alone)


def of_streams(products: Iterable[Callable[[Tensor], Tensor]], sizes: Sequence[int]) -> Products:
    """Return both streams' products, each by a function of its own."""
    of_x, of_y = products

    def of_both(rows_TD: Tensor) -> tuple[Tensor, Tensor]:
        x_TD, y_TD = rows_TD.split(list(sizes), dim=-1)
        return of_x(x_TD), of_y(y_TD)

    return of_both


def is_readable(lm_head: Any) -> bool:
    """Return whether the rows of a head can be read: it is not quantised."""
    return isinstance(lm_head.quant_method, UnquantizedEmbeddingMethod)


def whole_product(head: Any, rows_TD: Tensor) -> Tensor:
    """Return a head's logits of all its tokens, by vLLM's own method for it."""
    logits_TV: Tensor = head.quant_method.apply(head, rows_TD.contiguous())
    return logits_TV


def tiles_of(weight: Tensor) -> Sequence[Tensor]:
    """Return a head's rows in as many parts as are computed one after another."""
    return weight.split(_TOKENS_OF_A_TILE) if current_platform.is_cpu() else [weight]


class HeadPart(nn.Module):
    """Some rows and columns of a head, which vLLM prepares and multiplies like a whole head."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.quant_method = _PartMethod()

    def forward(self, rows_TD: Tensor) -> Tensor:
        return whole_product(self, rows_TD)


class _PartMethod(UnquantizedEmbeddingMethod):
    """vLLM's method for whole heads. On a CPU it packs the weights, and for that they must not be a
    view.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare a layer after its weights are loaded."""
        if current_platform.is_cpu():
            layer.weight = layer.weight.contiguous()
        super().process_weights_after_loading(layer)
