"""Texts that show a tokenizer's treatment of everything outside a script: all characters, and
random strings.
"""

import functools
import random
import unicodedata
from collections.abc import Iterator

from tokenizers import Tokenizer

from scale_cli.config.vocabulary import Script

_NO_CHARACTERS = ("Cn", "Cs")  # of Unicode's categories: not assigned, and surrogates
_NUM_STRINGS = 4_000
_LONGEST = 24


@functools.cache
def characters_outside(script: Script) -> list[str]:
    characters = (chr(code) for code in range(0x110000) if not script.holds(code, code))
    return [char for char in characters if unicodedata.category(char) not in _NO_CHARACTERS]


def random_strings(tokenizer: Tokenizer, characters: list[str], seed: int) -> Iterator[str]:
    """Yield strings of ASCII, white space, the `characters`, and the texts of special tokens."""
    draw = random.Random(seed)
    common = [chr(code) for code in range(0x20, 0x7F)] + list(" \n\t\r\u00a0") * 5
    basic = [char for char in characters if ord(char) < 0x10000]
    special = [added.content for added in tokenizer.get_added_tokens_decoder().values()] or [" "]
    for _ in range(_NUM_STRINGS):
        kinds = draw.choices(
            (common, basic, characters, special), (6, 4, 1, 0.2), k=draw.randint(1, _LONGEST)
        )
        yield "".join(map(draw.choice, kinds))
