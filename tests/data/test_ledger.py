"""Every record is kept or dropped for a reason; what a tokenizer loses of the text is counted; too
much is refused.
"""

import json
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scale_cli.config.sources import ReadingConfig
from scale_cli.data.corpora import check_sample
from scale_cli.data.documents import CorpusReader
from scale_cli.data.encoding import Document, Encoder, RoundTrip, gives_all_back
from scale_cli.data.ledger import Ledger, Reason, Rejected, check_bad_fraction
from scale_cli.data.tokens import TokenCache
from scale_cli.errors import CorpusError
from tests.data.corpus_files import dropped, kept, source_of, write_jsonl
from tests.vocabulary.tokenizers_at_hand import (
    BROKEN,
    ENGLISH,
    KINDS,
    KOREAN,
    RUSSIAN,
    llama_3,
    qwen,
)

DROPPED = st.builds(
    Rejected,
    st.sampled_from([r for r in Reason if r != Reason.DAMAGED_FILE]),
    st.sampled_from(
        ["f:1", "\udcff:1"]
    ),  # the name of a file may be no UTF-8, and that of a field half a character
    st.integers(0, 99),
    st.sampled_from([(), ("\ud800", "b")]),
)
DAMAGED = st.builds(
    Rejected, st.just(Reason.DAMAGED_FILE), st.sampled_from(["a", "\udcff"]), st.just(0)
)
RECORDS = st.lists(
    st.builds(Document, st.just("x"), st.integers(1, 99)) | DROPPED | DAMAGED, max_size=30
)


def ledger_of(records: list[Any], **known: Any) -> Ledger:
    ledger = Ledger(**known)
    for record in records:
        ledger.enter(record)
    return ledger


@given(RECORDS)
def test_what_is_read_is_kept_or_dropped_for_a_reason(records: list[Any]) -> None:
    ledger = ledger_of(records, files=40)
    counts = [ledger.kept, *ledger.dropped.values()]
    assert ledger.kept.documents == sum(isinstance(record, Document) for record in records)
    assert ledger.read.documents == sum(count.documents for count in counts)
    assert (
        ledger.read.num_bytes
        == sum(count.num_bytes for count in counts)
        == sum(r.num_bytes for r in records)
    )
    assert ledger.read.documents + ledger.damaged.documents == len(records)
    assert all(len(count.places) == min(count.documents, 3) for count in ledger.dropped.values())
    written = json.dumps(ledger.to_json(), ensure_ascii=False).encode()
    assert Ledger.from_json(json.loads(written)) == ledger


@given(RECORDS, RECORDS)
def test_the_accounts_of_parts_add_up_to_that_of_the_whole(
    first: list[Any], later: list[Any]
) -> None:
    whole = ledger_of(first + later, files=2)
    ledger = ledger_of(first, files=1)
    ledger.take(ledger_of(later, files=1))
    assert json.dumps(ledger.to_json()) == json.dumps(whole.to_json())


@pytest.mark.parametrize(
    ("counts", "max_bad_fraction", "told"),
    [
        ((999, 1, 1, 0), 0.001, None),
        ((998, 1, 1, 0), 0.001, "not JSON: f:1"),
        ((5, 0, 1, 0), 0.0, None),
        ((5000, 0, 1000, 1), 0.001, None),
        ((5000, 0, 999, 1), 0.001, r"unreadable file: g \(cut\)"),
    ],
)
def test_records_and_files_are_each_held_to_the_limit(
    counts: tuple[int, int, int, int], max_bad_fraction: float, told: str | None
) -> None:
    num_good, num_bad, files, num_damaged = counts
    bad = Rejected(Reason.NOT_JSON, "f:1", 1)
    damaged = Rejected(Reason.DAMAGED_FILE, "g (cut)", 0)
    records = [Document("a", 1)] * num_good + [bad] * num_bad + [damaged] * num_damaged
    ledger = ledger_of(records, files=files, num_tokens=2)
    refused = pytest.raises(CorpusError, match=rf"^source .*: .*corpus\.max_bad_fraction.*{told}$")
    with refused if told else nullcontext():
        check_bad_fraction(source_of("f"), ledger, max_bad_fraction)


