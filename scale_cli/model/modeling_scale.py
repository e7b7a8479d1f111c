"""The widened model: a frozen base, its expansion, and the two heads that are served.

Shapes: B batch, T positions, V vocabulary.

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

from .cache_scale import CACHE, require_state
from .configuration_scale import ScaleConfig
from .expansion_scale import Expansion
from .fused_scale import frozen_norm
from .head_loss import IGNORED, trained_head_cross_entropy
from .pass_scale import FinalStates, ScaleCache, base_layer_alone, layer_context
from .routing import chosen_by_cosine, evidence_of_words, route
from .vocabulary_scale import embed


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


class ScaleForCausalLM(PreTrainedModel, RouterGenerationMixin):
    """A frozen causal language model and its expansion.

    In training mode the logits are the trained head's, H x_a + H' u, and the router is off: at step
    0 both heads agree to rounding, so a routed loss would never start. In evaluation mode the
    logits are those that are served: the trained head's for `preserve` and `adapt`, the router's
    for `route`.
    """

    config_class = ScaleConfig
    base_model_prefix = "base"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _no_split_modules = ["ExpansionLayer"]  # noqa: RUF012 (declared by transformers, which adds the base's own)

    gradient_checkpointing = False  # transformers reads it by this name
    heads: Sequence[str] = ("base", "trained")  # those that `head_logits` gives
    base_is_apart = False
    decoding_cache = ScaleCache

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

    def __init__(self, config: ScaleConfig, base: PreTrainedModel | None = None) -> None:
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
        self.expansion = Expansion(self.base, config)
        self.freeze()
        self.post_init()

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
        if self.expansion.new_tokens is not None:
            self.expansion.new_tokens.embed_tokens.requires_grad_(False)

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
        """Return logits (training: the trained head's; evaluation: as served), a loss for `labels`,
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
                    f"{name}: a widened model has two streams; pass input_ids, or use its base (.base)"
                )
        own = self._own_cache(past_key_values if cache is None else cache, use_cache)
        if own is None or own.get_seq_length() == 0:
            require_state(attention_mask, position_ids, input_ids.shape[1])

        routed = self.config.routes and not self.training
        states = self.final_states(
            input_ids, attention_mask, position_ids, own, with_base_head=routed
        )
        if self.training and labels is not None:
            return CausalLMOutputWithPast(loss=self._training_loss(states, labels, **kwargs))

        if routed and self.config.router_rule == "posterior":
            logits, _, memory = route(
                lambda at: self.routed_logits(states.at(at)),
                input_ids,
                self.config.vocab_size,
                base_prior=self.config.router_prior if router_prior is None else router_prior,
                memory=None if own is None else own.router,
                attention_mask=attention_mask,
                evidence_BT=evidence_mask,
                logits_to_keep=logits_to_keep,
            )
            if own is not None:
                own.router = memory
        else:
            logits = self._unweighed_logits(states, logits_to_keep, routed=routed)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: own})

    def _own_cache(self, given: Any, use_cache: bool | None) -> Any:
        """Return the ScaleCache of a call, in the place of an empty one of transformers, or None."""
        if use_cache is None:
            use_cache = self.config.use_cache
        if self.training or not use_cache:
            return None
        if isinstance(given, ScaleCache):
            return given
        if given is not None and given.get_seq_length() > 0:
            raise ValueError(
                f"{CACHE}: a widened model uses its own cache class; pass a ScaleCache, or none"
            )
        return ScaleCache()

    def _unweighed_logits(
        self, states: FinalStates, logits_to_keep: int | Tensor, *, routed: bool
    ) -> Tensor:
        """Return the trained head's logits, or of either head by the cosine rule."""
        if isinstance(logits_to_keep, Tensor):
            kept = states.at(logits_to_keep)
        else:
            kept = states.at(slice(-logits_to_keep or None, None))
        if not routed:
            return self.trained_logits(kept)
        base, trained = self.routed_logits(kept)
        return chosen_by_cosine(base, trained, self.config.router_threshold)[0]

    def final_states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: ScaleCache | None = None,
        *,
        with_base_head: bool,
    ) -> FinalStates:
        """Run the base's decoder once, the expansion beside it, and return the inputs of the
        vocabulary heads.

        Args:
            input_ids: (B, T).
            attention_mask: (B, past + T) or None.
            position_ids: (B, T), or None: counted from the cache's length.
            cache: extended in place.
            with_base_head: whether the base's head is wanted too. From the lowest layer that writes into
                x, it costs one more frozen pass of the remaining layers.
        """
        decoder = self.base.model
        expansion = self.expansion
        x_BTD = embed(decoder.embed_tokens, expansion.new_tokens, input_ids)
        u_BTE = expansion.embed_tokens(input_ids)
        p_BTD = None
        context = layer_context(
            self.base,
            x_BTD,
            attention_mask,
            position_ids,
            cache,
            checkpointing=self.gradient_checkpointing and self.training and torch.is_grad_enabled(),
        )

        for index, base_layer in enumerate(decoder.layers):
            slot = context.slot(0, index)
            if with_base_head and index >= expansion.first_collaborating_layer:
                # Before the other: a sharded layer is gathered for it, and parted again after it.
                p_BTD = base_layer_alone(base_layer, x_BTD if p_BTD is None else p_BTD, context)
                slot = context.slot(2, index)
            layer: Any = expansion.layers[index]
            x_BTD, u_BTE = layer(base_layer, x_BTD, u_BTE, context, slot, context.slot(1, index))

        norm_form = context.family.norm_form
        x_BTD, inverse_rms_BT1 = frozen_norm(decoder.norm, norm_form, x_BTD)
        if p_BTD is not None:
            p_BTD, _ = frozen_norm(decoder.norm, norm_form, p_BTD)
        return FinalStates(x_BTD, expansion.norm(inverse_rms_BT1, u_BTE), p_BTD)

    def routed_logits(self, states: FinalStates) -> list[Tensor]:
        """Return the logits of the base's head and of the trained one, of all tokens; a shared
        product is computed once.
        """
        of_x = self.base.lm_head(states.x_BTD)
        base = of_x if states.p_BTD is None else self.base_logits(states)
        new = self.expansion.new_tokens
        return [base if new is None else new.shared(base), self.trained_logits(states, of_x)]

    def base_logits(self, states: FinalStates) -> Tensor:
        """Return the base head's logits, bit for bit: H x_p."""
        logits: Tensor = self.base.lm_head(states.x_BTD if states.p_BTD is None else states.p_BTD)
        return logits

    def trained_logits(self, states: FinalStates, of_x: Tensor | None = None) -> Tensor:
        """Return the trained head's logits: [H x_a ; H_new x_a] + H' u; `of_x` is H x_a, if known."""
        logits: Tensor = self.base.lm_head(states.x_BTD) if of_x is None else of_x
        new = self.expansion.new_tokens
        if new is not None:
            weight = new.lm_head.weight
            of_new = F.linear(states.x_BTD.to(weight.dtype), weight)
            logits = torch.cat([logits, of_new], dim=-1)
        weight = self.expansion.lm_head.weight
        return logits + F.linear(states.u_BTE.to(weight.dtype), weight)

    def head_logits(
        self, input_ids: Tensor, cache: ScaleCache | None = None, **given: Any
    ) -> Callable[[slice], Sequence[Tensor]]:
        """Run the decoder over `input_ids` (B, T); return a function that gives both heads' logits
        at any positions. `given` are the attention mask and the positions.
        """
        states = self.final_states(input_ids, cache=cache, with_base_head=True, **given)
        return lambda positions: self.routed_logits(states.at(positions))

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
            states.x_BTD,
            states.u_BTE,
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
