"""What is bad costs itself alone, with a reason and a place; what cannot be read is told."""

from __future__ import annotations

import gzip
import json
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from scale_cli.config.sources import ReadingConfig, TextSource
from scale_cli.data.documents import CorpusReader, Document, Reason, Rejected
from scale_cli.data.tokens import check_sample
from scale_cli.errors import CorpusError
from tests.data.corpus_files import (
    COMPRESSORS,
    DOCUMENTS,
    FORMATS,
    LIMIT,
    as_json,
    as_jsonl,
    as_parquet,
    as_txt,
    compressed,
    dropped,
    error_of,
    formats,
    kept,
    records,
)
from tests.vocabulary.tokenizers_at_hand import llama_3

# What is bad is passed over, with its reason and place


BAD_LINES = [
    (b"{", Reason.NOT_JSON),
    (b"", Reason.EMPTY),
    (b" \t", Reason.EMPTY),
    (b'{"text": "a"} {"text": "b"}', Reason.NOT_JSON),
    (b"[" * 100_000, Reason.NOT_JSON),
    (b"[]", Reason.NO_FIELD),
    (b'"text"', Reason.NO_FIELD),
    (b'{"body": "a"}', Reason.NO_FIELD),
    (b'{"text": null}', Reason.WRONG_TYPE),
    (b'{"text": ["a"]}', Reason.WRONG_TYPE),
    (b'{"text": 7}', Reason.WRONG_TYPE),
    (b'{"text": ""}', Reason.EMPTY),
    (b'{"text": " \\n"}', Reason.EMPTY),
    (b'{"text": "caf\xe9"}', Reason.NOT_UTF8),
    (b'{"text": "\\ud800"}', Reason.NOT_UTF8),
    (b'{"text": "a\\u0000b"}', Reason.NUL),
    (b"\0" * 100, Reason.NUL),
    (b'{"text": "' + b"a" * 1001 + b'"}', Reason.TOO_LARGE),
    (b'{"id": "' + b"a" * 20_000 + b'", "text": "b"}', Reason.TOO_LARGE),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES, ids=[line[:20].decode("latin-1") for line, _ in BAD_LINES])
def test_a_bad_line_of_json_costs_itself_alone(tmp_path: Path, line: bytes, reason: Reason) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_bytes(as_jsonl(["a", "b"]) + line + b"\n" + as_jsonl(["c"]))
    # Nesting so deep is not JSON to Python's parser whatever its length; it must be read to be refused.
    found = records(file, limit=100_000 if line.startswith(b"[[") else 1000)
    assert kept(found) == ["a", "b", "c"]
    assert dropped(found) == [(reason, f"{file}:3")]


@compressed
def test_bad_lines_have_their_places_in_a_compressed_file_too(tmp_path: Path, compression: str) -> None:
    file = tmp_path / f"corpus.jsonl{compression}"
    bad = [(line, reason) for line, reason in BAD_LINES if not line.startswith(b"[[")]
    content = b"".join(as_jsonl([str(index)]) + line + b"\n" for index, (line, _) in enumerate(bad))
    file.write_bytes(COMPRESSORS[compression](content))
    found = records(file, limit=1000)
    assert kept(found) == [str(index) for index in range(len(bad))]
    assert dropped(found) == [(reason, f"{file}:{2 * index + 2}") for index, (_, reason) in enumerate(bad)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [(b"caf\xe9", Reason.NOT_UTF8), (b"a\0b", Reason.NUL), (b"a" * 1003, Reason.TOO_LARGE)],
    ids=["not UTF-8", "NUL", "too large"],
)
@pytest.mark.parametrize(("end", "compression"), [(b"\n", ""), (b"\r\n", ""), (b"\r\n", ".gz")])
def test_a_bad_line_of_text_costs_its_paragraph(
    tmp_path: Path, line: bytes, reason: Reason, end: bytes, compression: str
) -> None:
    file = tmp_path / f"corpus.txt{compression}"
    lines = [b"one", b"", b"two", line, b"also two", b"", b"three"]
    file.write_bytes(COMPRESSORS[compression](end.join(lines)))
    found = records(file, limit=1000)
    assert kept(found) == ["one", "three"]
    assert dropped(found) == [(reason, f"{file}:4")]
    assert found[1].num_bytes == len(end.join([b"two", line, b"also two", b""]))
    assert dropped(records(file, limit=1000, documents="file")) == [(reason, f"{file}:4")]


