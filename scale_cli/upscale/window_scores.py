"""Scores by which windows of a source are chosen or ordered (`data/selection.py`): the base's losses, or n-grams'.

They are made once and then read: they lie in the cache in a folder of their own, named after all that decides them: the
text as it is tokenised, the windows, the judge, and where that is the base, its hash.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from scale_cli.config.schema import ModelConfig, RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import IGNORED, Windows, stacked
from scale_cli.data.corpora import cache_dir, windows_of
from scale_cli.data.selection import Scores, ngram_scores
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.processes import device, placed
from scale_cli.storage.atomic import is_whole, json_sha256, new_folder
from scale_cli.storage.records import BaseRecord
from scale_cli.upscale.folder import load_any_base
from scale_cli.upscale.objective import for_training

_FORMAT_VERSION, _SCORES = 2, "scores.bin"


def scores_of(
    config: RunConfig, corpora: Sequence[TokenisedCorpus], record: BaseRecord, vocab_size: int
) -> list[Scores | None]:
    """Return of every training source its windows' scores; None where no judge is asked for: all are read, shuffled."""
    pairs = zip(config.corpus.sources, corpora, strict=True)
    return [
        None if source.judge is None else _scores(config, corpus, source.judge, record, vocab_size)
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
