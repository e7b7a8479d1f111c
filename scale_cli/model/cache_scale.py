"""The generation state of a widened model: keys and values of every stream, and the router's memory."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache

from .routing import RouterMemory


class ScaleCache(DynamicCache):
    """A DynamicCache with one slot for each stream of each layer, and the router's memory beside it.

    With L layers and K expansions, slot i holds base layer i, slot kL + i the heads of the k-th expansion in it, and
    slot (K + k)L + i the base's heads as the stream that the k-th adapts sees them: from its first collaborating layer
    up, where the untouched stream is served too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router: RouterMemory | None = None

    def reset(self) -> None:
        super().reset()
        self.router = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self.router = self.router and self.router.chosen(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.router = self.router and self.router.chosen(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence, as contrastive search does."""
        super().batch_repeat_interleave(repeats)
        self.router = self.router and self.router.repeated(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: the router's weights cannot be taken back without the tokens they came from."""
        raise NotImplementedError(
            "a widened model's cache cannot be cropped; generate without assisted decoding or prompt lookup"
        )
