"""New tokens that a text's script would profit from, offered by a first config."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import ceil

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from scale_cli.config.vocabulary import SCRIPTS, Script, VocabularyConfig
from scale_cli.errors import BaseModelError
from scale_cli.starter.texts import Text
from scale_cli.vocabulary.growing import Spelling, extended
from scale_cli.vocabulary.learning import count_words, learn
from scale_cli.vocabulary.tokenizer import most_added

# Tokens per character of the new text. From the first figure on, new tokens are offered. From the
# second on, the base spells the script in bytes; then they are part of the config, unless the base may
# know the text by its own tokens, by which it learns more (docs/results/real-base.md).
_OFFERED_FROM = 1.3
_TAKEN_FROM = 2.0
_FEWEST_NEW = 256  # fewer new tokens save little
_SURE = 0.8  # share of a sample's new tokens that the whole text gives too
_LEARNED_SHARE = 0.8  # of a sample; what the tokens save is counted on the rest
_LEAST_COUNT = 3  # a token that is rarer in a sample may be a chance


@dataclass(frozen=True)
class TokenOffer:
    """New tokens for a text's script, or why none are added."""

    words: str
    tokens_per_byte: float  # of the text, with the tokens that the config adds
    script: str = ""
    number: int = 0  # that the config adds
    offered: int = 0  # that it has as a comment
    grown: Tokenizer | None = None  # about the tokenizer with those that it adds


def own_tokens(text: Text) -> TokenOffer:
    """Return that a text is read by the base's own tokens, and what it costs."""
    words = f"{_cost(text):.2f} per character, {1 / text.tokens_per_byte:.2f} bytes each"
    return TokenOffer(words, text.tokens_per_byte)


def _cost(text: Text) -> float:
    """Return the tokens per character of a text."""
    return text.tokens_per_byte * len(text.sample.encode()) / len(text.sample)


def offer_tokens(
    text: Text, tokenizer: PreTrainedTokenizerBase, first_id: int, *, is_unknown: bool
) -> TokenOffer:
    """Find new tokens for a text whose characters cost many tokens.

    They are learned from the beginning of its sample, and what they save is counted on the rest.
    Only a text that is unknown to the base gets them; any other has them as a comment.
    """
    cost = _cost(text)
    own = own_tokens(text)
    name = most_frequent_script(text.sample)
    if cost < _OFFERED_FROM or name is None:
        return own
    backend = tokenizer.backend_tokenizer
    script = Script.named(name)
    try:
        spelling = Spelling.of(backend, tokenizer.name_or_path)
        spelling.check(script, backend, tokenizer.name_or_path)
    except BaseModelError as error:
        return replace(own, words=f"{own.words}; no new ones: {error}")

    wanted = VocabularyConfig()
    cut = int(_LEARNED_SHARE * len(text.sample))
    seen = min(1.0, len(text.sample[:cut].encode()) / text.bytes_read)  # of what a run learns from
    new = learn(
        count_words(text.sample[:cut], backend, script),
        backend,
        spelling,
        script,
        most=round(wanted.new_tokens / _SURE),
        min_count=max(_LEAST_COUNT, ceil(seen * wanted.min_count)),
    )
    number = min(wanted.new_tokens, most_added(first_id, int(_SURE * len(new))))
    if number < _FEWEST_NEW:
        words = f"{own.words}; no new ones: the text yields only {len(new):,} of {name}"
        return replace(own, words=words)

    grown = extended(backend, new, first_id)
    rest = text.sample[cut:]
    before, after = (len(of.encode(rest, add_special_tokens=False).ids) for of in (backend, grown))
    num_bytes = len(rest.encode())
    words = (
        f"{own.words}; with {number:,} new ones of {name} about {num_bytes / after:.1f} bytes each: "
        f"{1 - after / before:.0%} fewer tokens for the same text"
    )
    if cost < _TAKEN_FROM or not is_unknown:
        return replace(own, words=words, script=name, offered=number)
    return TokenOffer(words, after / num_bytes, name, number, grown=grown)


def most_frequent_script(text: str) -> str | None:
    """Return the script beyond ASCII with the most letters in a text; None if there is no such
    letter.
    """
    counts = Counter(text)
    letters = {
        name: sum(
            counts[chr(code)]
            for first, last in Script.named(name).ranges
            for code in range(first, last + 1)
        )
        for name in SCRIPTS
    }
    script = max(letters, key=letters.__getitem__)
    return script if letters[script] else None
