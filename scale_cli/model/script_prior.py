"""The base head's weight at the start of a prompt, by the script of the user's words.

A short prompt carries little evidence, but its letters tell a language that has a script of its
own. Every engine takes the prior from here. The bound of the posterior rule (`routing.py`) is then
-ln of the smallest prior.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PriorByScript:
    """The base head's first weight, as a function of what the user wrote."""

    otherwise: float  # where the script does not tell
    in_script: float | None = None  # where it is the new language's; None: it never tells
    ranges: Sequence[Sequence[int]] = ()  # the script's code points: first and last of each range

    @classmethod
    def of_export(cls, router: Mapping[str, Any]) -> PriorByScript:
        """Return the prior of a plain export, from `scale_router` in its config.json."""
        return cls(router["prior"], router.get("script_prior"), router.get("script", ()))

    def of_router(self) -> dict[str, Any]:
        """Return the keys of `scale_router` that `of_export` reads."""
        if self.in_script is None or not self.ranges:
            return {"prior": self.otherwise}
        return {"prior": self.otherwise, "script_prior": self.in_script, "script": self.ranges}

    def __call__(self, words: str) -> float:
        share = share_of_letters(self.ranges, words)
        if self.in_script is None or not self.ranges or share is None or 0.0 < share < 0.5:
            return self.otherwise
        return self.in_script if share else 1.0 - self.in_script


def share_of_letters(ranges: Sequence[Sequence[int]], words: str) -> float | None:
    """Return the share of a script's letters, by its ranges, in all letters; None if there are none.

    The text is put together first (NFKC), so that a letter counts the same however it is written.
    """
    letters = [ord(c) for c in unicodedata.normalize("NFKC", words) if c.isalpha()]
    if not letters:
        return None
    of_script = sum(any(first <= letter <= last for first, last in ranges) for letter in letters)
    return of_script / len(letters)


EVEN = PriorByScript(0.5)
