"""A base and a trained model over one vocabulary, and the router between them: the model that
answers, whatever the second stream is.

What runs the two is `Streams` (`heads.py`).

Shapes: K heads, B batch, T positions, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

from .cache_scale import CACHE, require_state
from .heads import Streams
from .modeling_scale import RouterGenerationMixin
from .pass_scale import ScaleCache
from .routing import chosen_by_cosine, route
from .script_prior import EVEN, PriorByScript


@dataclass(frozen=True)
class Router:
    """What mixes the heads, and the base's weight at the start of a prompt."""

    rule: str = "posterior"  # posterior | cosine
    prior: PriorByScript = EVEN
    threshold: float = 0.5  # tau of the cosine rule

    @classmethod
    def of_settings(cls, settings: Any, script: Sequence[Sequence[int]] = ()) -> Router:
        """Return the router that a config asks for; `script` is the new language's, by its ranges."""
        prior = PriorByScript(settings.prior, settings.script_prior, script)
        return cls(settings.rule, prior, settings.threshold)

    @classmethod
    def of_widened(cls, config: Any) -> Router:
        """Return the router of a widened model, from its configuration."""
        prior = PriorByScript(config.router_prior, config.router_script_prior, config.router_script)
        return cls(config.router_rule or cls.rule, prior, config.router_threshold)


class TwoStreams(PreTrainedModel, RouterGenerationMixin):
    """A model in evaluation mode that answers with `head`, which may be changed.

    It is the name of one of the heads, or of a rule of the router over them. All heads are computed
    whichever one answers, as in scoring, so the choice does not change what a head says.
    """

    log_weights_KB: Tensor  # of the heads in what was last predicted, where they are mixed
    # It supports whatever attention the streams have.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True

    def __init__(self, streams: Streams, router: Router) -> None:
        super().__init__(copy.deepcopy(streams.config))
        self.heads = list(streams.heads)
        self.head = router.rule
        self.router = router
        self.generation_config = copy.deepcopy(streams.generation_config)
        self.streams = streams

    def tie_weights(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: lm-eval calls it on a model that is already whole."""

    def answers(self, ids_BT: Tensor, mask_BT: Tensor, **options: Any) -> Tensor:
        """Return (B, new) ids: what `generate` adds to prompts that are padded on the left."""
        model: Any = self  # transformers types it for its own classes only
        whole: Tensor = model.generate(ids_BT, attention_mask=mask_BT, **options)
        return whole[:, ids_BT.shape[1] :]

    def forward(
        self,
        input_ids: Tensor,  # (B, T)
        attention_mask: Tensor | None = None,  # (B, past + T), 1 for tokens; padding is on the left
        position_ids: Tensor | None = None,  # (B, T); counted from the cache's length if not given
        logits_to_keep: int = 0,  # for the last positions only; 0 for all
        evidence_mask: Tensor | None = None,  # (B, T), the tokens that the router judges by
        router_prior: float | Tensor | None = None,  # of the base, (B,); by default the router's
        labels: Tensor | None = None,  # (B, T), not shifted
        use_cache: bool | None = None,  # False: none is read or returned
        past_key_values: Any = None,
        cache: Any = None,  # the same by its newer name; an empty one of transformers is replaced
        **_: Any,
    ) -> CausalLMOutputWithPast:
        cache = past_key_values if cache is None else cache
        if use_cache is False or not isinstance(cache, ScaleCache):
            cache = self.streams.decoding_cache()
        if cache.get_seq_length() == 0:
            require_state(attention_mask, position_ids, input_ids.shape[1])
        logits_at = self.streams.head_logits(
            input_ids, cache, attention_mask=attention_mask, position_ids=position_ids
        )
        if self.head == "posterior":
            logits, log_weights_KBT, cache.router = route(
                logits_at,
                input_ids,
                self.config.vocab_size,
                base_prior=self.router.prior.otherwise if router_prior is None else router_prior,
                memory=cache.router,
                attention_mask=attention_mask,
                evidence_BT=evidence_mask,
                logits_to_keep=logits_to_keep,
            )
            self.log_weights_KB = log_weights_KBT[..., -1]
            return self._output(logits, labels, None if use_cache is False else cache)

        heads = logits_at(slice(-logits_to_keep or None, None))
        if self.head == "cosine":
            base, trained = heads
            logits, log_weights_KBT = chosen_by_cosine(base, trained, self.router.threshold)
            self.log_weights_KB = log_weights_KBT[..., -1]
        else:
            logits = heads[self.heads.index(self.head)]
        return self._output(logits, labels, None if use_cache is False else cache)

    def _output(self, logits: Tensor, labels: Tensor | None, cache: Any) -> CausalLMOutputWithPast:
        loss = None
        if labels is not None:
            loss = ForCausalLMLoss(logits, labels, vocab_size=logits.shape[-1])
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})
