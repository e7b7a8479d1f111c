"""The widened model: a frozen base, its expansion, and the two heads that are served.

The base may be a widened model itself: its expansions are frozen too then, the new one reads their streams beside x,
and the base head is the adaptation head of that model.

Shapes: B batch, T positions, V vocabulary.

Source: SCALE, arXiv 2511.03270.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .branches_scale import Branch, FinalStates
from .cache_scale import ScaleCache
from .configuration_scale import ScaleConfig
from .expansion_scale import Expansion
from .head_loss import IGNORED, adaptation_cross_entropy
from .routing import cosine_serves_base, logit_cosine
from .serving_scale import WidenedModel, kept_positions


class ScaleForCausalLM(WidenedModel):
    """A frozen causal language model and its expansion.

    In training mode the logits are the adaptation head's, H x_a + H' u, and the router is off: at step 0 both heads
    agree everywhere, so a routed loss would never start. In evaluation mode they are what is served: the adaptation
    head's for `preserve` and `adapt`, the router's for `route`.
    """

    config_class = ScaleConfig
    supports_gradient_checkpointing = True

    def __init__(self, config: ScaleConfig, base: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        if base is None:
            base = _empty_base(config)
        self.base: Any = base
        below: list[Branch] = []
        if isinstance(base, ScaleForCausalLM):
            below = list(base.branches)
            # With it transformers would take a checkpoint's expansion.* for the base.expansion.* that is there too.
            self.base_model_prefix = ""
        self.expansion = Expansion(self.root, [branch.expansion for branch in below], config)
        self.branches = [*below, Branch(self.expansion, parent=len(below))]
        self.routed_heads = (len(below), len(below) + 1)
        self.freeze()
        self.gradient_checkpointing = False  # transformers reads it by this name
        self.compiled_states: Callable[..., FinalStates] | None = None  # final_states, where training compiles it
        self.generation_config = base.generation_config
        self.post_init()

    @property
    def root(self) -> Any:
        """The plain model at the bottom."""
        return self.base.root if isinstance(self.base, ScaleForCausalLM) else self.base

    @property
    def is_checkpointing(self) -> bool:
        """Whether activations of what trains are computed again in backward."""
        return self.gradient_checkpointing and self.training and torch.is_grad_enabled()

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Compute activations of what trains again in backward; transformers' Trainer calls it.

        Raises:
            ValueError: it asks for another way than the one there is, layer by layer and without reentering.
        """
        theirs = {"use_reentrant": False, "every_n_layers": 1, "offload": False}
        for name, value in {**(gradient_checkpointing_kwargs or {}), **kwargs}.items():
            if name not in theirs or value != theirs[name]:
                raise ValueError(f"gradient checkpointing of a widened model takes no {name}={value}; leave it out")
        self.gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        """Keep activations again."""
        self.gradient_checkpointing = False

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: ScaleCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
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
            logits_to_keep: return logits of the last so many positions only, 0 for all; or of those in an index (N,).
            **kwargs: transformers' own options of a loss: `shift_labels` (labels shifted already) and
                `num_items_in_batch` (what the sum is divided by; the number of labels where not given); in training
                mode also `distillation`, of every sequence the weight of KL(base head || adaptation head).
        """
        self._refuse_unknown(kwargs)
        use_cache = not self.training and (self.config.use_cache if use_cache is None else use_cache)
        cache = self._own_cache(past_key_values) if use_cache else None
        if self.training and labels is not None:
            run = self.compiled_states or self.final_states
            states = run(input_ids, attention_mask, position_ids, None, preserved=False)
            return CausalLMOutputWithPast(loss=self._training_loss(states, labels, **kwargs))
        routed = self.config.variant == "route" and not self.training
        states = self.final_states(input_ids, attention_mask, position_ids, cache, preserved=routed)
        kept = kept_positions(logits_to_keep)
        if not routed:
            logits = self.adaptation_logits(states.at(kept))
        elif self.config.router_rule == "cosine":
            logits = self._cosine_logits(states.at(kept))
        else:
            logits = self._posterior_logits(states, logits_to_keep, input_ids, attention_mask, cache)
        return self._output(logits, labels, cache, **kwargs)

    def _training_loss(
        self,
        states: FinalStates,
        labels: Tensor,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        distillation: Sequence[float] | None = None,
        **_: Any,
    ) -> Tensor:
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        top = len(self.branches)
        if distillation is not None and self.branches[-1].writes:
            raise ValueError("distillation: the base's own logits are not at hand where the expansion writes into x")
        heads = self.root.lm_head.weight, self.expansion.lm_head.weight
        between = [
            (u_BTE, branch.expansion.lm_head.weight)
            for u_BTE, branch in zip(states.u_KBTE[:-1], self.branches[:-1], strict=True)
        ]
        loss = adaptation_cross_entropy(
            states.x_BTD[states.owner(top)], states.u_KBTE[-1], *heads, shift_labels, between, distillation
        )
        return loss / ((shift_labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)

    def base_logits(self, states: FinalStates) -> Tensor:
        """Return the base head's logits, bit for bit: H x_p, or the adaptation head's of a base that is widened."""
        return states.logits(self.root.lm_head, self.routed_heads[0])

    def adaptation_logits(self, states: FinalStates) -> Tensor:
        """Return H x_a + H' u, and the H' u of every expansion below."""
        return states.logits(self.root.lm_head, self.routed_heads[1])

    def both_logits(self, states: FinalStates) -> tuple[Tensor, Tensor]:
        """Return the base head's and the adaptation head's logits; what they share is computed once."""
        base, adapted = self.routed_logits(states)
        return base, adapted

    def _cosine_logits(self, states: FinalStates) -> Tensor:
        base, adapted = self.both_logits(states)
        serves_base = cosine_serves_base(logit_cosine(base, adapted), self.config.router_threshold)
        return torch.where(serves_base.unsqueeze(-1), base.to(adapted.dtype), adapted)


def _empty_base(config: ScaleConfig) -> PreTrainedModel:
    """Return a base of the right shapes, to be filled by a checkpoint."""
    made = {"attn_implementation": config._attn_implementation, "dtype": config.dtype}
    base_config = config.base()
    if isinstance(base_config, ScaleConfig):
        return ScaleForCausalLM._from_config(base_config, **made)
    return AutoModelForCausalLM.from_config(base_config, **made)
