from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from scale_cli.values import Folder, Language, PathText, counted, language_name

TEXT, FOLDER = TypeAdapter(PathText), TypeAdapter(Folder)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("~/x", "/home/of/mine/x"),
        ("~", "/home/of/mine"),
        ("a/~/b", "a/~/b"),
        ("a~", "a~"),
        ("../한국어/*.txt", "../한국어/*.txt"),
    ],
)
def test_a_path_is_what_a_shell_would_make_of_it(
    monkeypatch: pytest.MonkeyPatch, written: str, meant: str
) -> None:
    monkeypatch.setenv("HOME", "/home/of/mine")
    assert TEXT.validate_python(written) == meant
    assert FOLDER.validate_python(written) == Path(meant)
    assert FOLDER.validate_python(Path(written)) == Path(meant)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("", "is empty|at least 1 character"),
        ("~nobody-of-this-name/x", "~nobody-of-this-name is not the home folder of any user"),
        ("https://user:hunter2@host/x", "is a URL"),
        ("file:///etc/passwd", "is a URL"),
        ("a" * 256, "is too long for a path"),
        ("한" * 86, "is too long for a path"),
        ("a/" * 2001, "is too long for a path"),
    ],
)
def test_what_can_be_no_path_is_refused_without_being_repeated(written: str, told: str) -> None:
    for kind in (TEXT, FOLDER):
        with pytest.raises(ValidationError, match=told) as caught:
            kind.validate_python(written)
        messages = [detail["msg"] for detail in caught.value.errors()]
        assert not any("hunter2" in message for message in messages)


def test_a_counted_noun_agrees_with_its_number() -> None:
    assert [counted(number, "step") for number in (0, 1, 2000)] == [
        "0 steps",
        "1 step",
        "2,000 steps",
    ]
    assert counted(2, "process", "processes") == "2 processes"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("zz", "'zz' is not an ISO 639 code; give the language's code, such as ko"),
        ("korean", "'korean' is not an ISO 639 code; write ko"),
        ("ko-KR", "'ko-KR' is not an ISO 639 code; write ko"),
        ("KO", "'KO' is not an ISO 639 code; write ko"),
        ("kor", "'kor' is not an ISO 639 code of two letters; write ko"),
        ("ger", "'ger' is not an ISO 639 code of two letters; write de"),
        ("jp", "jp is a country code; the language code is ja"),
        ("k", "'k' is not an ISO 639 code"),
        ("", "'' is not an ISO 639 code"),
        ("\ud7fc", r"'\\ud7fc' is not an ISO 639 code"),
    ],
)
def test_a_language_that_is_no_code_is_refused_with_the_code_to_write(
    given: str, told: str
) -> None:
    with pytest.raises(ValidationError, match=told):
        TypeAdapter(Language).validate_python(given)


@pytest.mark.parametrize("given", ["ko", "no", "kau", "yue"])
def test_a_code_of_two_letters_or_of_a_language_that_has_none_is_taken(given: str) -> None:
    assert TypeAdapter(Language).validate_python(given) == given


def test_a_report_has_the_english_name_of_every_language_with_a_short_code() -> None:
    assert [language_name(code) for code in ("el", "cy", "yue")] == ["Greek", "Welsh", "yue"]
