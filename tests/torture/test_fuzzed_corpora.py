"""Corpora that were damaged on purpose: each is a cache that adds up, or one clean error before the model loads."""

import io
import json
import os
import resource
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from scale_cli.storage.atomic import read_json
from tests.command_line import Scale
from tests.data.corpus_files import COMPRESSORS, dropped, kept, records
from tests.small_runs import write_config
from tests.torture.verbs import FORKS, PATIENCE_S

LIMIT = 2000  # corpus.max_document_bytes


# Text as it may stand in each format: a .txt has lines, of which a blank one ends a document.
CHARACTERS = st.characters(exclude_categories=["Cs", "Cc"])
PARAGRAPHS = st.text(CHARACTERS | st.just("\n"), min_size=1, max_size=60).map(
    lambda text: "\n".join(line for line in text.split("\n") if line.strip()).removeprefix("\ufeff")
)
STRINGS = st.text(CHARACTERS | st.sampled_from("\n\t\r\x1b\x7f"), min_size=1, max_size=60)
TEXTS = {
    form: texts.filter(str.strip)
    for form, texts in {".txt": PARAGRAPHS, ".jsonl": STRINGS, ".parquet": STRINGS}.items()
}
# Records that are none, of a .jsonl.
BAD_LINES = [
    b"{", b"[]", b"null", b'{"txt": "a"}', b'{"text": 1}', b'{"text": null}', b'{"text": ["a"]}', b'{"text": ""}',
    b'{"text": "a\\u0000b"}', b'{"text": "\\ud800"}', b"\xff\xfe", b"\0", b"[" * 3000, b'{"a":' * 3000,
    b'{"text": "' + b"x" * (LIMIT + 1) + b'"}', b'{"text": "' + b"y" * 9 * LIMIT + b'"}', b"9" * 5000,
    b'{"text": "a"} {"text": "b"}', b'{"n": ' + b"1" * 5000 + b', "text": "a"}', b"'text'", b'{"text": NaN}',
]  # fmt: skip
GOOD_LINES = [
    (b'{"text": "a", "n": NaN}', "a"),
    (b'{"text": "a", "text": "b"}', "b"),  # as every JSON reader has it
    (b'  {"text" : "\\u00e9"}\r', "é"),
    (b'{"text": "\\ud83d\\ude00", "n": 1e999}', "\U0001f600"),
]


@dataclass(frozen=True)
class Fuzzed:
    """A file and what is known of it."""

    name: str
    content: bytes
    kept: (
        list[str] | None
    )  # the documents, if it is read as whole; None: the damage may have changed them unnoticed
    num_dropped: int | None = 0  # records in it that are no documents; None: not known
    cut: bool = (
        False  # it has to be called damaged, and what is read are the first of `kept`, unchanged
    )


def parquet(texts: Any, **options: Any) -> bytes:
    sink = io.BytesIO()
    pa.parquet.write_table(pa.table({"text": texts}), sink, **options)
    return sink.getvalue()


@st.composite
def whole_files(draw: st.DrawFn) -> Fuzzed:
    """A file of documents, with bad records among them where the format can have any."""
    form = draw(st.sampled_from(sorted(TEXTS)))
    compression = "" if form == ".parquet" else draw(st.sampled_from(sorted(COMPRESSORS)))
    texts, num_bad = draw(st.lists(TEXTS[form], min_size=1, max_size=8)), 0
    newline = draw(st.sampled_from(["\n", "\r\n"])) if form == ".txt" else "\n"
    if form == ".jsonl":
        ascii_only = draw(st.booleans())
        lines: list[tuple[bytes, str | None]]
        lines = [
            (json.dumps({"text": text}, ensure_ascii=ascii_only).encode(), text) for text in texts
        ]
        bad = draw(st.lists(st.sampled_from(BAD_LINES), max_size=3))
        lines += [(line, None) for line in bad] + draw(
            st.lists(st.sampled_from(GOOD_LINES), max_size=1)
        )
        draw(st.randoms(use_true_random=False)).shuffle(lines)
        content, num_bad = b"\n".join(line for line, _ in lines) + b"\n", len(bad)
        texts = [text for _, text in lines if text is not None]
    elif form == ".parquet":
        options = {
            "compression": draw(st.sampled_from(["none", "snappy", "zstd"])),
            "row_group_size": 3,
        }
        dictionary = draw(st.booleans())
        content = parquet(pa.array(texts).dictionary_encode() if dictionary else texts, **options)
    else:
        content = (newline * 2).join(text.replace("\n", newline) for text in texts).encode()
        texts = [text.replace("\n", newline) for text in texts]
    if form != ".parquet" and draw(st.booleans()):
        content = b"\xef\xbb\xbf" + content
    return Fuzzed(f"x{form}{compression}", COMPRESSORS[compression](content), texts, num_bad)


