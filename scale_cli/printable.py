"""Text that others wrote (file names, documents, what a model says), made safe to print."""

from __future__ import annotations

import re

_NOT_PRINTED = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """Return a text with its control characters spelled out: a terminal would obey them."""
    return _NOT_PRINTED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
