"""A model with several heads that answers with one of them, for transformers' `generate`.

Shapes: K heads, B batch, T positions, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import CausalLMOutputWithPast

from scale_cli.chat_turns import answer_end
from scale_cli.methods.widened import RouterConfig
from scale_cli.model.branches_scale import ScaleCache
from scale_cli.model.cache_scale import CACHE, named, require_state
from scale_cli.model.heads import HeadedModel
from scale_cli.model.modeling_scale import RouterGenerationMixin
from scale_cli.model.routing import chosen_by_cosine, route


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


class SelectableHeads(PreTrainedModel, RouterGenerationMixin):
    """A model in evaluation mode that answers with `head`, which may be changed.

    It is the name of one of the heads, or of a rule of the router over them.

    It computes all heads whichever one answers, as scoring does, so the choice does not change what
    a head says.
    """

    # It supports whatever attention the model has.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True

    def __init__(self, model: HeadedModel, router: RouterConfig) -> None:
        super().__init__(copy.deepcopy(model.config))
        self.heads = list(model.heads)
        self.head = self.heads[0]
        self.generation_config = copy.deepcopy(model.generation_config)
        self._model = model
        self._router = router

    @property
    def head_logits(self) -> Any:
        return self._model.head_logits

    def answers(self, ids_BT: Tensor, mask_BT: Tensor, **options: Any) -> Tensor:
        """Return (B, new) ids: what `generate` adds to prompts that are padded on the left."""
        model: Any = self  # transformers types it for its own classes only
        whole: Tensor = model.generate(ids_BT, attention_mask=mask_BT, **options)
        return whole[:, ids_BT.shape[1] :]

    def tie_weights(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: lm-eval calls it on a model that is already whole."""

    def forward(
        self,
        input_ids: Tensor,  # (B, T)
        attention_mask: Tensor | None = None,  # (B, past + T), 1 for tokens; padding is on the left
        position_ids: Tensor | None = None,  # (B, T); counted from the cache's length if not given
        logits_to_keep: int = 0,  # for the last positions only; 0 for all
        evidence_mask: Tensor | None = None,  # (B, T), the tokens that the router judges by
        router_prior: float | Tensor | None = None,  # of the base, (B,); by default the router's
        **others: Any,  # the cache; an empty one of transformers is replaced
    ) -> CausalLMOutputWithPast:
        cache = others.get(CACHE)
        cache = cache if isinstance(cache, ScaleCache) else self._model.new_cache()
        if cache.get_seq_length() == 0:
            require_state(attention_mask, position_ids, input_ids.shape[1])
        logits_at = self._model.head_logits(input_ids, attention_mask, position_ids, cache)
        if self.head == "posterior":
            logits, _, cache.router = route(
                logits_at,
                input_ids,
                self.config.vocab_size,
                base_prior=self._router.prior if router_prior is None else router_prior,
                memory=cache.router,
                attention_mask=attention_mask,
                evidence_BT=evidence_mask,
                logits_to_keep=logits_to_keep,
            )
            return CausalLMOutputWithPast(logits=logits, **named(cache))
        heads = logits_at(slice(-logits_to_keep or None, None))
        if self.head == "cosine":
            logits = chosen_by_cosine(heads[0], heads[-1], self._router.threshold)
        else:
            logits = heads[self.heads.index(self.head)]
        return CausalLMOutputWithPast(logits=logits, **named(cache))
