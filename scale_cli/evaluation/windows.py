"""Documents as windows of a model's context: one, or for a longer document several that overlap by
half.

So no token is predicted from less than half of the context, unless its document is that short.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from scale_cli.data.encoding import Ids, Integers


@dataclass(frozen=True)
class ScoredWindow:
    """Tokens that a model reads at once, of which the last ones are scored."""

    ids: Integers  # (inputs + 1,) the inputs, and the token after the last one
    num_scored: int  # at the end


def context_windows(ids: Ids, context: int, boundary: int | None) -> list[ScoredWindow]:
    """Cut a document, (tokens,), into windows that score each token but the first once.

    Args:
        ids: the document, after the boundary that it begins with.
        context: the most inputs of a window.
        boundary: the token that every window begins with; None: the base has none.
    """
    document = ids.astype(np.int64)
    begins = np.array([] if boundary is None else [boundary], np.int64)
    done = min(context, len(document) - 1)
    windows = [ScoredWindow(document[: done + 1], done)]
    while done < len(document) - 1:
        end = min(done + context // 2, len(document) - 1)
        first = end - context + len(begins)
        window = np.concatenate([begins, document[first : end + 1]])
        windows.append(ScoredWindow(window, end - done))
        done = end
    return windows


def num_read(num_scored: int, context: int) -> int:
    """Return how many inputs the windows of a document have together."""
    if num_scored <= context:
        return num_scored
    return context * (1 + math.ceil((num_scored - context) / (context // 2)))
