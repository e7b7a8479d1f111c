"""The widened model: a frozen base, its expansion, and the two heads that are served.

Shapes: B batch, T positions, D base channels, E expansion channels, V vocabulary, K heads (base, adaptation).
A tensor that several sizes fit carries no suffix.

Source: SCALE, arXiv 2511.03270.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from .cache_scale import RouterState, ScaleCache
from .configuration_scale import ScaleConfig
from .expansion_scale import Expansion, LayerContext
from .fused_scale import frozen_norm
from .head_loss import IGNORED, adaptation_cross_entropy
from .observing import HeadLogits, Observation, observe_logits
from .routing import (
    cosine_serves_base,
    head_log_probs,
    log_prior,
    logit_cosine,
    mix_log_probs,
    posterior_log_weights,
)


@dataclass
class FinalStates:
    """What the vocabulary head reads: both streams after the last norm, and the untouched base stream.

    `preserved_BTD` is the same tensor as `adapted_BTD` where no layer collaborates, None where it was not asked for.
    """

    adapted_BTD: Tensor
    expansion_BTE: Tensor
    preserved_BTD: Tensor | None

    def at(self, positions: slice) -> FinalStates:
        """Return the states at some positions only."""
        adapted = self.adapted_BTD[:, positions]
        if self.preserved_BTD is self.adapted_BTD:
            return FinalStates(adapted, self.expansion_BTE[:, positions], adapted)
        preserved = None if self.preserved_BTD is None else self.preserved_BTD[:, positions]
        return FinalStates(adapted, self.expansion_BTE[:, positions], preserved)


# How far back a layer looks, by the names of transformers' configurations.
_MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


def _attention_masks(
    config: Any, x_BTD: Tensor, attention_mask: Tensor | None, cache: ScaleCache | None, position_ids: Tensor
) -> list[Any]:
    """Return every layer's mask, made once for each kind of layer that the base has."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # a family whose layers are all of one kind
        windowed = getattr(config, "sliding_window", None) is not None
        kinds = ["sliding_attention" if windowed else "full_attention"] * config.num_hidden_layers
    masks = {
        kind: _MASKS[kind](
            config=config,
            inputs_embeds=x_BTD,
            attention_mask=attention_mask,
            past_key_values=cache,
            position_ids=position_ids,
        )
        for kind in dict.fromkeys(kinds)
    }
    return [masks[kind] for kind in kinds]


