"""Text is text, whatever it spells: no kind of tokenizer gives a mark to it."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scale_cli.data.conversations import conversation_ids
from scale_cli.data.encoding import Encoder
from tests.vocabulary.tokenizers_at_hand import BYTES, KINDS, LETTERS, MARKS, unigram


def _splitting_words(model: models.Model, *marks: str) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([*marks])
    return tokenizer


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}


def word_piece() -> Tokenizer:
    pieces = ["[UNK]", "[SEP]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    model = models.WordPiece(_numbered(pieces), unk_token="[UNK]")
    return _splitting_words(model, "[UNK]", "[SEP]")


def words() -> Tokenizer:
    tokens = ["<unk>", "</s>", "a", "<", "/s>"]
    return _splitting_words(models.WordLevel(_numbered(tokens), unk_token="<unk>"), "</s>")


def whole_words_first() -> Tokenizer:
    """BPE that looks every word up before it merges, with a mark among its words."""
    vocabulary = _numbered([*LETTERS, "</s>"])
    return _splitting_words(models.BPE(vocabulary, [], ignore_merges=True), "</s>")


def normalized_marks() -> Tokenizer:
    """As Llama 2's: marks are looked for in the normalized text."""
    tokenizer = KINDS[2]()
    plain = Tokenizer.from_str(
        tokenizer.to_str().replace('"normalized":false', '"normalized":true')
    )
    assert all(token.normalized for token in plain.get_added_tokens_decoder().values())
    return plain


ALL_KINDS = [*KINDS, unigram, word_piece, words, whole_words_first, normalized_marks]
_made = functools.cache(lambda kind: kind().to_str())


@functools.cache
def encoder_of(kind: Callable[[], Tokenizer]) -> Encoder:
    return Encoder(PreTrainedTokenizerFast(tokenizer_object=copy_of(kind)), conversations=False)


def copy_of(kind: Callable[[], Tokenizer]) -> Tokenizer:
    return Tokenizer.from_str(_made(kind))


TEMPLATE = "{% for m in messages %}MARK{{ m.role }} {{ m.content }}{% endfor %}"
any_kind = pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: kind.__name__)
spelt = st.lists(
    st.sampled_from([*MARKS, "[SEP]", "[UNK]", "<|begin|>", "<0x0A>", " ", "<", "s>", "a", "ab"]),
    min_size=1,
    max_size=6,
).map("".join)


def marks_of(tokenizer: Tokenizer) -> dict[int, str]:
    """Special tokens and byte tokens by id, without the one for unknown text."""
    unknown = getattr(tokenizer.model, "unk_token", None)
    added = tokenizer.get_added_tokens_decoder()
    special = {index: token.content for index, token in added.items() if token.content != unknown}
    of_bytes = {index: token for token, index in tokenizer.get_vocab().items() if token in BYTES}
    return special | of_bytes


@any_kind
@settings(max_examples=30)
@given(text=spelt)
@example(text="a</s>b <0x0A><s>")
def test_no_kind_of_tokenizer_gives_a_mark_to_text(
    kind: Callable[[], Tokenizer], text: str
) -> None:
    tokenizer = copy_of(kind)
    encoder = encoder_of(kind)
    (encoding,) = encoder.encodings([text])
    # A character that the vocabulary lacks is spelt in bytes, which is no mark of the text.
    missing = {f"<0x{byte:02X}>" for c in text if c not in LETTERS + " " for byte in c.encode()}
    missing |= {f"<0x{ord(c):02X}>" for c in text if tokenizer.token_to_id(c) is None}
    marks = marks_of(tokenizer)
    assert {marks[token] for token in encoding.ids if token in marks} <= missing

    plain = "".join(c for c in text if c in "ab ")
    of_plain = copy_of(kind).encode(plain, add_special_tokens=False).ids
    assert encoder.encodings([plain])[0].ids == of_plain


def assert_as_transformers_where_nothing_is_spelt(tokenizer: Any) -> None:
    harmless = [{"role": "user", "content": "ab a"}]
    theirs = tokenizer.apply_chat_template(harmless, add_generation_prompt=True, return_dict=False)
    assert conversation_ids(tokenizer, harmless) == theirs


@any_kind
@settings(max_examples=15)
@given(said=spelt, role=st.sampled_from(["user", "a</s>"]))
def test_in_a_conversation_the_templates_marks_alone_are_marks(
    kind: Callable[[], Tokenizer], said: str, role: str
) -> None:
    mark = "[SEP]" if kind is word_piece else next(iter(marks_of(copy_of(kind)).values()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=copy_of(kind))
    tokenizer.chat_template = TEMPLATE.replace("MARK", mark)
    unknown = {copy_of(kind).token_to_id("<unk>"), copy_of(kind).token_to_id("[UNK]")}
    special = copy_of(kind).get_added_tokens_decoder().keys() - unknown

    def marks(content: str, role: str) -> list[int]:
        messages = [{"role": role, "content": content}, {"role": "user", "content": "ab"}]
        return [token for token in conversation_ids(tokenizer, messages) if token in special]

    # A normalized mark behind other text is none to transformers, either.
    assert marks(said, role) in ([copy_of(kind).token_to_id(mark)] * 2, marks("ab", "user"))

    assert_as_transformers_where_nothing_is_spelt(tokenizer)


@pytest.mark.parametrize("normalized", [True, False])
@any_kind
@settings(max_examples=10)
@given(said=st.lists(spelt, min_size=1, max_size=3).map("<|turn|>".join))
@example(said="a<|turn|>b</s><|turn|>")
def test_a_mark_that_the_tokenizer_does_not_call_special_is_one_in_a_template_alone(
    kind: Callable[[], Tokenizer], said: str, *, normalized: bool
) -> None:
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=copy_of(kind))
    tokenizer.add_tokens([AddedToken("<|turn|>", special=False, normalized=normalized)])
    mark = tokenizer.convert_tokens_to_ids("<|turn|>")
    if not normalized:  # such a one is found at the beginning alone, in some kinds
        (as_mark,) = Encoder(tokenizer, conversations=False).encodings([said])
        assert as_mark.ids.count(mark) == said.count("<|turn|>"), "there is no template yet"

    tokenizer.chat_template = TEMPLATE.replace("MARK", "<|turn|>")
    (as_text,) = Encoder(tokenizer, conversations=False).encodings([said])
    assert mark not in as_text.ids

    def marks(content: str) -> int:
        messages = [{"role": "user", "content": content}, {"role": "user", "content": "ab"}]
        return conversation_ids(tokenizer, messages).count(mark)

    assert marks(said) in (2, marks("ab"))
    assert_as_transformers_where_nothing_is_spelt(tokenizer)
