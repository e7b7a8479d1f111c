"""What is read, and what is bad: it costs itself alone, with a reason and a place."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scale_cli.data.documents import CorpusReader
from scale_cli.data.files import check_source
from scale_cli.data.ledger import Reason, Rejected, check_has_text
from scale_cli.errors import CorpusError
from tests.command_line import refused
from tests.data.corpus_files import (
    COMPRESSORS,
    DOCUMENTS,
    FORMATS,
    LIMIT,
    as_jsonl,
    as_parquet,
    as_txt,
    dropped,
    forms,
    kept,
    read,
    records,
    source_of,
)

Write = Callable[[str, bytes | str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A function that writes a file and says where it is."""

    def written(name: str, content: bytes | str) -> Path:
        file = tmp_path / name
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return file

    return written


# What is read


@forms
def test_every_format_and_compression_gives_the_same_documents(
    write: Write, form: str, compression: str
) -> None:
    name = f"corpus{form}{compression}"
    compress = COMPRESSORS[compression]
    assert read(write(name, compress(FORMATS[form](DOCUMENTS)))) == DOCUMENTS
    if form != ".txt":
        file = write(name, compress(FORMATS[form](DOCUMENTS, "body")))
        assert read(file, text_field="body") == DOCUMENTS
    if form in (".txt", ".jsonl"):
        file = write(name, compress(b"\xef\xbb\xbf" + FORMATS[form](DOCUMENTS)))
        assert read(file) == DOCUMENTS


@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=30), max_size=8
    )
)
def test_csv_and_json_give_the_texts_that_were_written(
    tmp_path_factory: Any, written: list[str]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    for form in (".csv", ".json"):
        (folder / f"written{form}").write_bytes(FORMATS[form](written))
        assert kept(records(folder / f"written{form}")) == [
            text for text in written if text.strip()
        ]


@pytest.mark.parametrize("compression", [".gz", ".xz", ".zst"])
def test_a_compressed_file_of_several_parts_is_read_to_its_end(
    tmp_path: Path, compression: str
) -> None:
    file = tmp_path / f"corpus.jsonl{compression}"
    compress = COMPRESSORS[compression]
    padding = bytes(100_000) if compression == ".xz" else b""
    file.write_bytes(
        b"".join(compress(as_jsonl([text])) + padding[:4] for text in DOCUMENTS) + padding
    )
    assert read(file) == DOCUMENTS
    part = compress(as_jsonl(DOCUMENTS))
    for after in (part[:12] + b"xx" + part[12:], b"something else"):
        file.write_bytes(part + after)
        found = records(file)
        assert kept(found) in (
            [],
            DOCUMENTS,
        )  # what was decompressed together with the damage is lost
        assert [reason for reason, _ in dropped(found)] == [Reason.DAMAGED_FILE]


LINES = st.text(st.characters(exclude_characters="\n\r\0", exclude_categories=["Cs"]), max_size=5)
BLANKS = st.sampled_from(["", " ", "\t \t", "\u3000", "\ufeff"])
LINE_ENDS = ["\n", "\r\n", "\r"]


@settings(max_examples=150)
@given(st.lists(LINES | BLANKS, max_size=10), st.sampled_from(LINE_ENDS), st.booleans())
def test_no_line_with_text_is_lost_or_joined_across_a_blank_one(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], newline: str, ends_in_newline: bool
) -> None:
    file = tmp_path_factory.getbasetemp() / "lines.txt"
    file.write_bytes((newline.join(lines) + newline * ends_in_newline).encode())
    documents = [document.split("\n") for document in read(file)]
    lines = [line.replace("\ufeff", "") for line in lines]
    assert [line for document in documents for line in document] == [
        line for line in lines if line.strip()
    ]
    assert all(document for document in documents)
    starts = [
        i for i, line in enumerate(lines) if line.strip() and (i == 0 or not lines[i - 1].strip())
    ]
    assert len(documents) == len(starts)