@st.composite
def cut_files(draw: st.DrawFn) -> Fuzzed:
    """A compressed file that ends too early, or goes on with something that is none."""
    file = draw(whole_files().filter(lambda file: file.name.endswith((".gz", ".xz", ".zst"))))
    if draw(st.booleans()):
        content = file.content[: draw(st.integers(1, len(file.content) - 1))]
        return Fuzzed(file.name, content, file.kept, None, cut=True)
    after = file.content[:10] + b"damaged" + file.content[10:]
    return Fuzzed(file.name, file.content + after, file.kept, None, cut=True)


@st.composite
def broken_files(draw: st.DrawFn) -> Fuzzed:
    """A file with other bytes somewhere, or under another's name, or of bytes alone."""
    file = draw(whole_files())
    how = draw(st.sampled_from(["bytes", "flip", "flip", "insert", "name", "columns"]))
    content = bytearray(file.content)
    rng = draw(st.randoms(use_true_random=False))
    if how == "bytes":
        return Fuzzed(file.name, draw(st.binary(max_size=500)), None, None)
    if how == "name":
        other = draw(whole_files())
        return Fuzzed(other.name, file.content, None, None)
    if how == "columns":
        columns: list[Any] = [[1, 2], [None, None], [["a"], []], [{"a": 1}], [1.5], [True]]
        columns += [[b"\xff", b"a"]]
        columns += [pa.array([2**62, 1], pa.timestamp("ns")), pa.array([2**62], pa.duration("s"))]
        columns += [pa.array([10**9], pa.date32()), pa.array([2**60], pa.time64("ns"))]
        array = draw(st.sampled_from(columns))
        return Fuzzed("x.parquet", parquet(array), [], len(array))
    for _ in range(draw(st.integers(1, 4))):
        at = rng.randrange(len(content))
        if how == "flip":
            content[at] ^= 1 << rng.randrange(8)
        else:
            content[at:at] = rng.randbytes(rng.randrange(1, 20))
    # A checksum tells; a file that was read as whole is what it was.
    known = file.name.endswith((".gz", ".xz")) and how == "flip"
    return Fuzzed(file.name, bytes(content), file.kept if known else None, None)


def check_cache(cache: Path) -> dict[str, Any] | None:
    """Hold whatever lies in a cache to its ledger, without the product's own code; return the ledger."""
    if not cache.is_dir() or not any(cache.iterdir()):
        return None
    (folder,) = cache.iterdir()
    assert not folder.name.startswith("."), "something half-written was left"
    ledger: dict[str, Any] = json.loads((folder / "ledger.json").read_text())
    sizes = np.fromfile(folder / "num_bytes.bin", np.int64)
    offsets = np.fromfile(folder / "offsets.bin", np.int64)
    for key in ("documents", "num_bytes"):
        dropped = sum(count[key] for count in ledger["dropped"].values())
        assert ledger["read"][key] == ledger["kept"][key] + dropped
    assert (len(sizes), sizes.sum()) == (ledger["kept"]["documents"], ledger["kept"]["num_bytes"])
    assert (offsets[0], len(offsets)) == (0, len(sizes) + 1)
    assert ledger["num_tokens"] == offsets[-1] == (folder / "tokens.bin").stat().st_size // 2
    return ledger