def test_the_message_names_every_reason_with_the_first_places() -> None:
    records = [Rejected(Reason.NOT_JSON, f"f:{line}", 1) for line in range(1, 6)] + [
        Rejected(Reason.NUL, "f:9", 1)
    ]
    assert (
        ledger_of(records).described_losses()
        == "5 not JSON: f:1, f:2, f:3, ...; 1 NUL character: f:9"
    )


LINES = {
    b'{"text": "a cat"}': None,
    '{"text": "고양이"}'.encode(): None,
    b"{": "not JSON",
    b'{"text": " "}': "empty",
    b'{"text": 1}': "text of the wrong type",
    b"\xff": "not UTF-8",
}


def read_of(lines: list[bytes], skip_documents: int, max_documents: int | None) -> list[bytes]:
    """The lines behind those passed over, up to the last that a limit on documents lets be kept, or
    drops too many; all of a source that has no document.
    """
    if all(LINES[line] is not None for line in lines) and skip_documents:
        return lines
    read: list[bytes] = []
    for line in lines:
        is_kept = LINES[line] is None
        if skip_documents:
            skip_documents -= is_kept
            continue
        read.append(line)
        kept = sum(LINES[before] is None for before in read)
        if max_documents is not None and (
            kept == max_documents or len(read) - kept > max_documents
        ):
            break
    return read


@settings(max_examples=50)
@given(
    lines=st.lists(st.sampled_from([*LINES]), min_size=1, max_size=9),
    skip_documents=st.integers(0, 2),
    max_documents=st.none() | st.integers(1, 4),
)
def test_what_is_asked_for_is_read_and_counted(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], **limits: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "counted.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    reader = CorpusReader(source_of(path, **limits), 1000)
    found = list(reader)
    read = read_of(lines, **limits)
    assert kept(found) == [json.loads(line)["text"] for line in read if LINES[line] is None]
    reasons = [LINES[line] for line in read if LINES[line] is not None]
    assert [reason.value for reason, _ in dropped(found)] == reasons
    ledger = reader.ledger
    assert ledger.read.documents == len(read)
    counts = {reason: count.documents for reason, count in ledger.dropped.items()}
    assert counts == Counter(reasons)
    if not kept(found):
        with pytest.raises(CorpusError, match=r"source \(.*\): no document (with text|is left)"):
            check_bad_fraction(reader.source, ledger, 1.0)


# What a tokenizer does not give back: bits/byte would be of another text


JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。ｶﾞﾗｽ、㍿、①、Ａ"
WORDS = ["<unk>", "a", "cat", "sat"]
MODELS = {
    "words": lambda: models.WordLevel(
        {word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"
    ),
    "pieces": lambda: models.Unigram(
        [(word, -1.0) for word in WORDS], unk_id=0, byte_fallback=False
    ),
    "characters": lambda: models.BPE(
        {"<unk>": 0, "a": 1, "c": 2, "t": 3, "s": 4}, [], unk_token="<unk>"
    ),
}


def round_trip(tokenizer: Tokenizer, *texts: str, **special: str) -> RoundTrip:
    encoder = Encoder(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special), conversations=False
    )
    return encoder.encode([Document(text, len(text.encode())) for text in texts]).round_trip


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_that_knows_every_byte_loses_nothing(kind: Callable[[], Tokenizer]) -> None:
    assert round_trip(kind(), ENGLISH, KOREAN, RUSSIAN, JAPANESE).num_lost == 0


NORMAL_FORMS = {
    "NFC": normalizers.NFC(),
    "NFD": normalizers.NFD(),
    "NFKC": normalizers.NFKC(),
    "NFKD": normalizers.NFKD(),
    "lower": normalizers.Lowercase(),
    "BERT": normalizers.BertNormalizer(clean_text=True, strip_accents=True, lowercase=True),
    "spaces": normalizers.Sequence([normalizers.Strip(), normalizers.Replace(" ", "")]),
}


