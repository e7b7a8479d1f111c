"""The widened model: a frozen base, its expansion, and the two heads that are served.

`WidenedModel` is common to all widened models: one forward pass of the base, its heads, and the
router over them.

Shapes: B batch, T positions, V vocabulary, K heads (those that the router mixes).

Source: SCALE, arXiv 2511.03270.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .branches_scale import FinalStates, ScaleCache, base_layer_alone, layer_context
from .cache_scale import CACHE, named, require_state
from .configuration_scale import ScaleConfig
from .expansion_scale import Expansion
from .fused_scale import frozen_norm
from .head_loss import IGNORED, trained_head_cross_entropy
from .routing import (
    PieceShares,
    chosen_by_cosine,
    evidence_of_words,
    route,
)
from .vocabulary_scale import brought_by, embed


def _refusal(reason: str) -> Any:
    """Return a method that raises NotImplementedError, whatever it is given."""

    def refuse(self: Any, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(reason)

    return refuse


class RouterGenerationMixin(GenerationMixin):
    """Generation in which the router need not judge by every token of the prompt."""

    def prepare_inputs_for_generation(
        self, input_ids: Any, *args: Any, judged_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Return the inputs of a step, with `evidence_mask` if a mask of the prompt is given.

        `judged_mask` (B, prompt) is False for tokens by which the router shall not judge, such as a
        chat template's.
        """
        generation: Any = super()
        inputs = generation.prepare_inputs_for_generation(input_ids, *args, **kwargs)
        if judged_mask is not None:
            mask = kwargs.get("attention_mask")
            num_positions = inputs["input_ids"].shape[1]
            inputs["evidence_mask"] = evidence_of_words(
                judged_mask, mask, input_ids.shape[1], num_positions
            )
        return inputs


