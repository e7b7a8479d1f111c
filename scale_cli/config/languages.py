"""What languages are called where people read of them."""

from __future__ import annotations

_LANGUAGES = {"en": "English", "ko": "Korean", "de": "German", "fr": "French", "ja": "Japanese", "zh": "Chinese"}


def language_name(code: str) -> str:
    """Return a language's English name, or its code."""
    return _LANGUAGES.get(code, code)
