"""What stands around transformers' `generate`: padded prompts before it, ends after it, and a bar.

Shapes: B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.streamers import BaseStreamer

from scale_cli.chat_turns import answer_end


def ends_of(named: int | list[int] | None, tokenizer: Any) -> list[int]:
    """Return the tokens that end a text: a document's end, those that the generation settings name,
    and the end of the assistant's turn in a chat.
    """
    ends = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    ends.append(answer_end(tokenizer))
    return [end for end in dict.fromkeys(ends) if end is not None]


def before_end(ends: Sequence[int], new_T: Tensor) -> Tensor:
    ended = torch.isin(new_T, torch.tensor(ends, dtype=new_T.dtype, device=new_T.device)).nonzero()
    return new_T[: int(ended[0])] if len(ended) else new_T


def padded_left(prompts: Sequence[Tensor], padding: int) -> tuple[Tensor, Tensor]:
    """Return prompts padded on the left, (B, T) ids, and a mask: 1 for tokens, 0 for padding."""
    ids_BT = pad_sequence(
        list(prompts), batch_first=True, padding_value=padding, padding_side="left"
    )
    mask_BT = pad_sequence(
        [torch.ones_like(ids) for ids in prompts], batch_first=True, padding_side="left"
    )
    return ids_BT, mask_BT


class TokensWritten(BaseStreamer):
    """Moves a bar by every token that `generate` writes."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def put(self, value: Tensor) -> None:
        """Take the prompts' ids (B, T) first, which do not count, then one token of each (B,)."""
        if value.dim() == 1:
            self._bar.update(len(value))

    def end(self) -> None:
        """Do nothing: the bar may move on with other prompts."""
