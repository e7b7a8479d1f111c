"""Warnings: settings and corpora that are allowed and seldom intended.

A run that ends while it warms up, settings that come to nothing, a text read over and over, held-out text that is
trained on, text that the tokenizer does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import CorpusSource
from scale_cli.config.training import KEYS_OF_SCHEDULES
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.report.numbers import percent

# Up to 4 readings of a text teach nearly what new text would, and a reading after 16 less than half of it (Muennighoff
# et al., arXiv 2305.16264).
_OFTEN = 16
_FEW_UNKNOWN = 1e-4
_HASHES_AT_ONCE = 1 << 20


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
    unknown = [
        f"corpus {name}: {percent(share, 2)} of its tokens are <unk>, text that the tokenizer does not know"
        for name, corpus in (*trained.items(), *held.items())
        if (share := corpus.ledger.unknown_fraction) > _FEW_UNKNOWN
    ]
    return [
        *idle_settings(config),
        *readings,
        *unknown,
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


def idle_settings(config: RunConfig) -> list[str]:
    """Return a line for every setting that comes to nothing in this run, or never to what it says."""
    train, every_steps = config.train, config.method.adept.every_steps
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
    if config.method.variant == "adept" and every_steps >= train.max_steps:
        lines.append(
            f"method.adept.every_steps {every_steps:,}: not less than train.max_steps {train.max_steps:,}, so that no "
            "rate is measured and every tensor has train.lr; lower it"
        )
    ends = [0, *(end for end, _ in config.corpus.mixture(train.max_steps))]
    return lines + [
        f"corpus.stages: the one until {stage.until:g} has none of train.max_steps {train.max_steps:,}: nothing is "
        "trained by its weights"
        for stage, (begin, end) in zip(config.corpus.stages, pairwise(ends), strict=False)
        if begin == end
    ]


def _shared(name: str, held_out: TokenisedCorpus, trained: dict[str, TokenisedCorpus]) -> list[str]:
    if held_out.hashes is None:
        return []
    hashes, documents = np.unique(held_out.hashes, return_counts=True)
    lines = []
    for source, corpus in trained.items():
        if corpus.hashes is None:
            continue
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
