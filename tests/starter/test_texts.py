"""What `scale init` says of a text before anything is trained on it."""

import pytest

from scale_cli.starter.texts import Text, warnings_of

KOREAN = "대한민국의 수도는 서울이다. "
ENGLISH = "The capital of Korea is Seoul. "
JAPANESE = "日本の首都は東京です。"


def text_of(sample: str, language: str) -> Text:
    return Text(
        flag="--corpus",
        source={"language": language},
        documents=[sample],
        is_whole=True,
        bytes_read=len(sample.encode()),
        num_bytes=len(sample.encode()),
        sample=sample,
        tokens_per_byte=0.5,
    )


@pytest.mark.parametrize(
    ("sample", "language", "said"),
    [
        (KOREAN, "ko", []),
        (ENGLISH, "en", []),
        (ENGLISH, "fi", []),
        (JAPANESE, "ja", []),
        (KOREAN + ENGLISH, "ko", ["its language is ko, but 67 % of its letters are others"]),
        (6 * KOREAN + ENGLISH, "ko", []),
        ("123 ...", "ko", []),
        (KOREAN, "de", ["its language is de, but 100 % of its letters are hangul, as in ko"]),
        (ENGLISH, "ko", ["its language is ko, but 100 % of its letters are others"]),
    ],
)
def test_letters_that_a_language_is_not_written_in_are_a_warning(
    sample: str, language: str, said: list[str]
) -> None:
    found = list(warnings_of(text_of(sample, language)))
    assert found == [f"--corpus: {line}" for line in said]
