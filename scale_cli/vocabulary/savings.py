"""What new tokens would save, estimated from a sample of a text in a second or two."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from scale_cli.config.vocabulary import SCRIPTS, Script
from scale_cli.vocabulary.added_tokens import Spelling, count_words, extended, learn

LEARNED_SHARE = 0.8  # of the sample; what the tokens save is measured on the rest
LEAST_COUNT = 3  # a token that is rarer in a sample may be a chance


@dataclass(frozen=True)
class Savings:
    """A sample's size in a base's tokens, and in new ones too."""

    script: str  # the most frequent one beyond ASCII
    num_new: int  # tokens that the sample gives
    bytes_per_token: float
    bytes_per_token_with_new: float  # of text that the new tokens were not learned on
    grown: Tokenizer  # the base's, with the new tokens


def estimate_savings(
    tokenizer: PreTrainedTokenizerBase,
    first_id: int,
    sample: str,
    *,
    most: int,
    min_count: int = LEAST_COUNT,
) -> Savings | None:
    """Estimate what new tokens for a text's script would save.

    Args:
        tokenizer: the base's.
        first_id: rows of the base's embedding.
        sample: a megabyte of the text tells the saving to a few percent.
        most: new tokens at the most.
        min_count: a token that occurs less often in what is learned from, four fifths of the
            sample, is left out.

    Returns:
        The estimate; None if the sample has no letter of a known script.

    Raises:
        BaseModelError: the tokenizer cannot take new tokens.
    """
    name = most_frequent_script(sample)
    if name is None:
        return None
    backend = tokenizer.backend_tokenizer
    script = Script.named(name)
    spelling = Spelling.of(backend, tokenizer.name_or_path)
    spelling.check(script, backend, tokenizer.name_or_path)

    cut = int(LEARNED_SHARE * len(sample))
    words = count_words(sample[:cut], backend, script)
    new = learn(words, backend, spelling, script, most=most, min_count=min_count)
    held_out = sample[cut:]
    grown = extended(backend, new, first_id)
    num_before, num_after = (
        len(of.encode(held_out, add_special_tokens=False).ids) for of in (backend, grown)
    )
    num_bytes = len(held_out.encode())
    return Savings(
        script=name,
        num_new=len(new),
        bytes_per_token=num_bytes / num_before,
        bytes_per_token_with_new=num_bytes / num_after,
        grown=grown,
    )


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
