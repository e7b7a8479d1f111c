"""Every head of a model, and every routing rule over them, as a model that transformers' `generate` takes.

Shapes: K heads, B batch, T positions, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from scale_cli.evaluation.scoring import TWO_HEADS
from scale_cli.model.cache_scale import ScaleCache
from scale_cli.model.heads import HeadedModel, HeadLogits, RouterSettings
from scale_cli.model.routing import cosine_serves_base, evidence_of, log_prior, logit_cosine, route


def ends_of(settings: GenerationConfig, tokenizer: Any) -> list[int]:
    """Return the tokens that end a text: what ends a document in training, and what the base's own settings name."""
    named = settings.eos_token_id
    ends = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    return [end for end in dict.fromkeys(ends) if end is not None]


def before_end(ends: Sequence[int], new_T: Tensor) -> Tensor:
    """Return what was generated before the first token that ends a text."""
    ended = torch.isin(new_T, torch.tensor(ends, dtype=new_T.dtype, device=new_T.device)).nonzero()
    return new_T[: int(ended[0])] if len(ended) else new_T


def padded_left(prompts: Sequence[Tensor], padding: int) -> tuple[Tensor, Tensor]:
    """Return the ids of some prompts as (B, T), and a mask: 1 for tokens, 0 for what stands before the shorter ones."""
    ids_BT = pad_sequence(list(prompts), batch_first=True, padding_value=padding, padding_side="left")
    mask_BT = pad_sequence([torch.ones_like(ids) for ids in prompts], batch_first=True, padding_side="left")
    return ids_BT, mask_BT


class SelectableHeads(PreTrainedModel, GenerationMixin):
    """A model in evaluation mode whose answers are those of `head`, which may be changed between two generations.

    All heads are computed whichever answers, as they are when texts are scored: what one says does not depend on it.
    """

    # Whatever attention the model has.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True

    def __init__(self, model: HeadedModel, router: RouterSettings, heads: Sequence[str] = TWO_HEADS) -> None:
        super().__init__(copy.deepcopy(model.config))
        self.head = heads[0]
        of_two: Any = getattr(model, "trained", model)
        self.own_generation_config = of_two.generation_config
        self.generation_config = copy.deepcopy(self.own_generation_config)
        self._model, self._router, self._heads = model, router, list(heads)

    def answers(self, ids_BT: Tensor, mask_BT: Tensor, **options: Any) -> Tensor:
        """Return (B, new) ids: what `generate` adds to prompts that are padded on the left."""
        model: Any = self  # transformers annotates it for its own classes alone
        whole: Tensor = model.generate(ids_BT, attention_mask=mask_BT, **options)
        return whole[:, ids_BT.shape[1] :]

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Leave every block alone: the model is there already."""

    def tie_weights(self, *_args: Any, **_kwargs: Any) -> None:
        """Leave every weight alone; lm-eval asks for it."""

    def forward(
        self,
        input_ids: Tensor,  # (B, T)
        attention_mask: Tensor | None = None,  # (B, past + T), 1 for tokens; padding stands on the left
        position_ids: Tensor | None = None,  # (B, T); counted from the cache's length where not given
        past_key_values: Any = None,  # of this class's own making, or an empty one of transformers, which is replaced
        logits_to_keep: int = 0,  # of the last so many positions only, 0 for all
        **_: Any,  # transformers' own, of which none changes an answer
    ) -> CausalLMOutputWithPast:
        """Return the logits of the head that answers, and the cache."""
        cache = past_key_values if isinstance(past_key_values, ScaleCache) else self._model.new_cache()
        logits_at = self._model.head_logits(input_ids, attention_mask, position_ids, cache)
        if self.head == "posterior":
            logits = self._posterior_logits(logits_at, input_ids, attention_mask, cache, logits_to_keep)
        else:
            heads = logits_at(slice(-logits_to_keep or None, None))
            if self.head == "cosine":
                serves_base = cosine_serves_base(logit_cosine(heads[0], heads[-1]), self._router.threshold)
                logits = torch.where(serves_base.unsqueeze(-1), heads[0].to(heads[-1].dtype), heads[-1])
            else:
                logits = heads[self._heads.index(self.head)]
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    def _posterior_logits(
        self,
        logits_at: HeadLogits,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        cache: ScaleCache,
        logits_to_keep: int,
    ) -> Tensor:
        num_positions = input_ids.shape[1]
        routed = route(
            lambda at: torch.stack([logits.float() for logits in logits_at(at)]),
            input_ids,
            self.config.vocab_size,
            prior_K=log_prior(self._router.prior, len(self._heads), input_ids.device),
            switch_rate=self._router.switch_rate,
            memory=cache.router,
            evidence_BT=None if attention_mask is None else evidence_of(attention_mask, num_positions),
            first=max(0, num_positions - logits_to_keep) if logits_to_keep else 0,
        )
        cache.router = routed.memory
        return routed.scores_BTV