@pytest.mark.parametrize("form", NORMAL_FORMS)
@settings(max_examples=30)
@given(
    st.text(
        st.one_of(
            st.sampled_from(ENGLISH + KOREAN + RUSSIAN + JAPANESE + "ㅋㅋㅠㅠéß☺…〜"),
            st.characters(
                max_codepoint=0xFFFF,
                exclude_categories=["Cs", "Cn", "Co"],
                exclude_characters="\ufffd",
            ),
        ),
        min_size=1,
    )
)
def test_no_normal_form_is_a_loss(form: str, text: str) -> None:
    tokenizer = qwen()
    tokenizer.normalizer = NORMAL_FORMS[form]
    assert round_trip(tokenizer, text).num_lost == 0


def with_a_letter_that_is_decoded_as_a_byte() -> Tokenizer:
    tokenizer = llama_3()
    tokenizer.add_tokens(["é"])
    return tokenizer


def with_a_step_that_drops() -> Tokenizer:
    tokenizer = llama_3()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("a", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    return tokenizer


@settings(max_examples=60)
@given(st.text(st.characters(codec="utf-8") | st.sampled_from("a é<|end|>Ġ가"), min_size=1))
def test_where_no_round_trip_is_asked_for_every_text_comes_back(text: str) -> None:
    tokenizer = llama_3()
    assert gives_all_back(tokenizer)
    tokenizer.encode_special_tokens = True
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "kind", [*KINDS[1:], *BROKEN, with_a_letter_that_is_decoded_as_a_byte, with_a_step_that_drops]
)
def test_a_round_trip_is_asked_of_every_other_tokenizer(kind: Callable[[], Tokenizer]) -> None:
    assert not gives_all_back(kind())


@pytest.mark.parametrize("model", MODELS)
def test_what_stands_for_unknown_text_gives_none_of_it_back(model: str) -> None:
    tokenizer = Tokenizer(MODELS[model]())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = ["a cat sat", "고양이 cat", "a 개"]
    # 7 of 10 letters of 13 bytes, for a syllable has two or three, and 2 of 3 of 5 bytes
    lost = RoundTrip(sum(len(text.encode()) for text in texts), num_lost=10 + 4, example="고양이")
    assert round_trip(tokenizer, *texts) == lost
    assert (
        round_trip(tokenizer, *texts, eos_token="<unk>") == lost
    )  # a mark at a border is not unknown text


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize(("num_known", "allowed"), [(0, 0.5), (0, 1.0), (20, 0.01), (20, 0.5)])
def test_a_source_that_loses_more_than_its_limit_is_refused_by_a_whole_sample_and_by_its_tokens(
    tmp_path: Path, broken: Callable[[], Tokenizer], num_known: int, allowed: float
) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=broken())
    texts = {"known": [ENGLISH] * num_known, "lost": [KOREAN] * 9}
    source = source_of(
        [str(write_jsonl(tmp_path / f"{name}.jsonl", texts[name])) for name in texts]
    )
    lost = round_trip(broken(), *texts["known"], *texts["lost"]).lost_fraction
    reading = ReadingConfig(num_workers=1, max_unknown_fraction=allowed)
    for act in (
        partial(check_sample, source, tokenizer, reading),
        partial(TokenCache(tmp_path, tokenizer, reading).open, source),
    ):
        told = r"source \(.*\): the tokenizer loses \d+\.\d % of its text, as in '안녕하세요', more than corpus\.max_"
        with pytest.raises(CorpusError, match=told) if lost > allowed else nullcontext():
            act()


def test_a_sample_that_is_a_part_refuses_only_what_is_plainly_lost(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=BROKEN[0]())
    strict = ReadingConfig(max_unknown_fraction=0.0)
    source = source_of(str(write_jsonl(tmp_path / "part.jsonl", [KOREAN, *[ENGLISH] * 50])))
    check_sample(source, tokenizer, strict)
    with pytest.raises(CorpusError, match="the tokenizer loses"):
        TokenCache(tmp_path, tokenizer, strict).open(source)
    plain = source_of(str(write_jsonl(tmp_path / "plain.jsonl", [KOREAN] * 1200)))
    with pytest.raises(CorpusError, match="the tokenizer loses"):
        check_sample(plain, tokenizer, strict)
