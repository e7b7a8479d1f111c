from hypothesis import given
from hypothesis import strategies as st

from scripts.three_answers import MODELS, Answers, draw, wrap


@given(st.text(alphabet="ab 가나", max_size=300))
def test_a_card_keeps_the_beginning_of_the_text_within_its_width(text: str) -> None:
    lines = wrap(text)
    assert len(lines) <= 6
    assert all(sum(1 + (letter in "가나") for letter in line) <= 36 for line in lines)
    kept = "".join(lines).replace("…", "").replace(" ", "")
    assert text.replace(" ", "").startswith(kept)


def test_what_a_model_says_is_text_in_the_picture() -> None:
    answers = Answers("<b>&", {model: f"<script>{model}" for model in MODELS})
    picture = draw([answers])
    assert "&lt;b&gt;&amp;" in picture and "<script>" not in picture
