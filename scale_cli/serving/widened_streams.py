"""An expansion's streams in vLLM: [x | u] is one row of a wider trunk, which a plain export is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .head_parts import Weights, is_readable, of_streams, products_with, whole_product
from .stream_heads import HeadProducts, trained_by_sum


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
            weights = head.weight.data.split(self.sizes, dim=-1)
            return products_with(weights, self.sizes, trained_by_sum)
        num_base, num_added = self.sizes
        of_each = [
            lambda x_TD: whole_product(head, F.pad(x_TD, (0, num_added))),
            lambda u_TD: whole_product(head, F.pad(u_TD, (num_base, 0))),
        ]
        of_both = of_streams(of_each, self.sizes)
        return HeadProducts(nn.ModuleList(), [of_both], None, trained_by_sum)
