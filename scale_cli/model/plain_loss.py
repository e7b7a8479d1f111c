"""The training loss of a plain causal language model, in chunks as a widened one's: no logits of all positions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from .head_loss import plain_cross_entropy


def plain_of(model: Any) -> Any:
    """Return a model without what PEFT has put around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def trained_head(plain: Any) -> Any:
    """Return a plain model's vocabulary head; of one that PEFT trains whole beside its adapters, what trains of it."""
    head = plain.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    return head if copies is None else copies[head.active_adapter]


def decoder_over(decoder: Any, layers: Sequence[int]) -> Any:
    """Return a decoder over some of another's layers, which are the same modules."""
    part, config = copy.copy(decoder), copy.deepcopy(decoder.config)
    part._modules = {**decoder._modules, "layers": nn.ModuleList(decoder.layers[layer] for layer in layers)}
    if kinds := getattr(config, "layer_types", None):  # which a decoder looks up by a layer's place
        config.layer_types = [kinds[layer] for layer in layers]
    config.num_hidden_layers = len(layers)
    part.config = config
    return part


class ChunkedLossModel(nn.Module):
    """A plain causal language model, adapters in its decoder or not, whose training loss is computed in chunks.

    Its decoder may be compiled, by a function that does so, or run over some `layers` alone.
    """

    def __init__(
        self, model: Any, compiled: Callable[..., Any] | None = None, layers: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        self.model = model
        # Not by a module's attribute: its parameters are the model's, and are there already.
        self._part = None if layers is None else (decoder_over(model.get_decoder(), layers),)
        self._run = self._last_states if compiled is None else compiled(self._last_states)

    def _last_states(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        decoder = self.model.get_decoder() if self._part is None else self._part[0]
        states: Tensor = decoder(input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        return states

    def forward(
        self,
        input_ids: Tensor,
        shift_labels: Tensor,
        num_items_in_batch: int,
        position_ids: Tensor | None = None,
        token_losses: Tensor | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Return the loss alone; arguments as of a widened model in training (`modeling_scale.py`)."""
        head = trained_head(self.model)
        loss = plain_cross_entropy(self._run(input_ids, position_ids), head.weight, shift_labels, token_losses)
        return CausalLMOutputWithPast(loss=loss / num_items_in_batch)
