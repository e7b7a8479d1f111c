"""An expansion's streams in vLLM: [x | u] is one row of a wider trunk, which a plain export is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from .head_parts import HeadProducts, Weights, is_readable, of_streams, products_with
from .stream_heads import added


class WidenedStreams:
    """Both streams in one pass: the model is served as it is."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        self.sizes = model.config.scale_router["stream_sizes"]  # channels of x and of u
        self._lm_head = model.lm_head
        if sum(self.sizes) != model.config.hidden_size:
            raise ValueError(
                f"{vllm_config.model_config.model}: config.json: scale_router.stream_sizes "
                f"{self.sizes} do not add up to hidden_size {model.config.hidden_size}"
            )

    def run(self, trunk: Callable[..., Tensor], ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Return the trunk's last rows."""
        return trunk(ids_T, positions_T)

    def load(self, load: Callable[..., set[str]], weights: Weights) -> set[str]:
        """Load the weights by the model's own `load`."""
        return load(weights)

    def head_products(self) -> HeadProducts:
        """Return products of x and u with their columns of the head.

        The columns of a quantised head cannot be separated. It multiplies rows in which the other
        stream is zero: correct for any linear method, at the cost of one whole product for each
        head.
        """
        head = self._lm_head
        if is_readable(head):
            return products_with(head.weight.data.split(self.sizes, dim=-1), self.sizes, added)

        def padded(stream_TD: Tensor, margins: tuple[int, int]) -> Tensor:
            product_TV: Tensor = head.quant_method.apply(
                head, nn.functional.pad(stream_TD, margins)
            )
            return product_TV

        num_base, num_added = self.sizes
        of_each = [partial(padded, margins=of) for of in ((0, num_added), (num_base, 0))]
        return HeadProducts(nn.ModuleList(), [of_streams(of_each, self.sizes)], None, added)
