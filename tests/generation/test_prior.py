"""The base head's weight at the start: by the script of what the user wrote."""

import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scale_cli.config.vocabulary import SCRIPTS, Script
from scale_cli.model.script_prior import PriorByScript, share_of_letters
from tests.small_runs import SMALLEST, load_text

HANGUL = Script.of_languages(["ko"])
PRIOR = PriorByScript(0.5, 0.02, HANGUL.ranges)
SYLLABLES = st.text(st.characters(min_codepoint=0xAC00, max_codepoint=0xD7A3), max_size=20)
LATIN = st.text("abcdefghijklmnopqrstuvwxyzé", max_size=20)
OTHERS = st.text(st.characters(categories=("N", "P", "S", "Z")), max_size=20)


@given(SYLLABLES, LATIN, OTHERS, st.randoms())
def test_only_letters_count_in_any_order_and_any_normal_form(
    syllables: str, latin: str, others: str, random: Any
) -> None:
    others = "".join(
        c for c in others if not any(map(str.isalpha, unicodedata.normalize("NFKC", c)))
    )
    written = [*syllables, *latin, *others]
    random.shuffle(written)
    total = len(syllables) + len(latin)
    expected = len(syllables) / total if total else None
    for form in ("NFC", "NFD"):
        share = share_of_letters(PRIOR.ranges, unicodedata.normalize(form, "".join(written)))
        assert share == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("한국의 수도는 어디입니까?", 0.02),
        (unicodedata.normalize("NFD", "한국의 수도는?"), 0.02),
        ("ㅋㅋㅋ", 0.02),
        ("Python으로 정렬하는 방법은?", 0.02),  # half and more of the letters
        ("What does 안녕 mean?", 0.5),
        ("What is the capital of Korea?", 0.98),
        ("日本の首都は", 0.98),
        ("2 + 2 = 4", 0.5),
        ("", 0.5),
    ],
)
def test_a_prompt_in_the_script_goes_to_the_trained_head_and_one_without_it_to_the_base(
    words: str, expected: float
) -> None:
    assert PRIOR(words) == expected
    assert PriorByScript(0.3, None, HANGUL.ranges)(words) == 0.3


def script(*languages: str, replay: str = "en", tokens: str | None = None) -> Script | None:
    new = [f"{{name: {code}, language: {code}, path: x.txt}}" for code in languages]
    known = f"{{name: known, language: {replay}, path: x.txt, role: replay}}"
    overrides = [f"corpus.sources=[{', '.join([*new, known])}]"]
    if tokens is not None:
        overrides += ["method.variant=route", f"method.vocabulary.script={tokens}"]
    return load_text(SMALLEST, *overrides).new_script


def test_the_script_is_that_of_the_new_languages_and_tokens() -> None:
    assert script("ko") == HANGUL
    assert script("ja") == Script(Script.named("kana").ranges + Script.named("han").ranges)
    assert script("de") is None and script("ko", "de") is None
    assert script("uk", replay="ru") is None  # the base's language has the same letters
    kept = "evaluation.perplexity=[{name: held, language: zh, path: x.txt, role: retention}]"
    new = "corpus.sources=[{name: new, language: ja, path: x.txt}]"
    assert load_text(SMALLEST, new, kept).new_script is None  # so has what is measured to be kept
    assert script("de", tokens="greek") == Script.named("greek")
    both = script("ko", tokens="hangul")
    assert both is not None and share_of_letters(both.ranges, "ㅋ한") == 1.0


def test_every_script_in_the_table_has_ranges() -> None:
    assert all(Script.named(name).ranges for name in SCRIPTS)
