"""The section `method.vocabulary`: new tokens for a script.

A script is ranges of code points; `Script` also tells from UTF-8 bytes whether they begin its
letters.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import Field, field_validator

from scale_cli.values import Name, PathText, Section

# llama.cpp takes a model with this many tokens for CodeLlama or Granite, and changes how its text
# begins or ends.
TAKEN_FOR_OTHERS = (32_016, 49_152)
# The total number of tokens is a multiple of this: the vocabulary head is faster.
ROWS_MULTIPLE = 64
# Letters alone, by Unicode's blocks (adjacent blocks are one range), and the languages that are
# written in them, by ISO 639 code. Other languages have Latin letters, or are not known.
SCRIPTS = {
    "arabic": ("0600-06FF", "ar fa ps ur"),
    "armenian": ("0530-058F", "hy"),
    "bengali": ("0980-09FF", "bn"),
    "cyrillic": ("0400-052F", "be bg kk ky mk mn ru tg uk"),
    "devanagari": ("0900-097F", "hi mr ne"),
    "ethiopic": ("1200-137F", "am ti"),
    "georgian": ("10A0-10FF", "ka"),
    "greek": ("0370-03FF", "el"),
    "hangul": ("AC00-D7A3", "ko"),
    "hebrew": ("0590-05FF", "he yi"),
    "kana": ("3040-30FF", "ja"),
    "han": ("3400-4DBF,4E00-9FFF", "ja zh"),
    "khmer": ("1780-17FF", "km"),
    "lao": ("0E80-0EFF", "lo"),
    "myanmar": ("1000-109F", "my"),
    "sinhala": ("0D80-0DFF", "si"),
    "tamil": ("0B80-0BFF", "ta"),
    "telugu": ("0C00-0C7F", "te"),
    "thai": ("0E00-0E7F", "th"),
    "tibetan": ("0F00-0FFF", "bo"),
}
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
_LAST_CODE_POINT = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


@dataclass(frozen=True)
class Script:
    """Some ranges of code points, both ends included."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def named(cls, name: str) -> Script:
        """Return a script by its name, or by hexadecimal ranges such as `AC00-D7A3`, separated by
        commas.
        """
        span_form = re.compile("([0-9A-F]{2,6})-([0-9A-F]{2,6})", re.IGNORECASE)
        written, _ = SCRIPTS.get(name, (name, ""))
        spans = [span_form.fullmatch(span) for span in written.split(",")]
        if not all(spans):
            raise ValueError(
                f"{name!r} is neither a range such as AC00-D7A3 nor one of: {', '.join(SCRIPTS)}"
            )
        ranges = tuple((int(span[1], 16), int(span[2], 16)) for span in spans if span)
        for first, last in ranges:
            holds_surrogates = last >= _SURROGATES[0] and first <= _SURROGATES[1]
            if not 0x80 <= first <= last <= _LAST_CODE_POINT or holds_surrogates:
                raise ValueError(f"{first:X}-{last:X} is not a range of letters beyond ASCII")
        return cls(ranges)

    @classmethod
    def of_languages(cls, codes: Iterable[str]) -> Script:
        """Return the scripts of languages together; nothing of a language that has none here."""
        names = []
        for code in sorted(codes):
            names += [name for name, (_, taken) in SCRIPTS.items() if code in taken.split()]
            if code == "ko":
                names.append("1100-11FF")  # letters of syllables too
        return cls(tuple(span for name in names for span in cls.named(name).ranges))

    @property
    def characters(self) -> str:
        """The inside of a regular expression's character class."""
        return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in self.ranges)

    def holds(self, first: int, last: int) -> bool:
        """Return whether one range of the script holds all code points from `first` to `last`."""
        return any(begin <= first and last <= end for begin, end in self.ranges)

    def meets(self, other: Script) -> bool:
        """Return whether the two scripts share a code point."""
        return any(
            one <= last and first <= end for one, end in self.ranges for first, last in other.ranges
        )

    def alone_begins(self, text: bytes) -> bool:
        """Return whether bytes can only begin a run of the script's letters, after at most one
        space.

        If the last character is cut short, every way to complete it must give a letter of the
        script. UTF-8 has the order of the code points: so no character before the script's range,
        and none behind it, may begin with these bytes.
        """
        letters = text.removeprefix(b" ")
        if letters.isascii():  # most tokens of most bases; no script holds ASCII
            return False
        decoder = _Utf8Decoder()
        try:
            whole = decoder.decode(letters)
        except UnicodeDecodeError:  # these bytes begin no character
            return False
        cut, _ = decoder.getstate()
        if b"\xed\xa0" <= cut < b"\xee":  # a surrogate, which Python waits for
            return False
        if not all(self.holds(ord(letter), ord(letter)) for letter in whole):
            return False
        return not cut or any(
            _utf8(_around_surrogates(first - 1, 0xD7FF))[: len(cut)]
            < cut
            < _utf8(_around_surrogates(last + 1, 0xE000))[: len(cut)]
            for first, last in self.ranges
        )


def _utf8(code: int) -> bytes:
    """Return the UTF-8 of a code point; of one outside of Unicode, what stands in its place in the
    order.
    """
    if code > _LAST_CODE_POINT:
        return b"\xff"
    return chr(code).encode()


def _around_surrogates(code: int, otherwise: int) -> int:
    """Return a code point, or another one in place of a surrogate, which has no UTF-8."""
    return otherwise if 0xD800 <= code <= 0xDFFF else code


class VocabularyConfig(Section):
    """New tokens for a script that the base's tokenizer splits into bytes; no old token changes."""

    new_tokens: int = Field(
        default=4096,
        ge=1,
        le=2**18,
        description="how many; rounded up to a vocabulary that is a multiple of 64",
    )
    script: str = Field(
        default="hangul",
        description="script of their letters: a name, or ranges of code points such as AC00-D7A3",
    )
    sources: list[Name] = Field(
        default=[],
        description="names of the corpus.sources to learn them from; []: all with the role new",
    )
    min_count: int = Field(
        default=50, ge=1, le=10**9, description="a rarer string in those becomes no token"
    )
    folder: PathText | None = Field(
        default=None,
        description="tokenizer that already has them, after the base's ids; null: they are learned",
    )

    @field_validator("script")
    @classmethod
    def _known(cls, name: str) -> str:
        Script.named(name)
        return name
