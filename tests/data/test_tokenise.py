from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from scale_cli.config.sources import ReadingConfig, TextSource
from scale_cli.data import encoding, tokenise
from scale_cli.data.encoding import Document, Encoder, TokenizerSpec, encode_all
from scale_cli.data.tokens import TokenCache, TokenisedCorpus
from scale_cli.errors import RunError
from scale_cli.storage.atomic import verify_folder

TEXTS = [f"Once upon a time there were {i} cats. 고양이 {i}마리." for i in range(400)]


@pytest.fixture(scope="module")
def tokenizer(shared_data: Path) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(shared_data / "ckpt-stories260K" / "hf")
    return loaded


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is 10 documents, and progress is recorded about every 30."""
    monkeypatch.setattr(encoding, "_CHUNK_DOCUMENTS", 10)
    monkeypatch.setattr(tokenise, "_TOKENS_A_SHARD", 1000)


def write_corpus(folder: Path) -> TextSource:
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    return TextSource(name="source", path=str(path), language="ko")


def make(source: TextSource, tokenizer: PreTrainedTokenizerBase, cache: Path, num_workers: int = 1) -> TokenisedCorpus:
    return TokenCache(cache, tokenizer, ReadingConfig(num_workers=num_workers)).open(source)


def contents(folder: Path) -> dict[str, bytes]:
    verify_folder(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("num_workers", [2, 3])
def test_the_bytes_are_the_same_whatever_the_number_of_workers(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, num_workers: int
) -> None:
    source = write_corpus(tmp_path)
    alone = make(source, tokenizer, tmp_path / "alone")
    together = make(source, tokenizer, tmp_path / "together", num_workers)
    assert contents(together.folder) == contents(alone.folder)
    assert [folder.name for folder in (tmp_path / "together").iterdir()] == [together.folder.name]
    assert not multiprocessing.active_children()


class Killed(BaseException):
    pass


@pytest.mark.usefixtures("small_parts")
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(survived=st.lists(st.integers(0, 39), max_size=3), torn=st.binary(max_size=20), data=st.data())
def test_a_run_goes_on_from_what_was_certain_however_it_was_killed(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: PreTrainedTokenizerBase,
    survived: list[int],
    torn: bytes,
    data: st.DataObject,
) -> None:
    """Killed after some chunks, any number of times, with bytes half written after what was recorded."""
    folder = tmp_path_factory.mktemp("killed")
    source = write_corpus(folder)
    whole = contents(make(source, tokenizer, folder / "whole").folder)
    encode, record = Encoder.encode, tokenise._Shards._record
    certain = 0
    for num_chunks in survived:
        calls = iter(range(num_chunks))
        with pytest.MonkeyPatch.context() as patch:

            def dying(self: Encoder, texts: list[Document], calls: Iterator[int] = calls) -> encoding.Encoded:
                if next(calls, None) is None:
                    patch.setattr(tokenise._Shards, "_record", lambda _: None)  # a kill leaves no time for it
                    raise Killed
                return encode(self, texts)

            patch.setattr(Encoder, "encode", dying)
            with suppress(Killed):  # or it has enough time
                make(source, tokenizer, folder / "cache")
        assert tokenise._Shards._record is record
        for place in (folder / "cache").glob(".*.unfinished"):
            name = data.draw(st.sampled_from(sorted(file.name for file in place.iterdir())))
            with (place / name).open("ab") as file:
                file.write(torn)
        for progress in (folder / "cache").glob(".*.progress.json"):
            now = json.loads(progress.read_text())["documents"]
            assert certain <= now
            certain = now
    read: list[int] = []

    def counting(self: Encoder, texts: list[Document]) -> encoding.Encoded:
        read.append(len(texts))
        return encode(self, texts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Encoder, "encode", counting)
        corpus = make(source, tokenizer, folder / "cache")
    assert contents(corpus.folder) == whole
    assert sum(read) in (len(TEXTS) - certain, 0)
    assert [entry.name for entry in (folder / "cache").iterdir()] == [corpus.folder.name]


@pytest.mark.parametrize("damage", ["missing", "short", "progress"])
@pytest.mark.usefixtures("small_parts")
def test_unfinished_work_that_is_damaged_is_begun_again(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    source = write_corpus(tmp_path)
    whole = contents(make(source, tokenizer, tmp_path / "whole").folder)
    with monkeypatch.context() as patch:
        patch.setattr(tokenise, "publish_folder", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            make(source, tokenizer, tmp_path / "cache")
    [unfinished] = (tmp_path / "cache").glob(".*.unfinished")
    [progress] = (tmp_path / "cache").glob(".*.progress.json")
    if damage == "missing":
        (unfinished / "tokens.bin").unlink()
    elif damage == "short":
        os.truncate(unfinished / "offsets.bin", 80)
    else:
        progress.write_text("{")
    assert contents(make(source, tokenizer, tmp_path / "cache").folder) == whole


SCRIPT = """
import sys
from pathlib import Path

if __name__ == "__main__":  # workers import this file too
    from scale_cli.config.sources import ReadingConfig
    from scale_cli.config.sources import TextSource
    from scale_cli.data import encoding, tokenise

    path, tokenizer, folder = sys.argv[1:]
    tokenise._TOKENS_A_SHARD, encoding._CHUNK_BYTES = 10_000, 10_000
    source = TextSource(name="source", path=path, language="en")
    spec = encoding.TokenizerSpec(Path(tokenizer).read_text(encoding="utf-8"), (1,), (2,), "uint16")
    tokenise.tokenise(source, spec, Path(folder), ReadingConfig(num_workers=2), show_progress=False)
