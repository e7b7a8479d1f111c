"""A model as it is trained: a loss that never holds the logits of all positions, compiled or checkpointed if asked.

A decoder is compiled whole (`fullgraph=True`: a graph break is an error, not a slow surprise) and for one shape, that
of the run's batches; evaluation goes on with the plain one. On the way the expansion stream can be measured beside the
base stream, by whose rms it is divided.

By their loss under the base, or by n-grams, windows of a source are chosen or ordered (`data/selection.py`). Such
scores are made once: they lie in the cache, in a folder named after all that decides them: the text as it is tokenised,
the windows, the judge, and where that is the base, its hash.

Shapes: B batch, T positions, E expansion channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from scale_cli.config.schema import ModelConfig, RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import IGNORED, Windows, stacked
from scale_cli.data.corpora import cache_dir, windows_of
from scale_cli.data.selection import Scores, ngram_scores
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.errors import ConfigError, TrainingError, one_line
from scale_cli.model.expansion_scale import ExpansionNorm
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.model.plain_loss import ChunkedLossModel, plain_of, trained_head
from scale_cli.processes import device, placed
from scale_cli.storage.atomic import is_whole, json_sha256, new_folder
from scale_cli.storage.records import BaseRecord
from scale_cli.upscale.method import MethodModel, load_any_base

_FORMAT_VERSION, _SCORES = 2, "scores.bin"


def for_training(model: MethodModel, train: TrainConfig) -> nn.Module:
    """Return what a training step calls; its parameters are the model's own.

    A widened model computes its loss in chunks itself. A plain one is given the same; where its vocabulary head is more
    than a matrix (adapters in it, a bias) it keeps transformers' loss over whole logits, and is not compiled.
    """
    if train.attention is not None:
        _set_attention(model, train.attention)
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
    takes_masks = config.corpus.isolate_documents and config.train.attention in (None, "sdpa")
    return takes_masks and settings_on(device_type, config).attention != "flex_attention"


@contextmanager
def attending_by_sdpa(model: MethodModel) -> Iterator[None]:
    """Evaluate without flex_attention, which is compiled for every new shape: documents have all lengths."""
    trained_by = _root(model).config._attn_implementation
    if trained_by != "flex_attention":
        yield
        return
    _set_attention(model, "sdpa")
    try:
        yield
    finally:
        _set_attention(model, trained_by)


def _root(model: MethodModel) -> Any:
    plain = plain_of(model)
    return plain.root if isinstance(plain, ScaleForCausalLM) else plain


def _set_attention(model: MethodModel, implementation: str) -> None:
    try:
        _root(model).set_attn_implementation(implementation)
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


def expansion_norms(model: nn.Module) -> dict[str, ExpansionNorm]:
    """Return the norms of all expansions by name, each expansion's bottom up; none of a model that is not widened."""
    return {name: norm for name, norm in model.named_modules() if isinstance(norm, ExpansionNorm)}


@contextmanager
def measured_stream_ratios(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield the largest rms(u) / rms(x) of any position that each norm meets in the body, by the norm's name.

    Scalars on the model's device, of the forward passes that there are: nothing is computed twice or waited for.
    """
    largest: dict[str, Tensor] = {}

    @torch.no_grad()
    def measure(name: str, _norm: nn.Module, streams: tuple[Tensor, Tensor]) -> None:
        inverse_rms_BT1, u_BTE = streams
        ratio = (u_BTE.float().pow(2).mean(-1).sqrt() * inverse_rms_BT1.squeeze(-1)).max()
        largest[name] = torch.maximum(largest[name], ratio) if name in largest else ratio

    hooks = [norm.register_forward_pre_hook(partial(measure, name)) for name, norm in expansion_norms(model).items()]
    try:
        yield largest
    finally:
        for hook in hooks:
            hook.remove()


def layer_ratios(model: Any, by_norm: dict[str, Tensor]) -> Tensor:
    """Return (layers + 1,): the largest that was measured before a norm of each layer that trains, and the last's."""
    of_layers = [
        torch.stack([by_norm[f"expansion.layers.{index}.{name}"] for name in expansion_norms(layer)]).amax()
        for index, layer in enumerate(model.expansion.layers)
    ]
    return torch.stack([*of_layers, by_norm["expansion.norm"]])


def scores_of(
    config: RunConfig, corpora: Sequence[TokenisedCorpus], record: BaseRecord, vocab_size: int
) -> list[Scores | None]:
    """Return of every training source its windows' scores; None where all are read."""
    pairs = zip(config.corpus.sources, corpora, strict=True)
    return [
        None if source.select is None else _scores(config, corpus, source.select.by, record, vocab_size)
        for source, corpus in pairs
    ]


def _scores(config: RunConfig, corpus: TokenisedCorpus, judge: str, record: BaseRecord, vocab_size: int) -> Scores:
    described = {
        "format": _FORMAT_VERSION,
        "text": corpus.folder.name,
        "sequence_length": config.corpus.sequence_length,
        "isolate_documents": config.corpus.isolate_documents,
        "base": record.content_sha256 if judge == "base_loss" else None,
    }
    folder = cache_dir(config) / f"{corpus.folder.name}.{judge}-{json_sha256(described)[:12]}"
    if not is_whole(folder):
        windows = windows_of(config.corpus, corpus)
        made = ngram_scores(windows, vocab_size) if judge == "ngram" else base_losses(windows, config.model)
        with new_folder(folder) as partial:
            made.tofile(partial / _SCORES)
    return np.fromfile(folder / _SCORES)


@torch.no_grad()
def base_losses(windows: Windows, base: ModelConfig, at_once: int = 8) -> Scores:
    """Return the base's mean loss on every window, in nats per target; infinite for a window without targets.

    Of a base that is a finished run it is that of its trained head, upon which the next expansion stands.
    """
    model = for_training(placed(load_any_base(base)), TrainConfig(max_steps=1))
    model.train()  # the mode in which a widened one has a loss of every token; nothing is dropped out
    scores = np.full(len(windows), np.inf)
    for first in range(0, len(windows), at_once):
        indices = range(first, min(first + at_once, len(windows)))
        here = stacked([windows], [(0, index) for index in indices]).to(device())
        losses_BT = torch.zeros(here.targets.shape, device=device())
        model(
            input_ids=here.input_ids,
            position_ids=here.position_ids,
            labels=here.targets,
            shift_labels=here.targets,
            num_items_in_batch=1,
            use_cache=False,
            token_losses=losses_BT,
        )
        num_targets = (here.targets != IGNORED).sum(dim=1)
        means = losses_BT.double().sum(dim=1) / num_targets  # 0 / 0: not scored
        scores[first : first + len(indices)] = means.nan_to_num(nan=torch.inf).cpu().numpy()
    return scores
