"""New tokens that a text's script would profit from, offered by a first config."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from scale_cli.config.vocabulary import VocabularyConfig
from scale_cli.errors import BaseModelError, ConfigError
from scale_cli.starter.texts import Text
from scale_cli.vocabulary.savings import LEARNED_SHARE, LEAST_COUNT, estimate_savings
from scale_cli.vocabulary.tokenizer import most_added

# Tokens per character of the new text. From the first figure on, new tokens are offered; from the
# second on, the base spells the script in bytes, and they are part of the config. Between the two a
# base knows the text by its own tokens, and learns more by them (docs/results/real-base.md).
_OFFERED_FROM = 1.3
_TAKEN_FROM = 2.0
_FEWEST_NEW = 256  # fewer new tokens save little
_SURE = 0.8  # share of a sample's new tokens that the whole text gives too


@dataclass(frozen=True)
class NewTokens:
    """New tokens for a text's script, or why none are added."""

    words: str
    script: str = ""
    number: int = 0  # that the config has
    offered: int = 0  # that it has as a comment
    tokens_per_byte: float = 0.0  # with those that it has
    grown: Tokenizer | None = None  # about the tokenizer with those that it has


def own_tokens(text: Text) -> NewTokens:
    """Return that a text is read by the base's own tokens, and what it costs."""
    return NewTokens(f"{_cost(text):.2f} per character, {1 / text.tokens_per_byte:.2f} bytes each")


def _cost(text: Text) -> float:
    """Return how many tokens a character costs."""
    return text.tokens_per_byte * len(text.sample.encode()) / len(text.sample)


def offer_tokens(text: Text, tokenizer: PreTrainedTokenizerBase, first_id: int) -> NewTokens:
    """Find new tokens for a text whose characters cost many tokens."""
    num_bytes = len(text.sample.encode())
    cost = _cost(text)
    words = own_tokens(text).words
    if cost < _OFFERED_FROM:
        return NewTokens(words)
    wanted = VocabularyConfig()
    seen = min(1.0, LEARNED_SHARE * num_bytes / text.bytes_read)  # of what a run learns from
    try:
        found = estimate_savings(
            tokenizer,
            first_id,
            text.sample,
            most=round(wanted.new_tokens / _SURE),
            min_count=max(LEAST_COUNT, ceil(seen * wanted.min_count)),
        )
    except (BaseModelError, ConfigError) as error:
        return NewTokens(f"{words}; no new ones: {error}")
    if found is None:  # all of it is ASCII
        return NewTokens(words)
    number = min(wanted.new_tokens, most_added(first_id, int(_SURE * found.num_new)))
    if number < _FEWEST_NEW:
        few = f"the text yields only {found.num_new:,} of {found.script}"
        return NewTokens(f"{words}; no new ones: {few}")
    saved = 1 - found.bytes_per_token / found.bytes_per_token_with_new
    words += (
        f"; with {number:,} new ones of {found.script} about {found.bytes_per_token_with_new:.1f} "
        f"bytes each: {saved:.0%} fewer tokens for the same text"
    )
    if cost < _TAKEN_FROM:
        return NewTokens(words, found.script, offered=number)
    return NewTokens(
        words,
        found.script,
        number,
        tokens_per_byte=1 / found.bytes_per_token_with_new,
        grown=found.grown,
    )
