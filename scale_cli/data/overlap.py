"""Documents of held-out text that are trained on too, by the hashes of their texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scale_cli.config.sources import CorpusSource
from scale_cli.report import percent
from scale_cli.values import counted

if TYPE_CHECKING:
    # It imports transformers, which a finished report does not need.
    from scale_cli.data.tokens import TokenisedCorpus

_HASHES_AT_ONCE = 1 << 20
_LEAST_SHARED = 0.01  # of a held-out text; less is headings that many documents have


@dataclass(frozen=True)
class SharedText:
    """Documents of a held-out text that a source has too, which is trained on."""

    source: str
    role: str  # of the source: new | replay
    num_shared: int
    num_documents: int  # of the held-out text
    share: float  # of its text

    def __str__(self) -> str:
        trained = "replay" if self.role == "replay" else "trained on"
        return (
            f"{self.num_shared:,} of its {counted(self.num_documents, 'document')} "
            f"({percent(self.share)} of its text) {'is' if self.num_shared == 1 else 'are'} in "
            f"{self.source}, which is {trained}"
        )


def shared_texts(
    held_out: TokenisedCorpus, trained_on: Sequence[tuple[CorpusSource, TokenisedCorpus]]
) -> Iterator[SharedText]:
    """Yield what each source that is trained on shares with a held-out text."""
    for source, corpus in trained_on:
        if not source.weight:
            continue
        found = np.zeros(len(held_out), np.bool_)  # white space does not count
        for start in range(0, len(corpus), _HASHES_AT_ONCE):  # there may be very many
            found |= np.isin(held_out.hashes, corpus.hashes[start : start + _HASHES_AT_ONCE])
        share = float(held_out.num_bytes[found].sum() / held_out.num_bytes.sum())
        if share >= _LEAST_SHARED:
            yield SharedText(source.name, source.role, int(found.sum()), len(held_out), share)
