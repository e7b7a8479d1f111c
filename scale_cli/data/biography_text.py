"""Words and sentence templates of the synthetic biographies (biography_text.yaml); a word is (English, Korean)."""

from importlib.resources import files
from itertools import product
from typing import Any

import yaml

_TEXT: dict[str, Any] = yaml.safe_load(files(__package__).joinpath("biography_text.yaml").read_text(encoding="utf-8"))


def _pairs(words: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(words.items())


def _institutions(kinds: list[dict[str, dict[str, str]]]) -> tuple[tuple[str, str], ...]:
    """Follow each name with the kind of institution that it is."""
    return tuple(
        (f"{english} {english_kind}", f"{korean} {korean_kind}")
        for kind in kinds
        for english_kind, korean_kind in kind["kind"].items()
        for english, korean in kind["names"].items()
    )


FEMININE_NAMES, MASCULINE_NAMES = _pairs(_TEXT["feminine_names"]), _pairs(_TEXT["masculine_names"])
MIDDLE_NAMES = _pairs(_TEXT["middle_names"])
LAST_NAMES = tuple(
    (english_stem + english_ending, korean_stem + korean_ending)
    for (english_stem, korean_stem), (english_ending, korean_ending) in product(
        _pairs(_TEXT["last_name_stems"]), _pairs(_TEXT["last_name_endings"])
    )
)
CITIES, MAJORS = _pairs(_TEXT["cities"]), _pairs(_TEXT["majors"])
UNIVERSITIES, EMPLOYERS = _institutions(_TEXT["universities"]), _institutions(_TEXT["employers"])
ENGLISH_TEMPLATES: dict[str, list[str]] = _TEXT["english_templates"]
KOREAN_TEMPLATES: dict[str, list[str]] = _TEXT["korean_templates"]
ENGLISH_QUESTIONS: dict[str, str] = _TEXT["english_questions"]
KOREAN_QUESTIONS: dict[str, str] = _TEXT["korean_questions"]