@pytest.mark.parametrize("end", LINE_ENDS)
def test_a_file_or_a_line_may_be_one_document(tmp_path: Path, end: str) -> None:
    lines = ["첫 문장", "", "  둘째 ", "third\u2028still", ""]
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_bytes(end.join(lines).encode("utf-8-sig"))
    path = str(tmp_path / "*.txt")
    assert read(path, documents="line") == ["첫 문장", "  둘째 ", "third\u2028still"] * 2
    assert read(path, documents="file") == ["\n".join(lines).rstrip("\n")] * 2


@pytest.mark.parametrize("form", [".txt", ".jsonl"])
@pytest.mark.parametrize("compression", COMPRESSORS)
def test_lines_end_in_any_way_and_marks_within_are_left_out_wherever_blocks_are_cut(
    tmp_path: Path, form: str, compression: str
) -> None:
    mark = "\ufeff".encode()
    for end in LINE_ENDS:
        written = [f"{index} " + "안녕 \xef line\n" * (index % 7) + "end" for index in range(3000)]
        for padding in range(4):  # so that blocks are cut within a mark and a CRLF
            texts = ["x" * (padding + 1), *written]
            content = FORMATS[form](texts).replace(b"\n", b"\n" + mark).replace(b"\n", end.encode())
            file = tmp_path / f"{padding}{form}{compression}"
            file.write_bytes(COMPRESSORS[compression](mark + content))
            reader = CorpusReader(source_of(file), LIMIT)
            assert kept(list(reader)) == texts
            # Those between records of JSON are no text, so nothing is told of them.
            num_ends = content.count(end.encode()) if form == ".txt" else 0
            assert reader.ledger.num_line_ends == (0 if end == "\n" else num_ends)
            assert reader.ledger.num_byte_order_marks == (num_ends + 1 if form == ".txt" else 0)


def test_a_byte_order_mark_is_left_out_wherever_it_is_in_text_and_only_between_records(
    write: Write,
) -> None:
    joined = write("joined.txt", "\ufeffone\ufefftwo\n\ufeff\nthree")
    assert read(joined) == ["onetwo", "three"]
    record = '\ufeff{"text": "\ufeffa\ufeff"}\n'
    assert read(write("joined.jsonl", record * 2)) == ["\ufeffa\ufeff"] * 2


# What is bad

BAD_LINES = [
    (b"{", Reason.NOT_JSON),
    (b'{"text": "a"} {"text": "b"}', Reason.NOT_JSON),
    (b"[" * 7000, Reason.NOT_JSON),
    (b"[]", Reason.NO_FIELD),
    (b'"text"', Reason.NO_FIELD),
    (b'{"body": "a"}', Reason.NO_FIELD),
    (b'{"text": null}', Reason.WRONG_TYPE),
    (b'{"text": ["a"]}', Reason.WRONG_TYPE),
    (b'{"text": ""}', Reason.EMPTY),
    (b'{"text": " \\n"}', Reason.EMPTY),
    (b'{"text": "caf\xe9"}', Reason.NOT_UTF8),
    (b'{"text": "\\ud800"}', Reason.NOT_UTF8),
    (b'{"text": "a\\u0000b"}', Reason.NUL),
    (b"\0" * 100, Reason.NUL),
    (b'{"text": "' + b"a" * 1001 + b'"}', Reason.TOO_LARGE),
    (b'{"id": "' + b"a" * 20_000 + b'", "text": "b"}', Reason.TOO_LARGE),
]


def test_a_bad_line_of_json_costs_itself_alone_and_a_blank_one_nothing(write: Write) -> None:
    blank = b"\n \t\r\n"
    lines = (as_jsonl([str(index)]) + line + b"\r" for index, (line, _) in enumerate(BAD_LINES))
    file = write("corpus.jsonl", blank + b"".join(lines) + blank)
    found = records(file, limit=1000)
    assert kept(found) == [str(index) for index in range(len(BAD_LINES))]
    assert dropped(found) == [
        (reason, f"{file}:{2 * index + 4}") for index, (_, reason) in enumerate(BAD_LINES)
    ]


