"""An expansion's streams in vLLM: [x | u] is one row of a wider trunk, which a plain export is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from .head_parts import HeadPart, HeadProducts, Weights, is_readable, tiles_of
from .stream_heads import Products, added


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
        num_base, num_added = self.sizes
        if not is_readable(head):

            def padded(stream_TD: Tensor, margins: tuple[int, int]) -> Tensor:
                return head.quant_method.apply(head, nn.functional.pad(stream_TD, margins))

            of_x = partial(padded, margins=(0, num_added))
            of_u = partial(padded, margins=(num_base, 0))
            return HeadProducts(nn.ModuleList(), [self._products(of_x, of_u)], None, added)
        weight = head.weight.data
        parts = [
            nn.ModuleList([HeadPart(tile[:, :num_base]), HeadPart(tile[:, num_base:])])
            for tile in tiles_of(weight)
        ]
        weights = weight.split(self.sizes, dim=-1)
        return HeadProducts(
            nn.ModuleList(parts), [self._products(*of) for of in parts], weights, added
        )

    def _products(
        self, of_x: Callable[[Tensor], Tensor], of_u: Callable[[Tensor], Tensor]
    ) -> Products:
        def products(rows_TD: Tensor) -> tuple[Tensor, Tensor]:
            x_TD, u_TD = rows_TD.split(self.sizes, dim=-1)
            return of_x(x_TD), of_u(u_TD)

        return products