@pytest.mark.parametrize(("end", "compression"), [(b"\n", ""), (b"\r\n", ""), (b"\r\n", ".gz")])
def test_a_bad_line_costs_itself_alone_where_a_line_is_a_document(tmp_path: Path, end: bytes, compression: str) -> None:
    file, longest = tmp_path / f"corpus.txt{compression}", b"x" * 1000
    bad = {b"caf\xe9": Reason.NOT_UTF8, b"a\0b": Reason.NUL, b"a" * 1001: Reason.TOO_LARGE, b" \t": Reason.EMPTY}
    for last in (b"", end):
        file.write_bytes(COMPRESSORS[compression](end.join([b"one", b"", *bad, b"", longest]) + last))
        found = records(file, limit=1000, documents="line")
        assert kept(found) == ["one", longest.decode()]
        assert dropped(found) == [(reason, f"{file}:{line}") for line, reason in enumerate(bad.values(), start=3)]


@formats
def test_a_document_may_be_as_large_as_the_limit_and_no_larger(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"corpus{form}"
    for limit, over in product((6, 50, 1000), (0, 1)):
        text = "한" * ((limit + over) // 3) + "x" * ((limit + over) % 3)
        file.write_bytes(FORMATS[form]([text, "a"]))
        found = records(file, limit=limit)
        assert kept(found) == ([] if over else [text]) + ["a"]
        assert [reason for reason, _ in dropped(found)] == [Reason.TOO_LARGE] * over


def test_a_paragraph_of_many_lines_is_not_held_beyond_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "corpus.txt"
    file.write_bytes(b"one\n\n" + b"0123456789\n" * 1000 + b"\nthree\n")
    found = records(file, limit=100)
    assert kept(found) == ["one", "three"]
    assert dropped(found) == [(Reason.TOO_LARGE, f"{file}:12")]
    assert found[1].num_bytes == 11_000


@formats
@compressed
def test_of_a_cut_off_compressed_file_what_came_before_is_kept(tmp_path: Path, form: str, compression: str) -> None:
    file = tmp_path / f"corpus{form}{compression}"
    documents = [f"document {i * i}" for i in range(999)]
    whole = COMPRESSORS[compression](FORMATS[form](documents))
    (tmp_path / f"later{form}").write_bytes(FORMATS[form](["of the next file"]))
    for part in (0.0, 0.02, 0.5, 0.99):
        file.write_bytes(whole[: int(part * len(whole))])
        *found, damage, last = records(tmp_path / "*")
        assert kept(found) == documents[: len(found)]
        if part > 0.9 and compression == ".gz" and form in (".txt", ".jsonl"):  # the others end as one block
            assert found
        assert kept([last]) == ["of the next file"]
        assert isinstance(damage, Rejected)
        assert damage.reason == Reason.DAMAGED_FILE
        assert damage.place.startswith(f"{file} (")


@formats
@compressed
def test_a_file_that_is_not_what_its_suffix_says_is_damaged(tmp_path: Path, form: str, compression: str) -> None:
    file = tmp_path / f"corpus{form}{compression}"
    file.write_bytes(as_txt(DOCUMENTS))
    [(reason, place)] = dropped(records(file))
    assert reason == Reason.DAMAGED_FILE
    assert str(file) in place


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_a_cut_off_parquet_file_is_damaged(tmp_path: Path, part: float) -> None:
    file = tmp_path / "corpus.parquet"
    whole = as_parquet(DOCUMENTS)
    file.write_bytes(whole[: int(part * len(whole))])
    [(reason, place)] = dropped(records(file))
    assert reason == Reason.DAMAGED_FILE
    assert str(file) in place


@pytest.mark.parametrize(
    ("bad", "reason"),
    [(None, Reason.WRONG_TYPE), ("", Reason.EMPTY), ("a\0", Reason.NUL), ("a" * 1001, Reason.TOO_LARGE)],
)
def test_a_bad_parquet_row_costs_itself_alone(tmp_path: Path, bad: str | None, reason: Reason) -> None:
    file = tmp_path / "corpus.parquet"
    pa.parquet.write_table(pa.table({"text": ["a", bad, "c"]}), file)
    found = records(file, limit=1000)
    assert kept(found) == ["a", "c"]
    assert dropped(found) == [(reason, f"{file}: row 2")]


def test_a_parquet_column_of_another_type_is_bad_row_by_row(tmp_path: Path) -> None:
    file = tmp_path / "corpus.parquet"
    pa.parquet.write_table(pa.table({"text": [1, 2]}), file)
    assert [reason for reason, _ in dropped(records(file))] == [Reason.WRONG_TYPE] * 2


def test_a_parquet_row_that_is_not_utf8_costs_itself_alone(tmp_path: Path) -> None:
    file = tmp_path / "corpus.parquet"
    offsets, data = pa.py_buffer(b"\0\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"\xff\xfea")
    pa.parquet.write_table(pa.table({"text": pa.StringArray.from_buffers(2, offsets, data)}), file)
    found = records(file)
    assert kept(found) == ["a"]
    assert dropped(found) == [(Reason.NOT_UTF8, f"{file}: row 1")]
    assert found[0].num_bytes == 2


def test_a_missing_parquet_column_comes_with_those_that_are_there(tmp_path: Path) -> None:
    file = tmp_path / "corpus.parquet"
    file.write_bytes(as_parquet(DOCUMENTS, "body"))
    [(reason, place)] = dropped(records(file))
    assert reason == Reason.DAMAGED_FILE
    assert "'text'" in place
    assert "id, body" in place


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_a_limit_on_documents_counts_what_is_kept(tmp_path: Path, limit: int) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_bytes(b"{\n" + as_jsonl(["a"]) + b"{\n" + as_jsonl(["c", "d"]))
    found = records(file, max_documents=limit)
    assert kept(found) == ["a", "c", "d"][:limit]
    assert isinstance(found[-1], Document)


def test_a_source_of_which_nothing_is_kept_is_not_read_to_its_end_for_a_few_documents(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_bytes(b"{\n" * 99)
    assert len(records(file, max_documents=4)) == 5


def test_the_position_ends_at_the_end_of_the_last_file(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt.gz"):
        content = as_txt(DOCUMENTS * 99)
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    reader = CorpusReader(TextSource(name="source", path=str(tmp_path / "*"), language="ko"), LIMIT)
    positions = [reader.position_bytes for _ in reader]
    assert positions == sorted(positions)
    assert reader.position_bytes == reader.total_bytes == sum(file.stat().st_size for file in tmp_path.iterdir())


# What cannot be read


@pytest.mark.parametrize("form", [".jsonl", ".parquet"])
@pytest.mark.parametrize("documents", ["line", "file"])
def test_a_file_of_records_is_not_parted_otherwise(tmp_path: Path, form: str, documents: str) -> None:
    file = tmp_path / f"corpus{form}"
    file.write_bytes(FORMATS[form](DOCUMENTS))
    with pytest.raises(CorpusError, match=rf"documents: {documents} is for \.txt") as caught:
        records(file, documents=documents)
    assert str(file) in str(caught.value)


def test_a_glob_that_matches_no_file_names_source_and_glob(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    message = error_of(tmp_path / "*")
    assert "source" in message
    assert str(tmp_path / "*") in message


@pytest.mark.parametrize("name", ["corpus.md", "corpus", "corpus.gz", "corpus.txt.bz2", "corpus.xml"])
def test_an_unknown_suffix_is_named_before_anything_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"text")
    (tmp_path / "a.txt").write_bytes(b"first")
    with pytest.raises(CorpusError) as caught:
        CorpusReader(TextSource(name="source", path=str(tmp_path / "*"), language="ko"), LIMIT)
    assert str(tmp_path / name) in str(caught.value)
    assert ".jsonl" in str(caught.value)


# What was meant is said

KOREAN = "모든 국민은 법 앞에 평등하다. 누구든지 성별 종교 또는 사회적 신분에 의하여 차별을 받지 아니한다."
TEXT_OF = {
    "ko": KOREAN,
    "ja": "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。何でも薄暗いじめじめした所で泣いていた。",
    "zh": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。",
    "ru": "Все люди рождаются свободными и равными в своём достоинстве и правах.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits et doués de raison et déjà là.",
}
ENCODINGS = [
    *((encoding, "ko") for encoding in ("cp949", "utf-16-le", "utf-16-be", "utf-16")),
    *((encoding, "ja") for encoding in ("cp932", "utf-16-le")),
    ("gb18030", "zh"),
    ("cp1251", "ru"),
    *((encoding, "fr") for encoding in ("cp1252", "utf-16-le")),
]


def refusal(path: Path | str, language: str = "ko", **options: Any) -> str:
    """The line that a source gets when a verb opens it."""
    source = TextSource(name="source", path=str(path), language=language, **options)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=llama_3())
    with pytest.raises(CorpusError) as caught:
        check_sample(source, tokenizer, ReadingConfig())
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("encoding", "language"), ENCODINGS)
@pytest.mark.parametrize("size", [1, 500])
@pytest.mark.parametrize(("suffix", "compression"), [(".txt", ""), (".jsonl", ""), (".csv", ""), (".txt", ".gz")])
def test_a_text_that_is_not_utf_8_is_read_after_the_line_that_its_refusal_gives(
    tmp_path: Path, encoding: str, language: str, size: int, suffix: str, compression: str
) -> None:
    documents = [f"{TEXT_OF[language]} {number}" for number in range(size)]
    records = [json.dumps({"text": text}, ensure_ascii=False) for text in documents]
    text = {".txt": "\n\n".join(documents), ".jsonl": "\n".join(records), ".csv": "\n".join(["text", *documents])}
    file = tmp_path / f"a corpus{suffix}{compression}"
    file.write_bytes(COMPRESSORS[compression](text[suffix].encode(encoding)))
    told = refusal(file, language)
    command = told.partition(" looks like ")[2].partition(": ")[2]
    assert command.startswith(("cat", "gzip -dc")), told
    subprocess.run(["sh", "-c", command], check=True, cwd=tmp_path)
    found = CorpusReader(TextSource(name="source", path=str(tmp_path / f"*.utf-8{suffix}"), language="ko"), LIMIT)
    assert kept(list(found)) == documents


def test_some_damage_in_a_text_of_utf_8_is_no_other_encoding(tmp_path: Path) -> None:
    file = tmp_path / "corpus.txt"
    file.write_bytes(f"{KOREAN} ".encode() + b"caf\xe9 caf\xe9")
    assert refusal(file) == f"source ({file}): no document with text (1 not UTF-8: {file}:1)"


@pytest.mark.parametrize("form", [".jsonl", ".json", ".parquet"])
def test_a_record_without_the_field_says_which_it_has(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"corpus{form}"
    columns = {".jsonl": as_jsonl, ".json": as_json, ".parquet": as_parquet}
    file.write_bytes(columns[form](DOCUMENTS, "document"))
    assert "id, document" in refusal(file)


def test_too_large_a_document_names_the_key(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_bytes(as_jsonl(["a" * (LIMIT + 1)]))
    assert "corpus.max_document_bytes" in refusal(file)


def test_a_source_of_which_all_is_passed_over_says_so(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_bytes(as_jsonl(DOCUMENTS))
    assert refusal(file, skip_documents=32).endswith("no document is left: skip_documents passes over all 3")


@pytest.mark.parametrize("below", ["", "more/"])
@pytest.mark.parametrize("end", ["", "/"])
def test_a_folder_says_which_pattern_finds_its_text(tmp_path: Path, below: str, end: str) -> None:
    (tmp_path / "text" / below).mkdir(parents=True, exist_ok=True)
    for name in ("a.jsonl.gz", "b.jsonl.gz", "c.txt", "README.md", "d.md", "e.md"):
        (tmp_path / "text" / below / name).write_bytes(b"")
    pattern = tmp_path / "text" / ("**" if below else "") / "*.jsonl.gz"
    assert refusal(f"{tmp_path}/text{end}").endswith(f"text is a folder, not a file; give {pattern}")
