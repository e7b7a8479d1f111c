"""What a start of the added blocks is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class TextToLearn:
    """What the start asks of the text to be learned."""

    token_shares: Tensor  # (V,) of the new tokens too, float64
    sample_ids: Tensor  # (1, T), how it begins


class Start(ABC):
    """One way to fill the added blocks, which are 0 before, and whose gains are 1."""

    name: ClassVar[str]  # as the model's config keeps it
    # Whether the search of `train.lr: auto` finds a rate at which training holds.
    first_update_tells: ClassVar[bool]

    @abstractmethod
    def suits(self, base: PreTrainedModel, text: TextToLearn | None) -> bool:
        """Return whether a base begins like this with a text; None: text that it knows."""

    @abstractmethod
    def fill(self, model: Any, seed: int, text: TextToLearn | None) -> dict[str, float]:
        """Fill a widened model's blocks; return what `rates` asks of them later."""

    @abstractmethod
    def rates(self, began: Mapping[str, Any], optimiser: str) -> Mapping[str, float]:
        """Return the learning rates by kind of tensor, relative to `train.lr`.

        Args:
            began: what `fill` returned.
            optimiser: `train.optimiser`.
        """
