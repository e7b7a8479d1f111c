"""How many tokens the texts of a plan are before and after its new tokens, by their beginnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from scale_cli.upscale.run import Run
from scale_cli.vocabulary.tokenizer import num_added, read_texts

_BYTES_COUNTED, _BYTES_LEARNED = 1 << 20, 1 << 24  # of every source


@dataclass(frozen=True)
class SourceGrowth:
    """The beginning of a training source, in old tokens and in new ones."""

    name: str
    num_bytes: int
    num_tokens_before: int
    num_tokens_after: int


@dataclass(frozen=True)
class Growth:
    """What new tokens do to a run."""

    num_new: int
    vocab_size: int  # with them
    is_learned: bool  # else they are what the beginnings of the sources give
    sources: Sequence[SourceGrowth]
    tokens_without: float  # that the text of a token of the run is without them


def growth_of(run: Run) -> Growth:
    config, extension = run.config, run.extension
    assert extension is not None
    known: Any = run.known_tokenizer()
    after: Tokenizer = extension.sketched(_BYTES_LEARNED) if known is None else known.backend_tokenizer
    sources, tokens_without = [], 0.0
    for source, share in zip(config.corpus.sources, config.corpus.shares(config.train.max_steps), strict=True):
        texts = list(read_texts([source], config.corpus, _BYTES_COUNTED))
        num_before, num_after = (
            sum(len(encoded.ids) for encoded in tokenizer.encode_batch(texts, add_special_tokens=False))
            for tokenizer in (run.base_tokenizer.backend_tokenizer, after)
        )
        sources.append(SourceGrowth(source.name, sum(len(text.encode()) for text in texts), num_before, num_after))
        tokens_without += share * num_before / max(num_after, 1)
    first_id = extension.first_id
    num_new = num_added(first_id, extension.vocabulary) if known is None else len(known) - first_id
    return Growth(num_new, first_id + num_new, known is not None, sources, tokens_without)
