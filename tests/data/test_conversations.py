"""Conversations: the base's chat template writes them, and the assistant's turns alone are learned."""

import copy
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from scale_cli.data.conversations import Messages, write_conversation, writes_today
from scale_cli.data.documents import CorpusReader
from scale_cli.data.encoding import Document, Encoder
from scale_cli.data.ledger import Rejected
from tests.data.corpus_files import source_of, tokenised

# ChatML as instruct models have it, and with the marks that transformers makes a mask by.
PLAIN = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
MARKED = """{%- for message in messages -%}
{%- if message.role == 'assistant' -%}<|im_start|>assistant
{% generation %}{{ message.content }}<|im_end|>
{% endgeneration %}{%- else -%}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
# As some reasoning models do: what the assistant has said is written otherwise once more has been
# said.
FORGETFUL = (
    "{%- for m in messages -%}[{{ m.role }}]{{ m.content if loop.last else '...' }}{%- endfor -%}"
)
# It asks in other words than it writes.
THINKING = PLAIN.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
STRICT = "{{ raise_exception('a system turn') if messages[0].role == 'system' }}" + PLAIN

# Without marks: in a message they are text here, and marks in transformers (a test of its own).
SAID = st.text(
    st.characters(codec="utf-8", exclude_characters="\0\u2581"), min_size=1, max_size=12
).filter(lambda said: said.strip() and "<|im_" not in said and "</s>" not in said)
TURNS = st.lists(st.tuples(SAID, SAID), min_size=1, max_size=3)


def talk(turns: list[tuple[str, str]], *, system: str | None = None) -> Messages:
    roles = [[("user", asked), ("assistant", said)] for asked, said in turns]
    all_turns = [("system", system)] * (system is not None) + [
        turn for pair in roles for turn in pair
    ]
    return [{"role": role, "content": content} for role, content in all_turns]


@pytest.fixture(scope="module")
def tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = PLAIN
    return tokenizer


def with_template(tokenizer: PreTrainedTokenizerBase, template: str) -> PreTrainedTokenizerBase:
    changed = copy.copy(tokenizer)
    changed.chat_template = template
    return changed


@settings(max_examples=10)
@given(talks=st.lists(TURNS, min_size=1, max_size=3), system=st.none() | SAID)
def test_the_mask_is_the_assistants_turns_and_the_ids_are_transformers_own(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: PreTrainedTokenizerBase,
    talks: list[Any],
    system: str | None,
) -> None:
    all_messages = [talk(turns, system=system) for turns in talks]
    folder = tmp_path_factory.mktemp("talks")
    lines = [json.dumps({"messages": messages}) + "\n" for messages in all_messages]
    (folder / "talks.jsonl").write_text("".join(lines))
    corpus: Any = tokenised(folder / "talks.jsonl", tokenizer, folder, messages_field="messages")
    assert corpus.ledger.num_targets == corpus.learned[1:].sum()
    marked = with_template(tokenizer, MARKED)
    for index, messages in enumerate(all_messages):
        theirs: Any = marked.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = corpus.document(index).tolist()
        assert ids == [*theirs["input_ids"], tokenizer.eos_token_id]
        learned = corpus.learned[corpus.offsets[index] : corpus.offsets[index + 1]].tolist()
        mask = [bool(one) for one in theirs["assistant_masks"]]
        assert not learned.pop()
        # Of a turn's last character they mark the first token alone: of a line break in two tokens,
        # one.
        differing = [place for place in range(len(mask)) if learned[place] != mask[place]]
        assert all(learned[place] and mask[place - 1] for place in differing)
        assert not str(tokenizer.decode([ids[place] for place in differing])).strip()
        answers = "".join(
            f"{message['content']}<|im_end|>\n"
            for message in messages
            if message["role"] == "assistant"
        )
        wanted = str(tokenizer.decode(tokenizer.encode(answers, add_special_tokens=False)))
        said = str(
            tokenizer.decode([token for token, taken in zip(ids, learned, strict=False) if taken])
        )
        assert "".join(said.split()) == "".join(wanted.split())


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (FORGETFUL, talk([("a", "b"), ("c", "d")]), "writes otherwise"),
        (THINKING, talk([("a", "b")]), "writes otherwise"),
        (STRICT, talk([("a", "b")], system="s"), "refused by the chat template"),
        (PLAIN, talk([("a", "b")])[:1], "no turn of the assistant"),
        (PLAIN, [{"role": "user"}], "wrong type"),
        (PLAIN, [{"role": "assistant", "content": [{"type": "image"}]}], "wrong type"),
        (PLAIN, "hello", "wrong type"),
        (PLAIN, talk([("a", "b\0")]), "NUL"),
        (PLAIN, talk([("a", "\ud800")]), "UTF-8"),
        ("{{ ''.__class__.__mro__ }}", talk([("a", "b")]), "refused by the chat template"),
    ],
)
def test_what_cannot_be_learned_of_is_dropped_for_a_reason(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, template: str, messages: Any, reason: str
) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"talk": messages}) + "\n")
    source = source_of(tmp_path / "x.jsonl", messages_field="talk")
    (record,) = CorpusReader(source, 10_000, with_template(tokenizer, template))
    assert isinstance(record, Rejected) and reason in record.reason.value
    assert record.place.endswith("x.jsonl:1")


@pytest.mark.parametrize("turns", [1, 2])
def test_a_conversation_that_the_assistant_begins_is_learned_from_its_first_words_on(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, turns: int
) -> None:
    messages = [{"role": "assistant", "content": "Hello there."}, *talk([("a", "b")])]
    messages = messages[: 2 * turns - 1]
    (tmp_path / "x.jsonl").write_text(json.dumps({"talk": messages}) + "\n")
    source = source_of(tmp_path / "x.jsonl", messages_field="talk")
    (record,) = CorpusReader(source, 10_000, tokenizer)
    assert isinstance(record, Document) and record.learned is not None
    learned = [record.text[start:end] for start, end in record.learned]
    assert learned == ["Hello there.<|im_end|>\n", "b<|im_end|>\n"][:turns]
    never_asks = "A preamble.{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    (record,) = CorpusReader(source, 10_000, with_template(tokenizer, never_asks))
    assert isinstance(record, Rejected)


def test_a_template_that_writes_todays_date_writes_the_same_text_tomorrow(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    dated = with_template(tokenizer, """{{ strftime_now("%d %B %Y") }}""" + PLAIN)
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": talk([("a", "b")])}) + "\n")
    source = source_of(tmp_path / "x.jsonl", messages_field="messages")
    (record,) = CorpusReader(source, 10_000, dated)
    assert isinstance(record, Document) and record.text.startswith("26 July 2024<|im_start|>user")
    # What is asked today is dated today.
    asked = write_conversation(dated, talk([("a", "b")]))
    assert asked.startswith(f"{datetime.now():%d %B %Y}")
    assert writes_today(dated)
    assert not writes_today(tokenizer)


def test_spaces_of_an_answer_are_learned_whatever_offsets_a_tokenizer_gives_them(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    described = Tokenizer(models.BPE({"a": 0, "Ġ": 1, "ĠĠ": 2}, [("Ġ", "Ġ")]))
    described.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    described.post_processor = processors.ByteLevel(trim_offsets=True)
    trimming = PreTrainedTokenizerFast(tokenizer_object=described, chat_template=PLAIN)
    (encoding,) = Encoder(trimming, conversations=True).encodings(["a  "])
    assert encoding.offsets == [(0, 1), (1, 3)]


def test_a_mark_that_somebody_spells_ends_no_turn_and_is_learned_as_text(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    spelt = "ab<|im_end|>\n<|im_start|>assistant\ncd</s>"
    messages = talk([(spelt, spelt), ("a", "b")])
    (tmp_path / "x.jsonl").write_text(json.dumps({"talk": messages}) + "\n")
    corpus = tokenised(tmp_path / "x.jsonl", tokenizer, tmp_path, messages_field="talk")
    ids = corpus.document(0)
    for mark in ("<|im_start|>", "<|im_end|>"):
        assert (ids == tokenizer.convert_tokens_to_ids(mark)).sum() == len(messages)
    assert (ids == tokenizer.eos_token_id).sum() == 1
    learned = str(tokenizer.decode(ids[corpus.learned]))
    assert "".join(learned.split()) == "".join(f"{spelt}<|im_end|>b<|im_end|>".split())
    assert corpus.num_bytes[0] == len(
        str(tokenizer.apply_chat_template(messages, tokenize=False)).encode()
    )
