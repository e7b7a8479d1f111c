"""Types of config sections and values: names, fractions, bounded counts, paths; values in words."""

from __future__ import annotations

import os
import re
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
)


class Section(BaseModel):
    """Base of every section: unknown keys are errors, and values do not change after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )


class Change(Enum):
    """Marks a key that may change between two verbs of one run; an unmarked key never may.

    A mark has no effect in a section that is in a list (such as a source) or may be null
    (`schema._marked`).
    """

    FREE = "a cadence, a place, or how work is cut up: what is written, when and by whom, not what is computed"
    ACCEPTED = "how it is trained from here on, where a run that goes on is told so"


Value = TypeVar("Value")
Free = Annotated[Value, Change.FREE]
Accepted = Annotated[Value, Change.ACCEPTED]

# Country codes that users give for languages. A code that also is a language's (kr: Kanuri) has a
# three-letter form.
_COUNTRIES = {
    "kr": "ko",
    "jp": "ja",
    "cn": "zh",
    "tw": "zh",
    "vn": "vi",
    "ua": "uk",
    "cz": "cs",
    "gr": "el",
}


@cache
def _languages() -> dict[str, tuple[set[str], str]]:
    """Return the three-letter forms and the English name of every language with a two-letter code."""
    rows = Path(__file__).with_name("languages.txt").read_text(encoding="utf-8").splitlines()
    parts = (row.split(" ", 2) for row in rows)
    return {code: (set(long.split("/")), name) for code, long, name in parts}


def check_language(code: object) -> object:
    """Return a language code; ValueError if it is not one, with the code to give instead.

    Of three letters any is taken that has no form of two: there are 8,000.
    """
    if isinstance(code, bool):
        raise ValueError(
            'YAML reads an unquoted `no` or `on` as a truth value; write it in quotes: "no"'
        )
    if not isinstance(code, str):
        return code
    if code in _COUNTRIES:
        raise ValueError(
            f"{code} is a country code; the language code is {_COUNTRIES[code]} (ISO 639)"
        )
    known = _languages()
    is_long = re.fullmatch("[a-z]{3}", code) is not None
    said = re.split("[-_]", code.lower())[0]  # ko-KR
    meant = [
        short
        for short, (long, name) in known.items()
        if said in (short, name.lower(), *long) and short not in _COUNTRIES
    ]
    if code in meant or (is_long and not meant):
        return code
    such = f"write {meant[0]}" if meant else "give the language's code, such as ko"
    raise ValueError(f"{code!r} is not an ISO 639 code{' of two letters' * is_long}; {such}")


def language_name(code: str) -> str:
    """Return a language's English name, or its code."""
    return _languages()[code][1] if code in _languages() else code


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: 1 document, 2,000 documents."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


Language = Annotated[
    str,
    Field(pattern=r"^[a-z]{2,3}$", description="ISO 639 code: en, ko, ..."),
    BeforeValidator(check_language),
]
Name = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="used in results and file names"
    ),
]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
# YAML 1.1 reads a bare `no` as false.
MixedPrecision = Annotated[
    Literal["auto", "no", "bf16", "fp16"],
    BeforeValidator(lambda value: "no" if value is False else value),
]
# Limits far beyond any run, yet low enough that sizes, times and files computed from them stay
# finite.
Steps = Annotated[int, Field(ge=1, le=10_000_000)]
Length = Annotated[int, Field(ge=2, le=2**24)]
BatchSize = Annotated[int, Field(ge=1, le=2**20)]
Documents = Annotated[int, Field(ge=1, le=10**12)]
# A number by its own type alone, so that an error names one thing to write, not two.
LearningRate = Annotated[
    Annotated[float, Field(gt=0.0, le=100.0), Tag("float")]
    | Annotated[Literal["auto"], Tag("auto")],
    Discriminator(lambda value: "auto" if value == "auto" else "float"),
]

STORES = ("hf", "s3", "gs", "az", "https")
_LONGEST_PATH_BYTES = 4000
_LONGEST_NAME_BYTES = 255


def local_path(written: str) -> str:
    """Return a path with `~` expanded: no shell does this for a config.

    ValueError if it is a URL (not quoted, since it may hold a password), or a path that no file
    system could hold.
    """
    if "://" in written:
        raise ValueError("is a URL; give a local path, or a hub id if this key takes one")
    path = os.path.expanduser(written)  # noqa: PTH111 (a pattern is no Path, and an unknown user no exception)
    if path.startswith("~"):
        raise ValueError(
            f"{path.partition('/')[0]} is not the home folder of any user; write out the path"
        )
    parts = [os.fsencode(part) for part in path.split("/")]
    if (
        sum(map(len, parts)) + len(parts) > _LONGEST_PATH_BYTES
        or max(map(len, parts)) > _LONGEST_NAME_BYTES
    ):
        raise ValueError(f"is too long for a path ({len(path):,} characters)")
    return path


def source_pattern(written: str) -> str:
    """Return the place of text: a path as `local_path` does, or the URL of a store."""
    if not written:
        raise ValueError("is empty")
    scheme, parted, place = written.partition("://")
    if not parted:
        return local_path(written)
    if scheme not in STORES:
        raise ValueError(f"is a URL of an unknown store (known: {', '.join(STORES)})")
    if "@" in place.partition("/")[0] or "::" in written:
        raise ValueError(
            "is a URL with a user name or a chain (::); "
            "put credentials into the store's own settings"
        )
    return written


def _source_patterns(written: str | list[str]) -> str | list[str]:
    if isinstance(written, str):
        return source_pattern(written)
    if not written:
        raise ValueError("is an empty list")
    return [source_pattern(one) for one in written]


def _folder(written: object) -> object:
    if isinstance(written, str | Path) and not str(written):
        raise ValueError("is empty")
    return local_path(str(written)) if isinstance(written, str | Path) else written


PathText = Annotated[str, Field(min_length=1), AfterValidator(local_path)]
# The type is checked before the content, so that an error is one line, not one per alternative.
SourcePatterns = Annotated[str | list[str], AfterValidator(_source_patterns)]
Folder = Annotated[Path, Field(strict=False), BeforeValidator(_folder)]