def check_documents(
    file: Fuzzed, cache: Path, path: Path, num_damaged: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Hold the cached tokens to the texts that the generator put in; where it does not know, to the reader's."""
    read = kept(records(path, LIMIT))
    (folder,) = cache.iterdir()
    ids = np.fromfile(folder / "tokens.bin", np.uint16)
    offsets = np.fromfile(folder / "offsets.bin", np.int64)
    for text, start, end in zip(read, offsets[:-1], offsets[1:], strict=True):
        encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert ids[start + 1 : end - 1].tolist() == encoded
    if file.cut:
        assert file.kept is not None and read == file.kept[: len(read)]
    elif (
        file.kept is not None and not num_damaged
    ):  # a checksum at the end tells of what has been read by then
        assert read == file.kept


def write_config_of(path: Path, folder: Path, base: Path, max_bad_fraction: float = 0.001) -> Path:
    sources = [{"name": "x", "path": str(path), "language": "en"}]
    reading = {"max_document_bytes": LIMIT, "max_bad_fraction": max_bad_fraction, "num_workers": 1}
    return write_config(folder, base, corpus={"sources": sources, **reading})


def test_fuzzed_corpora_add_up_or_end_in_one_clean_error(
    scale: Scale,
    stories: Path,
    in_full: bool,
    examples: Callable[[int, int], settings],
    record_property: Callable[[str, object], None],
) -> None:
    tokenizer, tokenised, refused = AutoTokenizer.from_pretrained(stories), list[str](), list[str]()

    @examples(500, 40)
    @given(whole_files() | cut_files() | broken_files(), st.sampled_from([0.001, 1.0]))
    def fuzz(file: Fuzzed, max_bad_fraction: float) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder, cache, path = Path(name), Path(name) / "run" / "tokens", Path(name) / file.name
            path.write_bytes(file.content)
            done = scale("prepare", write_config_of(path, folder, stories, max_bad_fraction))
            ledger = check_cache(cache)
            if done.exit_code == 0:
                assert ledger is not None
                assert not file.cut or ledger["num_damaged_files"] == 1
                check_documents(file, cache, path, ledger["num_damaged_files"], tokenizer)
                num_dropped = sum(count["documents"] for count in ledger["dropped"].values())
                assert file.num_dropped in (None, num_dropped)
            else:
                assert done.error().startswith(("x: ", f"x ({path}): "))
                assert not file.kept or file.num_dropped != 0 or file.cut, done.stderr
        (refused if done.exit_code else tokenised).append(file.name)

    fuzz()
    record_property("fuzzed corpora, tokenised and refused", f"{len(tokenised)}, {len(refused)}")
    assert tokenised and refused
    assert len({*tokenised, *refused}) == 9 or not in_full


@pytest.mark.parametrize(
    "kind", ["folder", "pipe", "/dev/zero", "absent", "x.jsonl", "/proc/self/mem"]
)
def test_what_is_no_file_is_refused_by_name(
    scale: Scale, stories: Path, tmp_path: Path, kind: str
) -> None:
    place = tmp_path / "corpus" / "x.jsonl"
    place.parent.mkdir()
    if kind == "folder":
        place.mkdir()
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(kind)
    for pattern in ("x.jsonl", "*.jsonl"):
        told = scale("prepare", write_config_of(place.parent / pattern, tmp_path, stories)).error()
        assert told.startswith(f"x: {place}")
    assert not (tmp_path / "run").exists()


def read_bombs(bombs: list[Path], told: Path) -> None:
    """In a process of its own: write down why each file's text was rejected, and by how much memory grew."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reasons = [reason.value for bomb in bombs for reason, _ in dropped(records(bomb, 1_000_000))]
    growth_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    told.write_text(json.dumps([reasons, growth_kib]))


def test_bombs_are_dropped_in_little_memory(tmp_path: Path, in_full: bool) -> None:
    """Files that unpack to more than a machine holds, made of many parts."""
    bombs = [tmp_path / name for name in ("x.txt.xz", "x.jsonl.gz", "x.txt.zst")]
    num_mib = 1024 if in_full else 128
    for bomb in bombs:
        bomb.write_bytes(COMPRESSORS[bomb.suffix](b" " * (1 << 20)) * num_mib)
    process = FORKS.Process(target=read_bombs, args=(bombs, tmp_path / "told.json"))
    process.start()
    process.join(PATIENCE_S)
    reasons, growth_kib = read_json(tmp_path / "told.json")
    assert reasons == ["too large"] * 3
    assert growth_kib < 64 * 1024