"""


def children_of(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(child) for child in listed.stdout.split()]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition: Any) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_killed_by_the_system_it_leaves_no_process_and_goes_on_where_it_was(tmp_path: Path, shared_data: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    stories = shared_data / "en-tinystories/tinystories_val.txt"
    tokenizer = shared_data / "ckpt-stories260K/hf/tokenizer.json"
    command = [sys.executable, str(tmp_path / "script.py"), str(stories), str(tokenizer), str(tmp_path / "killed")]
    killed = subprocess.Popen(command)
    progress = tmp_path / ".killed.progress.json"
    wait_until(progress.exists)
    children = children_of(killed.pid)
    assert len(children) >= 2
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    wait_until(lambda: all(gone(child) for child in children))
    assert not (tmp_path / "killed").exists()
    assert json.loads(progress.read_text())["tokens"] > 0
    source = TextSource(name="source", path=str(stories), language="en")
    spec = TokenizerSpec(tokenizer.read_text(encoding="utf-8"), (1,), (2,), "uint16")
    for name in ("killed", "whole"):
        tokenise.tokenise(source, spec, tmp_path / name, ReadingConfig(num_workers=1), show_progress=False)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert not progress.exists()


def documents_of(texts: list[str]) -> Iterator[Document]:
    return (Document(text, len(text.encode(errors="replace"))) for text in texts)


def spec(tokenizer: PreTrainedTokenizerBase) -> TokenizerSpec:
    return TokenizerSpec(tokenizer.backend_tokenizer.to_str(), (1,), (), "uint16")


@pytest.mark.usefixtures("small_parts")
def test_a_worker_that_fails_or_dies_is_one_error_here(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(RunError, match=r"^tokenising failed: .*$"):
        list(encode_all(documents_of([*TEXTS[:25], "\ud800", *TEXTS]), spec(tokenizer), 2))
    assert not multiprocessing.active_children()
    encoded = encode_all(documents_of(TEXTS * 20), spec(tokenizer), 2)
    next(encoded)
    for child in multiprocessing.active_children():
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(RunError, match=re.escape("corpus.num_workers")):
        list(encoded)


def test_a_chunk_ends_at_its_bytes_whatever_the_script(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_CHUNK_BYTES", 300)
    for text in ("a" * 30, "가" * 10):
        encoded = encode_all(documents_of([text] * 25), spec(tokenizer), 1)
        assert [len(part.num_bytes) for part in encoded] == [10, 10, 5]


def test_texts_are_read_a_few_chunks_ahead_at_the_most(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_CHUNK_DOCUMENTS", 10)
    read = 0

    def reading() -> Iterator[Document]:
        nonlocal read
        for document in documents_of(TEXTS):
            read += 1
            yield document

    ahead = [read - 10 * done for done, _ in enumerate(encode_all(reading(), spec(tokenizer), 2))]
    assert len(ahead) == 40
    assert max(ahead) <= 80
    assert max(ahead[8:]) <= 10 * (2 * 2 + 1)


def test_two_that_want_the_same_corpus_make_it_once(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    source = write_corpus(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda _: make(source, tokenizer, tmp_path / "cache"), range(4)))
    assert len({corpus.folder for corpus in made}) == 1
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [made[0].folder.name]
    assert len({corpus.ids.tobytes() for corpus in made}) == 1


WORDS = [f"{number:02}" + "w" * 598 for number in range(100)]  # each a document, and a token
PEAKS = """
import json, os, re, sys
from pathlib import Path

from tokenizers import Tokenizer, models
from scale_cli.config.sources import ReadingConfig, TextSource
from scale_cli.data import encoding, tokenise

corpora, words = json.loads(sys.argv[1]), sys.argv[2:]
tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, words[0]))
spec = encoding.TokenizerSpec(tokenizer.to_str(), (), (0,), "uint16")
for paths in corpora:
    if child := os.fork():  # each form in a process of its own, whose allocators have kept nothing yet
        assert os.waitpid(child, 0)[1] == 0
        continue
    for path in paths:
        source = TextSource(name="source", path=path, language="en")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here, without that of the imports
        tokenise.tokenise(source, spec, Path(path + ".tokens"), ReadingConfig(num_workers=1), show_progress=False)
        print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1], flush=True)
    os._exit(0)
"""


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """Not with its text, and not with its number of documents."""
    lengths = (20_000, 120_000)  # the first fills the allocators' own caches
    corpora = [[str(tmp_path / f"{length}.{form}") for length in lengths] for form in ("txt.gz", "jsonl", "parquet")]
    for length, (text, lines, table) in zip(lengths, zip(*corpora, strict=True), strict=True):
        texts = WORDS * (length // len(WORDS))
        Path(text).write_bytes(gzip.compress("\n\n".join(texts).encode(), 1))
        Path(lines).write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
        columns = pa.table({"text": texts})
        pa.parquet.write_table(columns, table, row_group_size=length, use_dictionary=False, compression="none")
    command = [sys.executable, "-c", PEAKS, json.dumps(corpora), *WORDS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peaks_kib = list(map(int, done.stdout.split()))
    for small_kib, large_kib in zip(peaks_kib[::2], peaks_kib[1::2], strict=True):
        assert (large_kib - small_kib) * 1024 < 600 * (lengths[1] - lengths[0]) / 4  # allocators keep some
