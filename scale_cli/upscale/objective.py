"""A model as it is trained: a loss that never holds the logits of all positions, compiled or checkpointed if asked.

A decoder is compiled whole (`fullgraph=True`: a graph break is an error, not a slow surprise) and for one shape, that
of the run's batches; evaluation goes on with the plain one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from scale_cli.config.training import TrainConfig
from scale_cli.errors import ConfigError, TrainingError, one_line
from scale_cli.model.head_loss import plain_cross_entropy
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.upscale.baselines import TRAINED_ALONE
from scale_cli.upscale.folder import MethodModel


def for_training(model: MethodModel, train: TrainConfig) -> nn.Module:
    """Return what a training step calls; its parameters are the model's own.

    A widened model computes its loss in chunks itself. A plain one is given the same; where its vocabulary head is more
    than a matrix (adapters in it, a bias) it keeps transformers' loss over whole logits, and is not compiled.
    """
    if train.attention is not None:
        set_attention(model, train.attention)
    if isinstance(model, ScaleForCausalLM):
        model.gradient_checkpointing = train.activation_checkpointing
        model.compiled_states = compiled(model.final_states) if train.compile else None
        return model
    plain: Any = model if isinstance(model, PreTrainedModel) else model.get_base_model()
    if train.activation_checkpointing:
        plain.gradient_checkpointing_enable({"use_reentrant": False})
    head = trained_head(plain)
    if type(head) is not nn.Linear or head.bias is not None:
        return model
    return ChunkedLossModel(plain, train.compile, getattr(plain, TRAINED_ALONE, None))


def trained_head(plain: Any) -> Any:
    """Return a plain model's vocabulary head; of one that PEFT trains whole beside its adapters, what trains of it."""
    head = plain.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    return head if copies is None else copies[head.active_adapter]


def set_attention(model: MethodModel, implementation: str) -> None:
    """Let a model's layers attend by an implementation of transformers'."""
    plain: Any = model if isinstance(model, PreTrainedModel) else model.get_base_model()
    plain = plain.root if isinstance(plain, ScaleForCausalLM) else plain
    if implementation == "flex_attention" and plain.device.type == "cpu":
        raise ConfigError("train.attention: flex_attention has no backward pass on a CPU; leave it out")
    try:
        plain.set_attn_implementation(implementation)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"train.attention: {implementation}: {one_line(error)}") from None


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled whole, for the shapes it is called with.

    What was compiled is not kept on disk for the next run: inductor's cache is a pickle.
    """
    fast = torch.compile(function, fullgraph=True, dynamic=False, options={"fx_graph_cache": False})

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return fast(*args, **kwargs)
        except TorchDynamoException as error:
            raise TrainingError(f"train.compile: cannot compile the decoder here: {one_line(error)}") from None

    return run


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

    Where `layers` are given, over those alone.
    """

    def __init__(self, model: Any, compile_decoder: bool, layers: Sequence[int] | None = None) -> None:
        super().__init__()
        self.model = model
        # Not by a module's attribute: its parameters are the model's, and are there already.
        self._part = None if layers is None else (decoder_over(model.get_decoder(), layers),)
        self._run = compiled(self._last_states) if compile_decoder else self._last_states

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
        """Return the loss alone.

        Args:
            input_ids: (B, T).
            shift_labels: (B, T), the token after each position, -100 where no loss is wanted.
            num_items_in_batch: what the sum is divided by.
            position_ids: (B, T), restarting where attention may not look back; None: counted from 0.
            token_losses: (B, T), filled with what every token adds to the sum; None where nobody asks.
            **_: what transformers' own models take besides: `labels`, `use_cache`.
        """
        head = trained_head(self.model)
        loss = plain_cross_entropy(self._run(input_ids, position_ids), head.weight, shift_labels, token_losses)
        return CausalLMOutputWithPast(loss=loss / num_items_in_batch)