class ScaleForCausalLM(PreTrainedModel, GenerationMixin):
    """A frozen causal language model and its expansion.

    In training mode the logits are the adaptation head's, H x_a + H' u, and the router is off: at step 0 both heads
    agree everywhere, so a routed loss would never start. In evaluation mode they are what is served: the adaptation
    head's for `preserve` and `adapt`, the router's for `route`.
    """

    config_class = ScaleConfig
    base_model_prefix = "base"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _no_split_modules = ["LlamaDecoderLayer", "ExpansionLayer"]  # noqa: RUF012 (declared by transformers)

    def __init__(self, config: ScaleConfig, base: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        if base is None:
            base = AutoModelForCausalLM.from_config(
                config.base(), attn_implementation=config._attn_implementation, dtype=config.dtype
            )
        self.base: Any = base
        self.expansion = Expansion(base, config)
        self.base.requires_grad_(False)
        self.activation_checkpointing = False
        self.compiled_states: Callable[..., FinalStates] | None = None  # final_states, where training compiles it
        self.generation_config = base.generation_config
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a self-contained folder, and freeze its base: transformers leaves every parameter it loads trainable."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # a pair with output_loading_info
        model.base.requires_grad_(False)
        return loaded

    def _init_weights(self, module: nn.Module) -> None:
        """Leave every block alone: `upscale` initialises the expansion, a checkpoint brings the rest."""

    def get_input_embeddings(self) -> nn.Module:
        """Return the base's token embedding."""
        return self.base.get_input_embeddings()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: ScaleCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits (training: adaptation head; evaluation: as served), a loss for `labels`, and the cache.

        Args:
            input_ids: (B, T).
            attention_mask: (B, past + T), 1 for tokens; left padding for generation.
            position_ids: (B, T); counted from the cache's length where not given.
            past_key_values: a ScaleCache, or an empty cache of transformers, which is replaced by one.
            labels: (B, T), -100 where no loss is wanted; shifted here, as everywhere in transformers. In training mode
                the loss comes without logits, which then never exist whole.
            use_cache: whether to keep keys, values and the router's state; the config's default in evaluation mode.
            logits_to_keep: return logits of the last so many positions only; 0 for all.
            **kwargs: transformers' own options of a loss: `shift_labels` (labels shifted already) and
                `num_items_in_batch` (what the sum is divided by; the number of labels where not given).
        """
        use_cache = not self.training and (self.config.use_cache if use_cache is None else use_cache)
        cache = self._own_cache(past_key_values) if use_cache else None
        if self.training and labels is not None:
            run = self.compiled_states or self.final_states
            states = run(input_ids, attention_mask, position_ids, None, preserved=False)
            return CausalLMOutputWithPast(loss=self._training_loss(states, labels, **kwargs))
        routed = self.config.variant == "route" and not self.training
        states = self.final_states(input_ids, attention_mask, position_ids, cache, preserved=routed)
        kept = slice(-logits_to_keep if logits_to_keep else None, None)
        if not routed:
            logits = self.adaptation_logits(states.at(kept))
        elif self.config.router_rule == "cosine":
            logits = self._cosine_logits(states.at(kept))
        else:
            logits = self._posterior_logits(states, kept, input_ids, attention_mask, cache)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    def _training_loss(
        self,
        states: FinalStates,
        labels: Tensor,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **_: Any,
    ) -> Tensor:
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        heads = self.base.lm_head.weight, self.expansion.lm_head.weight
        loss = adaptation_cross_entropy(states.adapted_BTD, states.expansion_BTE, *heads, shift_labels)
        return loss / ((shift_labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)

    @staticmethod
    def _own_cache(past_key_values: Any) -> ScaleCache:
        if isinstance(past_key_values, ScaleCache):
            return past_key_values
        plain = past_key_values is None or isinstance(past_key_values, DynamicCache)
        if not plain or (past_key_values is not None and past_key_values.get_seq_length() > 0):
            raise ValueError("a widened model keeps a cache of its own class, ScaleCache: no other implementation")
        return ScaleCache()

    def final_states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: ScaleCache | None = None,
        *,
        preserved: bool,
    ) -> FinalStates:
        """Run the decoder and return what the vocabulary head reads.

        Args:
            input_ids: (B, T).
            attention_mask: (B, past + T) or None.
            position_ids: (B, T) or None.
            cache: extended in place.
            preserved: whether the untouched base stream is wanted; it costs one more frozen pass of the layers from
                the first collaborating one up, and nothing where none collaborates.
        """
        decoder = self.base.model
        x_BTD, u_BTE = decoder.embed_tokens(input_ids), self.expansion.embed_tokens(input_ids)
        if position_ids is None:
            past = 0 if cache is None else cache.get_seq_length()
            position_ids = (torch.arange(input_ids.shape[1], device=input_ids.device) + past).unsqueeze(0)
        masks = _attention_masks(decoder.config, x_BTD, attention_mask, cache, position_ids)
        rotary = decoder.rotary_emb(x_BTD, position_ids=position_ids)
        checkpointing = self.activation_checkpointing and self.training and torch.is_grad_enabled()
        context = LayerContext(rotary, masks, cache, len(decoder.layers), checkpointing)
        p_BTD = x_BTD
        for index, (base_layer, added) in enumerate(zip(decoder.layers, self.expansion.layers, strict=True)):
            if index < self.config.first_collaborating_layer:
                x_BTD, u_BTE = added(base_layer, x_BTD, u_BTE, context, base_slot=index)
                p_BTD = x_BTD
                continue
            if preserved:
                p_BTD = self._base_layer(base_layer, p_BTD, position_ids, context)
            # Slot 0 tells how long the cache is, so where no untouched stream fills it the adapted one must.
            base_slot = 2 * context.num_layers + index if preserved else index
            x_BTD, u_BTE = added(base_layer, x_BTD, u_BTE, context, base_slot)
        adapted_BTD, inverse_rms_BT1 = frozen_norm(decoder.norm, x_BTD)
        expansion_BTE = self.expansion.norm(inverse_rms_BT1, u_BTE)
        if not preserved:
            return FinalStates(adapted_BTD, expansion_BTE, None)
        return FinalStates(adapted_BTD, expansion_BTE, adapted_BTD if p_BTD is x_BTD else decoder.norm(p_BTD))

    @staticmethod
    def _base_layer(base_layer: Any, p_BTD: Tensor, position_ids: Tensor, context: LayerContext) -> Tensor:
        with torch.no_grad():
            return base_layer(
                p_BTD,
                attention_mask=context.attention_masks[base_layer.self_attn.layer_idx],
                position_ids=position_ids,
                past_key_values=context.cache,
                use_cache=context.cache is not None,
                position_embeddings=context.position_embeddings,
            )

    def base_logits(self, states: FinalStates) -> Tensor:
        """Return H x_p: the base model's own logits, bit for bit."""
        assert states.preserved_BTD is not None, "ask final_states for the preserved stream"
        return self.base.lm_head(states.preserved_BTD)

    def adaptation_logits(self, states: FinalStates) -> Tensor:
        """Return H x_a + H' u."""
        return self.base.lm_head(states.adapted_BTD) + self._expansion_logits(states)

    def _expansion_logits(self, states: FinalStates) -> Tensor:
        weight = self.expansion.lm_head.weight
        return F.linear(states.expansion_BTE.to(weight.dtype), weight)

    def both_logits(self, states: FinalStates) -> tuple[Tensor, Tensor]:
        """Return the base head's and the adaptation head's logits; where they share H x, it is computed once."""
        base = self.base_logits(states)
        if states.preserved_BTD is not states.adapted_BTD:
            return base, self.adaptation_logits(states)
        return base, base + self._expansion_logits(states)

    def observe(self, states: FinalStates, next_ids_BT: Tensor) -> Observation:
        """Return what both heads said of the tokens that came, without holding the logits of all positions.

        Args:
            states: with the preserved stream, T positions.
            next_ids_BT: the token after each position.
        """
        return observe_logits(lambda at: self.both_logits(states.at(at)), next_ids_BT, self.config.vocab_size)

    def head_logits(self, input_ids: Tensor) -> HeadLogits:
        """Run the decoder over `input_ids` (B, T) and return what gives both heads' logits at any positions."""
        states = self.final_states(input_ids, preserved=True)
        return lambda positions: self.both_logits(states.at(positions))

    def observe_tokens(self, input_ids: Tensor, next_ids_BT: Tensor) -> Observation:
        """Return what both heads said of the tokens that came after each of `input_ids` (B, T)."""
        return self.observe(self.final_states(input_ids, preserved=True), next_ids_BT)

    def _cosine_logits(self, states: FinalStates) -> Tensor:
        base, adapted = self.both_logits(states)
        serves_base = cosine_serves_base(logit_cosine(base, adapted), self.config.router_threshold)
        return torch.where(serves_base.unsqueeze(-1), base.to(adapted.dtype), adapted)

    def _posterior_logits(
        self,
        states: FinalStates,
        kept: slice,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        cache: ScaleCache | None,
    ) -> Tensor:
        """Return the mixture's log-probabilities at the kept positions, and leave the router's state in the cache."""
        prior_K = log_prior(self.config.router_prior, device=input_ids.device)
        past = None if cache is None else cache.router
        evidence_KBT = self._evidence(states, input_ids, attention_mask, past)
        start_KB = prior_K[:, None].expand(-1, len(input_ids)) if past is None else past.log_weights_KB
        log_weights_KBS = posterior_log_weights(evidence_KBT, start_KB, prior_K, self.config.router_switch_rate)[
            ..., 1:
        ]
        kept_states = states.at(kept)
        said_KBTV = torch.stack(
            [
                head_log_probs(self.base_logits(kept_states)),
                head_log_probs(self.adaptation_logits(kept_states)),
            ]
        )
        if cache is not None:
            cache.router = RouterState(log_weights_KBS[..., -1], said_KBTV[:, :, -1])
        return mix_log_probs(log_weights_KBS[..., kept].unsqueeze(-1).to(said_KBTV.dtype), said_KBTV)

    def _evidence(
        self,
        states: FinalStates,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        past: RouterState | None,
    ) -> Tensor:
        """Return (K, B, T): what each head had said of every token of `input_ids`; 0 where nothing had been said."""
        if past is None:
            first_KB1 = torch.zeros(2, len(input_ids), 1, device=input_ids.device)
        else:
            ids = input_ids[:, :1].expand(2, -1, -1)
            first_KB1 = past.last_log_probs_KBV.gather(-1, ids)
        evidence_KBT = first_KB1
        if input_ids.shape[1] > 1:
            said = self.observe(states.at(slice(0, -1)), input_ids[:, 1:]).log_probs_KBT
            evidence_KBT = torch.cat([first_KB1, said], dim=-1)
        if attention_mask is None:
            return evidence_KBT
        # A padding token is no evidence, and neither is the token after one: nothing was predicted from padding.
        seen = F.pad(attention_mask.bool(), (1, 0))[:, -input_ids.shape[1] - 1 :]
        return torch.where(seen[:, 1:] & seen[:, :-1], evidence_KBT, 0.0)