@pytest.mark.parametrize("end", [end.encode() for end in LINE_ENDS])
def test_a_bad_line_of_text_costs_its_paragraph_or_itself(tmp_path: Path, end: bytes) -> None:
    file = tmp_path / "corpus.txt"
    longest = b"x" * 1000
    bad = {
        b"caf\xe9": Reason.NOT_UTF8,
        b"a\0b": Reason.NUL,
        b"a" * 1003: Reason.TOO_LARGE,
    }
    for line, reason in bad.items():
        file.write_bytes(end.join([b"one", b"", b"two", line, b"also two", b"", b"three"]))
        found = records(file, limit=1000)
        assert kept(found) == ["one", "three"]
        assert dropped(found) == [(reason, f"{file}:4")]
        assert found[1].num_bytes == len(b"\n".join([b"two", line, b"also two", b""]))
        assert dropped(records(file, limit=1000, documents="file")) == [(reason, f"{file}:4")]
    for last in (b"", end):
        file.write_bytes(end.join([b"one", b"", *bad, b"", b" \t", longest]) + last)
        found = records(file, limit=1000, documents="line")
        assert kept(found) == ["one", longest.decode()]
        assert dropped(found) == [
            (reason, f"{file}:{line}") for line, reason in enumerate(bad.values(), start=3)
        ]


