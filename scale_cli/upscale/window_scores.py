"""The scores that windows of a source are chosen or ordered by (`data/selection.py`), made once and then read.

They lie in the cache in a folder of their own, named after all that decides them: the text as it is tokenised, the
windows, the judge, and where that is the base, its hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import torch

from scale_cli.config.schema import ModelConfig, RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import IGNORED, Windows
from scale_cli.data.corpora import cache_dir, windows_of
from scale_cli.data.selection import Scores, ngram_scores
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.processes import device, placed
from scale_cli.storage.atomic import MANIFEST, new_folder, verify_folder
from scale_cli.storage.records import BaseRecord
from scale_cli.upscale.folder import load_any_base
from scale_cli.upscale.objective import for_training

_FORMAT_VERSION, _SCORES = 1, "scores.bin"


def scores_of(
    config: RunConfig, corpora: Sequence[TokenisedCorpus], record: BaseRecord, vocab_size: int
) -> list[Scores | None]:
    """Return the scores of every training source's windows; None of those that are shuffled whole.

    Args:
        config: of the run.
        corpora: one for every training source.
        record: of the base.
        vocab_size: of the run's tokenizer.
    """
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
    sha256 = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    return f"{corpus.folder.name}.{judge}-{sha256[:12]}"


@torch.no_grad()
def base_losses(windows: Windows, base: ModelConfig, at_once: int = 8) -> Scores:
    """Return the base's mean loss on every window, in nats per target; infinite where it has none."""
    model = for_training(placed(load_any_base(base)), TrainConfig(max_steps=1)).eval()
    scores = np.full(len(windows), np.inf)
    for first in range(0, len(windows), at_once):
        indices = range(first, min(first + at_once, len(windows)))
        inputs, targets = (
            torch.from_numpy(np.stack(rows)).to(device())
            for rows in zip(*(windows.window(index) for index in indices), strict=True)
        )
        positions = [row for index in indices if (row := windows.positions(index)) is not None]
        position_ids = torch.from_numpy(np.stack(positions)).to(device()) if positions else None
        losses_BT = torch.zeros(targets.shape, device=device())
        model(
            input_ids=inputs,
            position_ids=position_ids,
            labels=targets,
            shift_labels=targets,
            num_items_in_batch=1,
            use_cache=False,
            token_losses=losses_BT,
        )
        num_targets = (targets != IGNORED).sum(dim=1)
        means = losses_BT.double().sum(dim=1) / num_targets  # 0 / 0: not scored
        scores[first : first + len(indices)] = means.nan_to_num(nan=torch.inf).cpu().numpy()
    return scores
