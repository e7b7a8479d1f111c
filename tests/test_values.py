from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from scale_cli.values import Folder, PathText, counted

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