class WidenedModel(PreTrainedModel, RouterGenerationMixin):
    """A frozen causal language model, its expansions, and the heads that the router mixes.

    A subclass sets `expansions`. The router mixes the base's head and one of each.
    """

    base_model_prefix = "base"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _no_split_modules = ["ExpansionLayer"]  # noqa: RUF012 (declared by transformers, which adds the base's own)

    gradient_checkpointing = False  # transformers reads it by this name
    expansions: list[Expansion]
    heads: Sequence[str] = ("base", "trained")  # those that `head_logits` gives
    # Of each head that lacks some of the tokens.
    _shares: list[PieceShares | None]
    _training_loss: Callable[..., Tensor]
    new_cache = ScaleCache

    # A frozen base has learnt no other tokens.
    resize_token_embeddings = _refusal(
        "a widened model keeps its base's vocabulary; enlarge that of the base before widening"
    )
    # The paged cache holds neither the second stream nor the router's state.
    init_continuous_batching = _refusal(
        "a widened model has no continuous batching; call generate() on a padded batch"
    )
    add_adapter = _refusal("a widened model takes no PEFT adapters; add them to its plain export")
    # PEFT sets this when it adds adapters, which would not act on the forward pass. Without a
    # getter, the model seems to have no such attribute.
    peft_config = property(fset=add_adapter)

    def __init__(self, config: Any, base: PreTrainedModel | None = None) -> None:
        """Hold `base`, or one of the right shapes, which a checkpoint then fills."""
        super().__init__(config)
        if base is None:
            fields = dict(config.base_config)
            base = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(fields.pop("model_type"), **fields),
                attn_implementation=config._attn_implementation,
                dtype=config.dtype,
            )
        self.base: Any = base
        self.generation_config = self.base.generation_config

    @classmethod
    def from_pretrained(cls, *args: Any, device_map: Any = None, **kwargs: Any) -> Any:
        """Load a self-contained folder, and freeze its base: transformers leaves every parameter it
        loads trainable.

        The whole model lies on one device, which `device_map="auto"` chooses.
        """
        loaded = super().from_pretrained(*args, device_map=_one_device(device_map), **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
        model.freeze()
        return loaded

    def freeze(self) -> None:
        """Exclude from training what never trains."""
        self.base.requires_grad_(False)
        for expansion in self.expansions:
            if expansion.new_tokens is not None:
                expansion.new_tokens.embed_tokens.requires_grad_(False)

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: `upscale` initialises the expansion, and a checkpoint brings the rest."""

    def get_input_embeddings(self) -> nn.Module:
        return self.base.get_input_embeddings()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: ScaleCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: ScaleCache | None = None,
        evidence_mask: Tensor | None = None,
        router_prior: float | Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits (training: the last head's; evaluation: as served), a loss for `labels`,
        and the cache.

        The arguments are transformers' own: (B, T) ids, positions and labels, which are shifted
        here; a mask of (B, past + T) with left padding; `cache` and `past_key_values` are two names
        of one argument. In training mode, `labels` give a loss without logits, which then never
        exist whole, and `kwargs` are the arguments of `_training_loss`.

        `evidence_mask` (B, T) says by which tokens the router judges; by default, by all but
        padding. `router_prior`, a number or (B,), is the base head's weight at the first token; by
        default, the config's. `generate` takes it too, and `judged_mask` for the mask.
        """
        for name in ("inputs_embeds", "output_hidden_states", "output_attentions"):
            asked = kwargs.get(name)
            if getattr(self.config, name, False) if asked is None else asked is not False:
                raise ValueError(
                    f"{name}: a widened model has several streams; pass input_ids, or use its base (.base)"
                )
        use_cache = not self.training and (
            self.config.use_cache if use_cache is None else use_cache
        )
        given = past_key_values if cache is None else cache
        cache = None
        if use_cache:
            cache = given if isinstance(given, ScaleCache) else ScaleCache()
            if given is not None and given is not cache and given.get_seq_length() > 0:
                raise ValueError(
                    f"{CACHE}: a widened model uses its own cache class; pass a ScaleCache, or none"
                )
        if cache is None or cache.get_seq_length() == 0:
            require_state(attention_mask, position_ids, input_ids.shape[1])
        if self.training and labels is not None:
            states = self.final_states(input_ids, attention_mask, position_ids, preserved=False)
            return CausalLMOutputWithPast(loss=self._training_loss(states, labels, **kwargs))
        routed = self.config.routes and not self.training
        states = self.final_states(input_ids, attention_mask, position_ids, cache, preserved=routed)
        if isinstance(logits_to_keep, Tensor):
            kept: slice | Tensor = logits_to_keep
        else:
            kept = slice(-logits_to_keep or None, None)

        if not routed:
            logits = self.trained_logits(states.at(kept))
        elif self.config.router_rule == "cosine":
            base, trained = self.routed_logits(states.at(kept))
            logits = chosen_by_cosine(base, trained, self.config.router_threshold)
        else:
            logits, _, memory = route(
                lambda at: self.routed_logits(states.at(at)),
                input_ids,
                self.config.vocab_size,
                base_prior=self.config.router_prior if router_prior is None else router_prior,
                memory=None if cache is None else cache.router,
                attention_mask=attention_mask,
                evidence_BT=evidence_mask,
                logits_to_keep=logits_to_keep,
            )
            if cache is not None:
                cache.router = memory
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits, **named(cache))

    def final_states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: ScaleCache | None = None,
        *,
        preserved: bool,
    ) -> FinalStates:
        """Run the base's decoder once, every expansion beside it, and return the inputs of the
        vocabulary heads.

        Args:
            input_ids: (B, T).
            attention_mask: (B, past + T) or None.
            position_ids: (B, T), or None: counted from the cache's length.
            cache: extended in place.
            preserved: whether head 0 is wanted, or the trained ones alone. From the layer where no
                expansion reads the untouched stream any more, it costs one more frozen pass of the
                remaining layers.
        """
        decoder = self.base.model
        x_BTD = embed(decoder.embed_tokens, brought_by(self.expansions), input_ids)
        context = layer_context(
            self.base,
            x_BTD,
            attention_mask,
            position_ids,
            cache,
            checkpointing=self.gradient_checkpointing and self.training and torch.is_grad_enabled(),
        )

        # From here on, no expansion reads the untouched stream.
        last_first = max(each.first_collaborating_layer for each in self.expansions)
        streams = {0: x_BTD}  # by the head they belong to, as in `FinalStates`
        u_KBTE = [expansion.embed_tokens(input_ids) for expansion in self.expansions]
        for index, base_layer in enumerate(decoder.layers):
            after: dict[int, Tensor] = {}
            if preserved and index >= last_first:
                # Before the others: a sharded layer is gathered for it, and parted again after them.
                after[0] = base_layer_alone(base_layer, streams[0], context)
            # Of the base's own stream; the first expansion that follows it computes them.
            reads = None
            for head, expansion in enumerate(self.expansions, start=1):
                layer: Any = expansion.layers[index]
                own_slot = context.slot(head, index)
                u_BTE = u_KBTE[head - 1]
                if index < expansion.first_collaborating_layer:
                    x_BTD = streams[0] if reads is None else after[0]
                    slot = context.slot(0, index)
                    after[0], u_BTE, reads = layer(
                        base_layer, x_BTD, u_BTE, context, slot, own_slot, reads
                    )
                else:
                    # The cache's length is read from slot 0: if head 0 is not run, an adapted stream
                    # uses that slot.
                    slot = context.slot(len(self.expansions) + head if preserved else 0, index)
                    x_BTD = streams[head] if head in streams else streams[0]
                    after[head], u_BTE, _ = layer(base_layer, x_BTD, u_BTE, context, slot, own_slot)
                u_KBTE[head - 1] = u_BTE
            streams = after

        x_BTD_of: dict[int, Tensor] = {}
        inverse_rms: dict[int, Tensor] = {}
        for head, x_BTD in streams.items():
            x_BTD_of[head], inverse_rms[head] = frozen_norm(
                decoder.norm, context.family.norm_form, x_BTD
            )
        for head, expansion in enumerate(self.expansions, start=1):
            owner = head if head in inverse_rms else 0
            u_KBTE[head - 1] = expansion.norm(inverse_rms[owner], u_KBTE[head - 1])
        return FinalStates(self.expansions, x_BTD_of, u_KBTE)

    def routed_logits(self, states: FinalStates) -> list[Tensor]:
        """Return the logits of all routed heads, of all tokens; shared products are computed once."""
        logits = states.logits(self.base.lm_head, range(len(self.expansions) + 1))
        return [self.of_all_tokens(head, of_one) for head, of_one in enumerate(logits)]

    def of_all_tokens(self, head: int, logits: Tensor) -> Tensor:
        """Return a head's logits of all tokens, from its logits of the tokens that it knows (the
        last dimension).
        """
        shares = self._shares[head]
        return logits if shares is None else shares(logits)

    def head_logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: ScaleCache | None = None,
    ) -> Callable[[slice], Sequence[Tensor]]:
        """Run the decoder over `input_ids` (B, T); return a function that gives all heads' logits
        at any positions.
        """
        states = self.final_states(input_ids, attention_mask, position_ids, cache, preserved=True)
        return lambda positions: self.routed_logits(states.at(positions))

    def trained_logits(self, states: FinalStates) -> Tensor:
        """Return the last head's logits: H x_a + H' u."""
        return states.logits(self.base.lm_head, [len(self.expansions)])[0]


