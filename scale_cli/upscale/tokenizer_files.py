"""Where a model's tokenizer comes from, and what is missing there when it cannot be loaded."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec

from transformers.utils.hub import cached_file

# Any of these is the beginning of a tokenizer; the first alone needs nothing else.
_WHOLE, _SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
_OTHERS = ("vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json")


@dataclass(frozen=True)
class TokenizerPlace:
    """Where a tokenizer lies."""

    key: str  # of the config, that says so
    name: str  # hub id or folder
    revision: str | None  # on the hub

    def problem(self) -> str | None:
        """Return what keeps any tokenizer from being loaded from there; None where it is nothing that is known."""
        if self._has(_WHOLE):
            return None
        if self._has(_SENTENCEPIECE):
            needed = "it is a SentencePiece model (tokenizer.model), and the package sentencepiece is not installed"
            return None if find_spec("sentencepiece") else needed
        if any(self._has(name) for name in _OTHERS):
            return None
        return "there is none (no tokenizer.json, no tokenizer.model); say in model.tokenizer where it is"

    def _has(self, file: str) -> bool:
        with suppress(OSError, ValueError):  # no such folder or repository
            return bool(cached_file(self.name, file, revision=self.revision))
        return False
