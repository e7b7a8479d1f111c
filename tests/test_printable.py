from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from scale_cli.printable import printable, without_passwords


@given(st.text(st.characters()))
def test_no_control_character_is_printed_and_nothing_else_is_changed(text: str) -> None:
    shown = printable(text)
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t"]
    shown.encode()
    if not [c for c in text if unicodedata.category(c) in ("Cc", "Cs")]:
        assert shown == text


def test_what_stands_before_the_host_of_a_url_is_left_out() -> None:
    assert without_passwords("a https://user:pass@host/x b") == "a https://***@host/x b"
    assert without_passwords("https://host/x a@b") == "https://host/x a@b"
