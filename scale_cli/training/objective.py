"""A model prepared for training: a loss that never holds the logits of all positions; compiled,
checkpointed if asked.

Each decoder layer is compiled as a whole (`fullgraph=True`: a graph break is an error, not a slow
surprise), for the one shape of the run's batches. Equal layers share the code; evaluation runs the
plain layers. Nothing between layers is compiled, because sharding hooks into the calls of layers.

Shapes: B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from transformers.modeling_outputs import CausalLMOutputWithPast

from scale_cli.config.schema import RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.errors import ConfigError, TrainingError, one_line
from scale_cli.model.head_loss import plain_cross_entropy
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.upscale.building import MethodModel


def plain_of(model: Any) -> Any:
    """Return a model without PEFT's wrapper, if it has one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def trained_head(plain: Any) -> Any:
    """Return a plain model's vocabulary head; if PEFT trains a whole copy of it, that copy."""
    head = plain.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    return head if copies is None else copies[head.active_adapter]


class ChunkedLossModel(nn.Module):
    """A plain causal language model, with or without adapters, whose training loss is computed in
    chunks.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        shift_labels: Tensor,
        num_items_in_batch: int,
        position_ids: Tensor | None = None,
        token_losses: Tensor | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Return only the loss; the arguments are those of a widened model in training
        (`modeling_scale.py`).
        """
        head = trained_head(self.model)
        decoder = self.model.get_decoder()
        states: Tensor = decoder(
            input_ids, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        loss = plain_cross_entropy(states, head.weight, shift_labels, token_losses)
        return CausalLMOutputWithPast(loss=loss / num_items_in_batch)


# The smallest heads that flex attention takes off a CPU: "tl.dot does not support embedding size
# less than 16", in torch/_inductor/kernel/flex/flex_attention.py. Larger ones need not be a power
# of two; the kernel pads them.
_FLEX_HEAD_DIM = 16


def for_training(model: MethodModel, train: TrainConfig) -> nn.Module:
    """Return the module that a training step calls; its parameters are the model's own.

    A widened model computes its loss in chunks itself. A plain one is wrapped to do the same,
    unless its vocabulary head is more than a matrix (adapters in it, a bias): then it keeps
    transformers' loss over whole logits.
    """
    if train.attention is not None:
        sizes = (getattr(module, "head_dim", _FLEX_HEAD_DIM) for module in model.modules())
        if train.attention == "flex_attention" and (head_dim := min(sizes)) < _FLEX_HEAD_DIM:
            raise ConfigError(
                f"train.attention: flex_attention (which corpus.isolate_documents takes on a GPU) needs heads of "
                f"{_FLEX_HEAD_DIM} dimensions or more, and this model's have {head_dim}; set train.attention=sdpa"
            )
        attending(model).set_attn_implementation(train.attention)
    if train.compile:
        layers = _decoder_layers(model)
        own_forward = type(layers[0]).forward
        fast = compiled(own_forward)
        for layer in layers:
            layer.forward = partial(_run_layer, layer, own_forward, fast)
    if isinstance(model, ScaleForCausalLM):
        model.gradient_checkpointing = train.activation_checkpointing
        return model
    plain = plain_of(model)
    if train.activation_checkpointing:
        plain.gradient_checkpointing_enable({"use_reentrant": False})
    head = trained_head(plain)
    if type(head) is not nn.Linear or head.bias is not None:
        return model
    return ChunkedLossModel(plain)


@contextmanager
def running_plain_layers(model: MethodModel) -> Iterator[None]:
    """Run no compiled layer within the body, in training mode either: its batches have another shape than the run's."""
    layers = _decoder_layers(model)
    forwards = [layer.forward for layer in layers]
    for layer in layers:
        layer.forward = partial(type(layer).forward, layer)
    try:
        yield
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            layer.forward = forward


def _decoder_layers(model: MethodModel) -> list[Any]:
    decoder = model.expansion if isinstance(model, ScaleForCausalLM) else plain_of(model).model
    return list(decoder.layers)


def _run_layer(
    layer: nn.Module, plain: Callable[..., Any], fast: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a layer, compiled in training mode."""
    return (fast if layer.training else plain)(layer, *args, **kwargs)


def settings_on(device_type: str, config: RunConfig) -> TrainConfig:
    """Return a run's `train` settings for a device; ConfigError if its attention cannot train
    there.

    If the config names no attention, isolated documents use flex_attention on a GPU, which skips
    masked blocks. sdpa would need a T x T mask for every call, and could not use the flash kernel.
    """
    train = config.train
    if train.attention == "flex_attention" and device_type == "cpu":
        raise ConfigError(
            "train.attention: flex_attention has no backward pass on a CPU; remove this key"
        )
    if train.attention is None and config.corpus.isolate_documents and device_type == "cuda":
        return train.model_copy(update={"attention": "flex_attention"})
    return train


@contextmanager
def attending_by_sdpa(model: MethodModel) -> Iterator[None]:
    """Use sdpa within the body, for whole texts of any length: flex_attention would be compiled for
    each length.
    """
    plain = attending(model)
    if plain.config._attn_implementation != "flex_attention":
        yield
        return
    plain.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        plain.set_attn_implementation("flex_attention")


def attending(model: MethodModel) -> Any:
    """Return the plain model by whose configuration every layer attends."""
    plain = plain_of(model)
    return plain.base if isinstance(plain, ScaleForCausalLM) else plain


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled as a whole, for each shape it is called with; TrainingError if
    that fails.

    Compiled code is not kept on disk for the next run, because inductor's cache is a pickle.
    """
    fast = torch.compile(function, fullgraph=True, dynamic=False, options={"fx_graph_cache": False})

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return fast(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            raise TrainingError(
                f"train.compile: cannot compile a layer here: {one_line(error)}"
            ) from None

    return run