@pytest.mark.parametrize("form", FORMATS)
def test_a_document_may_be_as_large_as_the_limit_and_no_larger(write: Write, form: str) -> None:
    for limit, over in product((6, 50, 1000), (0, 1)):
        text = "한" * ((limit + over) // 3) + "x" * ((limit + over) % 3)
        found = records(write(f"corpus{form}", FORMATS[form]([text, "a"])), limit=limit)
        assert kept(found) == ([] if over else [text]) + ["a"]
        assert [reason for reason, _ in dropped(found)] == [Reason.TOO_LARGE] * over


def test_a_file_that_is_cut_within_what_is_skipped_is_damaged_all_the_same(write: Write) -> None:
    write("cut.txt.gz", COMPRESSORS[".gz"](as_txt(["of a file", "that is cut", ""]))[:-12])
    whole = write("whole.txt", as_txt(DOCUMENTS))
    for skipped in (1, 2, 3):
        reader = CorpusReader(source_of(whole.with_name("*"), skip_documents=skipped), 1000)
        reasons = [record.reason for record in reader if isinstance(record, Rejected)]
        assert reasons == [Reason.DAMAGED_FILE] and len(reader.ledger.damaged.places) == 1
        assert reader.ledger.num_skipped == skipped


def test_a_bad_parquet_row_costs_itself_alone(write: Write) -> None:
    file = write("corpus.parquet", as_parquet(["a", None, "", "a\0", "a" * 1001, "c"]))
    found = records(file, limit=1000)
    assert kept(found) == ["a", "c"]
    reasons = [Reason.WRONG_TYPE, Reason.EMPTY, Reason.NUL, Reason.TOO_LARGE]
    assert dropped(found) == [
        (reason, f"{file}: row {row}") for row, reason in enumerate(reasons, start=2)
    ]
    pa.parquet.write_table(pa.table({"text": [1, 2]}), file)
    assert [reason for reason, _ in dropped(records(file))] == [Reason.WRONG_TYPE] * 2
    offsets = pa.py_buffer(b"\0\0\0\0\2\0\0\0\3\0\0\0")
    data = pa.py_buffer(b"\xff\xfea")
    pa.parquet.write_table(pa.table({"text": pa.StringArray.from_buffers(2, offsets, data)}), file)
    found = records(file)
    assert kept(found) == ["a"]
    assert dropped(found) == [(Reason.NOT_UTF8, f"{file}: row 1")] and found[0].num_bytes == 2


def test_a_list_in_a_file_of_lines_is_named_with_what_to_do(write: Write) -> None:
    file = write("corpus.jsonl", FORMATS[".json"](DOCUMENTS))
    reader = CorpusReader(source_of(file), LIMIT)
    first, *_ = list(reader)
    assert isinstance(first, Rejected) and first.reason is Reason.JSON_LIST
    assert "name the file .json" in reader.ledger.described_losses()
    assert kept(records(write("corpus.jsonl", b"[]\n" + as_jsonl(["a"])))) == ["a"]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("ahead", [{}, {"version": "1.0", "about": {"n": [2, "{"]}, "of": []}])
def test_the_records_of_the_only_list_in_a_json_object_are_read(
    write: Write, indent: int | None, ahead: dict[str, Any]
) -> None:
    rows = [{"id": id_, "text": text} for id_, text in enumerate(DOCUMENTS)]
    content = json.dumps({**ahead, "data": rows}, indent=indent)
    assert read(write("a.json", content)) == DOCUMENTS


def test_several_lists_in_a_json_object_are_refused_with_what_to_do(write: Write) -> None:
    rows = [{"text": text} for text in DOCUMENTS]
    (refused_file,) = records(write("a.json", json.dumps({"train": rows, "test": rows})))
    assert isinstance(refused_file, Rejected)
    assert "several lists of records (train, test); write the records" in refused_file.place


def test_a_record_that_begins_with_a_list_is_a_line_of_json_all_the_same(write: Write) -> None:
    rows = [{"parts": [{"n": "x" * 99_999}], "text": text} for text in DOCUMENTS]
    for number in (1, len(rows)):
        lines = "".join(json.dumps(row) + "\n" for row in rows[:number])
        assert read(write("a.json", lines)) == DOCUMENTS[:number]


def test_a_table_may_have_a_space_after_each_comma(write: Write) -> None:
    quoted = write("a.csv", 'id, text\n1, one\n2, "two, and ""more"""\n')
    assert read(quoted) == ["one", 'two, and "more"']
    assert read(write("a.csv", 'text, "a note"\none, "a, b"\n')) == ["one"]
    assert read(write("a.csv", 'id, "text"\n"1", "one, two"\n')) == ["one, two"]
    file = write("a.csv", "id, text\n1, one\n")
    assert read(file, text_field=" text") == [" one"]
    (failed,) = records(file, text_field="body")
    assert isinstance(failed, Rejected) and "and has: 'id', 'text'; set" in failed.place


def test_an_object_of_records_is_one_whatever_stands_in_its_strings(write: Write) -> None:
    whole = {"note": 'a "b}', "data": [{"text": r"\frac{1}{2}"}, {"text": "} {"}]}
    assert read(write("a.json", json.dumps(whole))) == [r"\frac{1}{2}", "} {"]


def test_a_table_whose_lines_end_in_cr_alone_or_that_is_cut_in_quotes_is_not_taken_for_whole(
    write: Write,
) -> None:
    (failed,) = records(write("a.csv", "text\rone\rtwo\r"))
    assert isinstance(failed, Rejected) and "not CSV" in failed.place
    file = write("b.csv", 'text\none\n"two\nthree\n')
    assert kept(records(file)) == ["one"]
    assert dropped(records(file)) == [(Reason.NOT_CSV, f"{file}: row 3")]
    assert read(write("c.csv", 'id,text\n1,"Hello" she said.\n2,"x"')) == ["Hello she said.", "x"]


def test_a_file_without_the_column_is_named_while_its_position_is_asked_for(write: Write) -> None:
    reader = CorpusReader(source_of(write("a.csv", "id,body\n1,x\n")), LIMIT)
    for record in reader:
        assert isinstance(record, Rejected) and "needs exactly one column 'text'" in record.place
        assert reader.position_bytes >= 0


def test_what_is_wrong_with_a_source_is_told_though_its_first_documents_are_skipped(
    write: Write,
) -> None:
    source = source_of(write("a.jsonl", '{"body": "x"}\n' * 3), skip_documents=9)
    reader = CorpusReader(source, LIMIT)
    assert len(list(reader)) == reader.ledger.read.documents == 3
    with pytest.raises(CorpusError, match="it has body"):
        check_has_text(source, reader.ledger)


def test_a_table_loses_its_bad_rows_alone(write: Write) -> None:
    large = '"' + 'a ""quoted"", line\n' * 200_000 + '"'
    rows = [
        "id,text",
        "1,a",
        f"2,{large}",
        "",
        "3",
        '4,"b\nc"',
        f"{large},d",
        "5,e,f",
        "6,\udcff",
        "7,g",
    ]
    file = write("corpus.csv", "\r\n".join(rows).encode(errors="surrogateescape"))
    found = records(file, limit=1000)
    assert kept(found) == ["a", "b\nc", "g"]
    bad = {3: Reason.TOO_LARGE, 4: Reason.NOT_CSV, 6: Reason.TOO_LARGE, 7: Reason.NOT_CSV}
    expected = [*bad.items(), (8, Reason.NOT_UTF8)]
    assert dropped(found) == [(reason, f"{file}: row {row}") for row, reason in expected]


def test_a_frame_of_zstd_with_a_long_window_is_told_how_to_be_read(write: Write) -> None:
    # A frame's header without its size, with a window of 2^31 bytes, then a last block of one byte.
    frame = b"\x28\xb5\x2f\xfd" + bytes([0x00, 21 << 3]) + b"\x09\x00\x00a"
    (damage,) = records(write("long.txt.zst", frame))
    assert isinstance(damage, Rejected) and "zstd -d --long=31" in damage.place


# Datasets: a local folder goes the way of a hub id


def of_dataset(folder: Path, **options: Any) -> list[Any]:
    return list(CorpusReader(source_of(None, dataset=str(folder), **options), LIMIT))


def test_a_dataset_gives_its_documents_in_order_and_bad_ones_a_reason_and_a_place(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.jsonl").write_bytes(as_jsonl(DOCUMENTS))
    (tmp_path / "test.jsonl").write_text(
        '{"text": ""}\n{"text": "a\\u0000"}\n{"text": null}\n{"text": "a"}\n'
    )
    assert kept(of_dataset(tmp_path)) == DOCUMENTS
    found = of_dataset(tmp_path, split="test")
    reasons = [Reason.EMPTY, Reason.NUL, Reason.WRONG_TYPE]
    assert kept(found) == ["a"]
    assert dropped(found) == [
        (reason, f"{tmp_path} row {row}") for row, reason in enumerate(reasons, start=1)
    ]


def test_a_dataset_of_texts_and_other_values_is_refused_and_no_text_becomes_json(
    tmp_path: Path,
) -> None:
    lines = [*as_jsonl(DOCUMENTS).splitlines(), b'{"text": 5}', *as_jsonl(DOCUMENTS).splitlines()]
    (tmp_path / "train.jsonl").write_bytes(b"\n".join(lines))
    told = (
        r"^source: the dataset .* cannot be loaded .*Column\(/text\) changed from string to number"
    )
    with pytest.raises(CorpusError, match=told):
        of_dataset(tmp_path)


def test_a_folder_of_save_to_disk_is_told_a_command_that_makes_it_a_corpus(tmp_path: Path) -> None:
    (folder := tmp_path / "saved").mkdir()
    (folder / "state.json").write_text("{}")
    with refused(CorpusError, r"save_to_disk; .*python -c .*to_parquet"):
        check_source(source_of(None, dataset=str(folder)))


@pytest.mark.parametrize(
    ("content", "split", "named"),
    [
        (None, "train", "folder"),
        (b'{"text": "a"}\n', "nosuch", "nosuch"),
        (b'{"text": "a"}\n{"text": "\n', "train", ""),
    ],
    ids=["no folder", "no such split", "damaged"],
)
def test_a_dataset_that_cannot_be_read_is_named(
    tmp_path: Path, content: bytes | None, split: str, named: str
) -> None:
    folder = tmp_path / "folder"
    if content is not None:
        folder.mkdir()
        (folder / "train.jsonl").write_bytes(content)
    with pytest.raises(CorpusError) as caught:
        of_dataset(folder, split=split)
    message = str(caught.value)
    assert (
        message.startswith(f"source: the dataset {folder}")
        and named in message
        and "\n" not in message
    )
