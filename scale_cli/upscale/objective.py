"""A model as it is trained: a loss that never holds the logits of all positions, compiled or checkpointed if asked.

A decoder is compiled whole (`fullgraph=True`: a graph break is an error, not a slow surprise) and for one shape, that
of the run's batches; evaluation goes on with the plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from scale_cli.config.schema import RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.errors import ConfigError, TrainingError, one_line
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.model.plain_loss import ChunkedLossModel, plain_of, trained_head
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
    plain = plain_of(model)
    if train.activation_checkpointing:
        plain.gradient_checkpointing_enable({"use_reentrant": False})
    head = trained_head(plain)
    if type(head) is not nn.Linear or head.bias is not None:
        return model
    return ChunkedLossModel(plain, compiled if train.compile else None)


def settings_on(device_type: str, config: RunConfig) -> TrainConfig:
    """Return how a run is trained on a device.

    Where a config leaves its kernels open, isolated documents attend on a GPU by flex_attention, which skips what is
    masked; by sdpa they would have a mask of T x T for every call, and lose the flash kernel.
    """
    train = config.train
    if train.attention == "flex_attention" and device_type == "cpu":
        raise ConfigError("train.attention: flex_attention has no backward pass on a CPU; leave it out")
    if train.attention is None and config.corpus.isolate_documents and device_type == "cuda":
        return train.model_copy(update={"attention": "flex_attention"})
    return train


def attends_by_mask(config: RunConfig, device_type: str) -> bool:
    """Return whether a run holds masks of isolated documents."""
    takes_masks = config.corpus.isolate_documents and config.train.attention in (None, "sdpa")
    return takes_masks and settings_on(device_type, config).attention != "flex_attention"


@contextmanager
def attending_by_sdpa(model: MethodModel) -> Iterator[None]:
    """Evaluate without flex_attention, which is compiled for every new shape: documents have all lengths."""
    config = _plain(model).config
    trained_by = config._attn_implementation
    if trained_by == "flex_attention":
        set_attention(model, "sdpa")
    try:
        yield
    finally:
        if trained_by == "flex_attention":
            set_attention(model, trained_by)


def _plain(model: MethodModel) -> Any:
    plain = plain_of(model)
    return plain.root if isinstance(plain, ScaleForCausalLM) else plain


def set_attention(model: MethodModel, implementation: str) -> None:
    """Let a model's layers attend by an implementation of transformers'."""
    plain = _plain(model)
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
