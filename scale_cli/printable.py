"""Text that others wrote (config values, file names, documents, what a model says), made safe to print."""

from __future__ import annotations

import re

_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_PASSWORD = re.compile(r"://[^/@\s]*@")


def printable(text: str) -> str:
    """Return a text with its control characters spelled out: a terminal would obey them."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def without_passwords(text: str) -> str:
    """Return a text without what stands before the host of a URL."""
    return _PASSWORD.sub("://***@", text)