def _one_device(device_map: Any) -> Any:
    """Return a device map with one device: a layer reads its base layer's weights. ValueError:
    several, or disk.
    """
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if accelerator is None else accelerator.type
    places = (
        {str(place) for place in device_map.values()}
        if isinstance(device_map, dict)
        else {str(device_map)}
    )
    if len(places) > 1 or "disk" in places:
        raise ValueError(
            f"device_map: a widened model must lie on one device, not on {', '.join(sorted(places))}"
        )
    return device_map


class ScaleForCausalLM(WidenedModel):
    """A frozen causal language model and its expansion.

    In training mode the logits are the trained head's, H x_a + H' u, and the router is off: at step
    0 both heads agree to rounding, so a routed loss would never start. In evaluation mode the
    logits are those that are served: the trained head's for `preserve` and `adapt`, the router's
    for `route`.
    """

    config_class = ScaleConfig
    supports_gradient_checkpointing = True

    def __init__(self, config: ScaleConfig, base: PreTrainedModel | None = None) -> None:
        super().__init__(config, base)
        self.expansion = Expansion(self.base, config)
        self.expansions = [self.expansion]
        new = self.expansion.new_tokens
        self._shares = [None if new is None else new.shared, None]
        self.freeze()
        self.post_init()

    def _training_loss(
        self,
        states: FinalStates,
        labels: Tensor,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        distillation: Sequence[float] | None = None,
        token_losses: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the mean loss of `labels`, or of `shift_labels` (shifted already) over
        `num_items_in_batch`.

        `distillation` holds each sequence's weight of KL(base head || trained head). `token_losses`
        (B, T) is filled with every token's term of the sum.
        """
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        new = self.expansion.new_tokens
        loss = trained_head_cross_entropy(
            states.x_BTD[1 if self.expansion.writes else 0],
            states.u_KBTE[0],
            self.base.lm_head.weight,
            self.expansion.lm_head.weight,
            shift_labels,
            distillation=distillation,
            new_head_MD=None if new is None else new.lm_head.weight,
            token_losses_BT=token_losses,
            of_base=None if new is None else new.shared,
        )
        if num_items_in_batch is None:
            return loss / (shift_labels != IGNORED).sum()
        return loss / num_items_in_batch

    def base_logits(self, states: FinalStates) -> Tensor:
        """Return the base head's logits, bit for bit: H x_p."""
        return states.logits(self.base.lm_head, [0])[0]
