"""Warnings: settings and corpora that are allowed and seldom intended.

A run that ends while it warms up, settings that come to nothing, a text read over and over, held-out text that is
trained on, text that the tokenizer loses, text that is not parted into documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePath

import numpy as np
import numpy.typing as npt

from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import CorpusSource, TextSource
from scale_cli.config.training import KEYS_OF_SCHEDULES
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.report.numbers import percent

# Up to 4 readings of a text teach nearly what new text would, and a reading after 16 less than half of it (Muennighoff
# et al., arXiv 2305.16264).
_OFTEN = 16
_FEW_LOST = 1e-4
_HASHES_AT_ONCE = 1 << 20
_LARGE_DOCUMENT_BYTES = 1 << 16


def num_readings(config: RunConfig, source: CorpusSource, num_tokens: int) -> float:
    """Return how often a run reads each window of a training source, the last of which may be mostly padding."""
    train, share = config.train, config.corpus.shares(config.train.max_steps)[config.corpus.sources.index(source)]
    num_windows = -(-(num_tokens - 1) // config.corpus.sequence_length)
    num_read = share * train.max_steps * train.global_batch_size
    return num_read / max(1, round(num_windows * source.share_read))


def corpus_warnings(
    config: RunConfig, training: Sequence[TokenisedCorpus], held_out: Sequence[TokenisedCorpus | None]
) -> list[str]:
    """Return a line for everything that is doubtful about some corpora; a held-out one is None where it is not open."""
    trained = dict(zip((source.name for source in config.corpus.sources), training, strict=True))
    sources = config.evaluation.perplexity
    held = {source.name: corpus for source, corpus in zip(sources, held_out, strict=True) if corpus is not None}
    readings = [
        line
        for source in config.corpus.sources
        for line in reading_warnings(config, source, len(trained[source.name].ids))
    ]
    lost_text = [
        f"corpus {name}: the tokenizer loses {percent(lost.lost_fraction, 2)} of its text, as in {lost.example!r}"
        for name, corpus in (*trained.items(), *held.items())
        if (lost := corpus.ledger.round_trip).lost_fraction > _FEW_LOST
    ]
    return [
        *idle_settings(config),
        *readings,
        *lost_text,
        *(line for source in config.corpus.sources for line in _undivided(source, trained[source.name])),
        *(line for source in sources if source.name in held for line in _undivided(source, held[source.name])),
        *(one_document(name) for name, corpus in held.items() if len(corpus) == 1),
        *(line for name in held for line in _shared(name, held[name], trained)),
    ]


def reading_warnings(config: RunConfig, source: CorpusSource, num_tokens: int) -> list[str]:
    """Return a line where a training source is read very often, or none."""
    often = num_readings(config, source, num_tokens)
    if often <= _OFTEN:
        return []
    return [
        f"corpus {source.name}: its {num_tokens:,} tokens are read {often:,.0f} times over; beyond {_OFTEN} times they "
        "teach little but themselves: give more text, a lower weight, fewer train.max_steps, or many times the "
        "train.weight_decay"
    ]


def _undivided(source: TextSource, corpus: TokenisedCorpus) -> list[str]:
    """Return a line where no file of a source is parted into documents, and they are large."""
    kept = corpus.ledger.kept
    is_txt = any(".txt" in PurePath(path).suffixes for path in source.paths)
    parted = kept.documents > corpus.ledger.files or kept.num_bytes < kept.documents * _LARGE_DOCUMENT_BYTES
    if source.documents != "paragraph" or not is_txt or parted:
        return []
    return [
        f"corpus {source.name}: {kept.documents:,} document{'s' * (kept.documents > 1)} of {kept.num_bytes:,} bytes in "
        "all: a blank line ends a document, and there is none; say `documents: line` of the source where every line is "
        "a document, or `documents: file` where every file is"
    ]


def one_document(name: str) -> str:
    """Return what to say of a held-out corpus of one document."""
    return (
        f"held-out {name}: one document, and intervals are over documents: its figures have none; a blank line ends a "
        "document of a .txt, or a line does with `documents: line`"
    )


def idle_settings(config: RunConfig) -> list[str]:
    """Return a line for every setting that comes to nothing in this run, or never to what it says."""
    train, method = config.train, config.method
    lines = [
        f"train.{key}: nothing with train.schedule {train.schedule}, only with {' and '.join(schedules)}"
        for key, schedules in KEYS_OF_SCHEDULES.items()
        if getattr(train, key) is not None and train.schedule not in schedules
    ]
    if train.decay_to_base and not train.weight_decay:
        lines.append("train.decay_to_base: train.weight_decay is 0, so that nothing is drawn to the base; give one")
    if train.init_moments == "kept" and train.init_from is None:
        lines.append("train.init_moments: kept of nothing; name a checkpoint, train.init_from")
    if train.warmup_steps > train.max_steps:
        lines.append(
            f"train.warmup_steps {train.warmup_steps:,}: more than train.max_steps {train.max_steps:,}, so that the "
            f"rate never gets to train.lr, only to {percent(train.max_steps / train.warmup_steps, 0)} of it; lower "
            "the one with the other"
        )
    lines += method.definition.idle(method.settings, train.max_steps)
    ends = [0, *(end for end, _ in config.corpus.mixture(train.max_steps))]
    return lines + [
        f"corpus.stages: the one until {stage.until:g} has none of train.max_steps {train.max_steps:,}: nothing is "
        "trained by its weights"
        for stage, (begin, end) in zip(config.corpus.stages, pairwise(ends), strict=False)
        if begin == end
    ]


def _shared(name: str, held_out: TokenisedCorpus, trained: dict[str, TokenisedCorpus]) -> list[str]:
    hashes, documents = np.unique(held_out.hashes, return_counts=True)
    lines = []
    for source, corpus in trained.items():
        if number := int(documents[_is_among(hashes, corpus.hashes)].sum()):
            lines.append(
                f"held-out {name}: {number:,} of its {len(held_out):,} documents ({percent(number / len(held_out))}) "
                f"are in {source}, which is trained on: what is measured on them is memory"
            )
    return lines


def _is_among(wanted: npt.NDArray[np.uint64], hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Return for each of some sorted hashes whether it is among others, of which there may be very many."""
    found = np.zeros(len(wanted), dtype=np.bool_)
    for start in range(0, len(hashes), _HASHES_AT_ONCE):
        part = hashes[start : start + _HASHES_AT_ONCE]
        places = np.minimum(np.searchsorted(wanted, part), len(wanted) - 1)
        found[places[wanted[places] == part]] = True
    return found
