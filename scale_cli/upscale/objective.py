"""A model as it is trained: with a loss that never holds the logits of all positions."""

from __future__ import annotations

from typing import Any

from peft import PeftModel
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from scale_cli.model.head_loss import plain_cross_entropy
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.upscale.folder import MethodModel


def for_training(model: MethodModel) -> nn.Module:
    """Return what a training step calls; its parameters are the model's own.

    A widened model computes its loss in chunks itself. A plain one is given the same; where its vocabulary head is more
    than a matrix (adapters in it, a bias) it keeps transformers' loss over whole logits.
    """
    if isinstance(model, ScaleForCausalLM):
        return model
    plain: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    head = plain.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        return model
    return ChunkedLossModel(plain)


class ChunkedLossModel(nn.Module):
    """A plain causal language model, adapters in its decoder or not, whose training loss is computed in chunks."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, shift_labels: Tensor, num_items_in_batch: int, **_: Any
    ) -> CausalLMOutputWithPast:
        """Return the loss alone.

        Args:
            input_ids: (B, T).
            shift_labels: (B, T), the token after each position, -100 where no loss is wanted.
            num_items_in_batch: what the sum is divided by.
            **_: what transformers' own models take besides: `labels`, `use_cache`.
        """
        states = self.model.get_decoder()(input_ids, use_cache=False).last_hidden_state
        head: nn.Linear = self.model.get_output_embeddings()
        loss = plain_cross_entropy(states, head.weight, shift_labels)
        return CausalLMOutputWithPast(loss=loss / num_items_in_batch)
