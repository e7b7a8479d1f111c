"""The widened model: a frozen base, its expansion, and the two heads that are served.

The base may be a widened model itself: its expansions are frozen too then, the new one reads their streams beside x,
and the base head is the trained head of that model.

Shapes: B batch, T positions, V vocabulary.

Source: SCALE, arXiv 2511.03270.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from .branches_scale import Branch, FinalStates
from .configuration_scale import ScaleConfig
from .expansion_scale import Expansion
from .head_loss import IGNORED, trained_head_cross_entropy
from .serving_scale import WidenedModel
from .vocabulary_scale import new_tokens_among


class ScaleForCausalLM(WidenedModel):
    """A frozen causal language model and its expansion.

    In training mode the logits are the trained head's, H x_a + H' u, and the router is off: at step 0 both heads
    agree everywhere, so a routed loss would never start. In evaluation mode they are what is served: the trained
    head's for `preserve` and `adapt`, the router's for `route`.
    """

    config_class = ScaleConfig
    supports_gradient_checkpointing = True

    def __init__(self, config: ScaleConfig, base: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        self.base: Any = self._empty_base() if base is None else base
        below: list[Branch] = []
        if isinstance(self.base, ScaleForCausalLM):
            below = list(self.base.branches)
            # With it transformers would take a checkpoint's expansion.* for the base.expansion.* that is there too.
            self.base_model_prefix = ""
        self.expansion = Expansion(self.root, [branch.expansion for branch in below], config)
        self.branches = [*below, Branch(self.expansion, parent=len(below))]
        self.routed_heads = (len(below), len(below) + 1)
        self.freeze()
        self.generation_config = self.base.generation_config
        self.post_init()
        if base is not None and self.expansion.new_tokens is not None:
            self.expansion.new_tokens.compose(self.root)

    @property
    def root(self) -> Any:
        """The plain model at the bottom."""
        return self.base.root if isinstance(self.base, ScaleForCausalLM) else self.base

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
        """Return the mean loss of `labels`, or of `shift_labels` (shifted already) over `num_items_in_batch`.

        `distillation` has of every sequence the weight of KL(base head || trained head); `token_losses` (B, T) is
        filled with what every token adds to the sum.
        """
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        if distillation is not None and self.branches[-1].writes:
            raise ValueError("distillation: the base's own logits are not at hand where the expansion writes into x")
        heads = self.root.lm_head.weight, self.expansion.lm_head.weight
        new = new_tokens_among(branch.expansion for branch in self.branches)
        between = [
            (u_BTE, branch.expansion.lm_head.weight)
            for u_BTE, branch in zip(states.u_KBTE[:-1], self.branches[:-1], strict=True)
        ]
        loss = trained_head_cross_entropy(
            states.x_BTD[states.owner(len(self.branches))],
            states.u_KBTE[-1],
            *heads,
            shift_labels,
            between,
            distillation,
            None if new is None else new.lm_head.weight,
            token_losses,
            None if self.expansion.new_tokens is None else self.expansion.new_tokens.shared,
        )
        return loss / ((shift_labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)

    def base_logits(self, states: FinalStates) -> Tensor:
        """Return the base head's logits, bit for bit: H x_p, or the trained head's of a base that is widened."""
        return states.logits(self.root.lm_head, self.routed_heads[:1])[0]
