"""Two measurements on the base: scores by which windows of a source are chosen, and which layers ADEPT copies.

Windows are chosen or ordered (`data/selection.py`) by the base's loss on each, or by an n-gram model's. The scores are
made once and then read: they lie in the cache in a folder of their own, named after all that decides them: the text as
it is tokenised, the windows, the judge, and where that is the base, its hash.

ADEPT copies the layers without which the base loses least on what it knows (arXiv 2510.10071). The official code sets
all of a layer's weights to 0, norms included, which is a bypass: the layer then adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from scale_cli.config.schema import MethodConfig, ModelConfig, RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import IGNORED, MicroBatch, Windows, stacked
from scale_cli.data.corpora import cache_dir, windows_of
from scale_cli.data.selection import Scores, ngram_scores
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.processes import device, placed
from scale_cli.storage.atomic import MANIFEST, json_sha256, new_folder, verify_folder
from scale_cli.storage.records import BaseRecord
from scale_cli.upscale.baselines import copied_layers
from scale_cli.upscale.folder import load_any_base
from scale_cli.upscale.objective import ChunkedLossModel, for_training

_FORMAT_VERSION, _SCORES = 1, "scores.bin"


def scores_of(
    config: RunConfig, corpora: Sequence[TokenisedCorpus], record: BaseRecord, vocab_size: int
) -> list[Scores | None]:
    """Return of every training source its windows' scores; None where no judge is asked for: all are read, shuffled."""
    scores: list[Scores | None] = []
    for source, corpus in zip(config.corpus.sources, corpora, strict=True):
        if source.judge is None:
            scores.append(None)
            continue
        windows = windows_of(config, corpus)
        folder = cache_dir(config) / _name(config, corpus, source.judge, record)
        if not (folder / MANIFEST).is_file():
            by_ngram = source.judge == "ngram"
            made = ngram_scores(windows, vocab_size) if by_ngram else base_losses(windows, config.model)
            with new_folder(folder) as partial:
                made.tofile(partial / _SCORES)
        verify_folder(folder)
        scores.append(np.fromfile(folder / _SCORES))
    return scores


def _name(config: RunConfig, corpus: TokenisedCorpus, judge: str, record: BaseRecord) -> str:
    described = {
        "format": _FORMAT_VERSION,
        "text": corpus.folder.name,
        "sequence_length": config.corpus.sequence_length,
        "isolate_documents": config.corpus.isolate_documents,
        "base": record.content_sha256 if judge == "base_loss" else None,
    }
    return f"{corpus.folder.name}.{judge}-{json_sha256(described)[:12]}"


@torch.no_grad()
def base_losses(windows: Windows, base: ModelConfig, at_once: int = 8) -> Scores:
    """Return the base's mean loss on every window, in nats per target; infinite for a window without targets."""
    model = for_training(placed(load_any_base(base)), TrainConfig(max_steps=1)).eval()
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


def with_found_layers(method: MethodConfig, base: PreTrainedModel, probe: Sequence[MicroBatch]) -> MethodConfig:
    """Return an ADEPT's method with the layers that it copies, measured on windows of what the base knows."""
    num_layers = base.config.num_hidden_layers
    num_copies = len(copied_layers(num_layers, method))
    losses = bypass_losses(base, probe)
    found = sorted(range(num_layers), key=lambda layer: (losses[layer], layer))[:num_copies]
    return method.model_copy(update={"adept": method.adept.model_copy(update={"layers": sorted(found)})})


@torch.no_grad()
def bypass_losses(base: Any, probe: Sequence[MicroBatch]) -> list[float]:
    """Return of every layer the loss without it, in nats per token of some windows."""
    layers = range(base.config.num_hidden_layers)
    num_tokens = sum(int((window.targets != IGNORED).sum()) for window in probe)
    here = [window.to(base.device) for window in probe]
    losses = []
    for bypassed in layers:
        model = ChunkedLossModel(base, False, [layer for layer in layers if layer != bypassed])
        each = (model(window.input_ids, window.targets, num_tokens, window.position_ids).loss for window in here)
        losses.append(sum(map(float, each)))
    return losses
