from __future__ import annotations

import pytest

from scale_cli.vocabulary import proofs


@pytest.fixture
def few_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a proof look at the characters about Hangul alone: all of them take seconds."""
    monkeypatch.setattr(proofs, "_CODE_POINTS", [*range(0x500), *range(0x1100, 0x1200), *range(0xA900, 0xD900)])
    monkeypatch.setattr(proofs, "_NUM_RANDOM", 2_000)
