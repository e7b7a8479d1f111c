"""Tokenising: the same bytes whatever the workers, the machines and the kills."""

import json
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from scale_cli.config.sources import ReadingConfig, TextSource
from scale_cli.data import encoding, files, tokens
from scale_cli.data.encoding import Document, Encoded, Encoder, encode_all
from scale_cli.data.tokens import PARTS, TokenCache, TokenisedCorpus
from scale_cli.errors import CorpusError, RunError
from scale_cli.processes import Share
from scale_cli.storage import atomic
from scale_cli.storage.atomic import read_json, verify_folder
from tests.data.corpus_files import source_of

Written = tuple[TextSource, dict[str, bytes]]
TEXTS = [f"Once upon a time there were {i} cats. 고양이 {i}마리." for i in range(400)]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is 3 documents, a part of a source about 600 bytes, and progress is recorded about
    every 100 tokens.
    """
    monkeypatch.setattr(files, "_PART_BYTES", 600)
    monkeypatch.setattr(encoding, "_CHUNK_DOCUMENTS", 3)
    monkeypatch.setattr(tokens, "_TOKENS_BETWEEN_RECORDS", 100)


def write_files(folder: Path, num_files: int = 6) -> TextSource:
    """Write files of different lengths, some without a document, two of the same text, with bad
    records between.
    """
    for number in range(num_files):
        lines = [
            json.dumps({"text": f"{number} cats and {line} dogs. 고양이 {line}마리."})
            for line in range(3 * number)
        ]
        if number % 3 == 1:
            lines[1:1] = ["{", '{"text": 1}']
        (folder / f"{number:02}.jsonl").write_text("".join(line + "\n" for line in lines))
    (folder / f"{num_files:02}.jsonl").write_bytes(
        (folder / f"{num_files - 1:02}.jsonl").read_bytes()
    )
    (folder / "empty.jsonl").write_text("\n")
    (folder / "tales.txt").write_text("Once upon a time.\n\nThe end.\n")
    return source_of([str(folder / "*.jsonl"), str(folder / "*.txt")])


@dataclass(frozen=True)
class Tokenising:
    """What tokenises in this process, as one of several that share the work or alone."""

    tokenizer: PreTrainedTokenizerBase

    def cache(self, folder: Path, num_workers: int = 1) -> TokenCache:
        reading = ReadingConfig(num_workers=num_workers, max_bad_fraction=1.0)
        return TokenCache(folder, self.tokenizer, reading)

    def make(self, source: TextSource, cache: Path, num_workers: int = 1) -> TokenisedCorpus:
        return self.cache(cache, num_workers).open(source)

    def make_part(self, source: TextSource, cache: Path, index: int, number: int) -> None:
        self.cache(cache).tokenise_parts(source, Share(index, number))


@pytest.fixture(scope="module")
def by(tokenizer: PreTrainedTokenizerBase) -> Tokenising:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '[' + m.role + '] ' + m.content }}{% endfor %}"
    )
    return Tokenising(tokenizer)


def contents(cache: Path) -> dict[str, bytes]:
    """Return every file of a cache in which there is nothing but one tokenised source."""
    [folder] = [entry for entry in cache.iterdir() if entry.name not in (PARTS, ".sources.json")]
    verify_folder(folder)
    assert not list((cache / PARTS).glob("[!.]*"))
    return {f"{folder.name}/{file.name}": file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, by: Tokenising) -> Written:
    """Files, and what one process makes of them."""
    folder = tmp_path_factory.mktemp("one")
    source = write_files(folder)
    by.make(source, folder / "cache")
    return source, contents(folder / "cache")


# The same bytes


@pytest.mark.parametrize(("num_wanting", "num_workers"), [(1, 2), (4, 1)])
def test_the_bytes_are_the_same_whatever_the_number_of_workers_or_of_those_that_want_them_at_once(
    tmp_path: Path,
    by: Tokenising,
    written: Written,
    num_wanting: int,
    num_workers: int,
) -> None:
    source, by_one = written
    with ThreadPoolExecutor(num_wanting) as threads:
        list(threads.map(lambda _: by.make(source, tmp_path, num_workers), range(num_wanting)))
    assert contents(tmp_path) == by_one
    assert not multiprocessing.active_children()


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(number=st.integers(1, 5), data=st.data())
def test_the_bytes_are_one_process_s_whatever_the_number_of_tasks_and_whichever_of_them_ran(
    tmp_path_factory: pytest.TempPathFactory,
    by: Tokenising,
    written: Written,
    number: int,
    data: st.DataObject,
) -> None:
    cache = tmp_path_factory.mktemp("parts")
    (source, by_one) = written
    for index in data.draw(st.lists(st.integers(0, number - 1), unique=True)):
        by.make_part(source, cache, index, number)
    by.make(source, cache)
    assert contents(cache) == by_one


def test_conversations_learn_the_same_tokens_in_parts(tmp_path: Path, by: Tokenising) -> None:
    for number in range(6):
        turns = [
            {"role": role, "content": f"{role} {number} speaks"} for role in ("user", "assistant")
        ]
        (tmp_path / f"{number}.jsonl").write_text(
            (json.dumps({"messages": turns}) + "\n") * 7 * number
        )
    source = source_of(tmp_path / "*.jsonl", messages_field="messages")
    one = by.make(source, tmp_path / "one")
    by.make_part(source, tmp_path / "many", 0, 2)
    by.make(source, tmp_path / "many")
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
    assert one.learned is not None and one.ledger.num_targets == one.learned[1:].sum()


class Killed(BaseException):
    pass


def written_by(act: Callable[[], object], most_chunks: int = 10**6) -> int:
    """Do something that is killed after it has written some chunks, if it comes so far; return how
    many documents it tokenises, or copies out of a part.
    """
    written = list[int]()
    append = tokens._Columns.append
    chunks = iter(range(most_chunks))
    with pytest.MonkeyPatch.context() as patch:

        def dying(self: tokens._Columns, part: Encoded) -> None:
            if next(chunks, None) is None:
                # A kill leaves no time for it.
                patch.setattr(tokens._Columns, "_record", lambda _: None)
                raise Killed
            written.extend(part.lengths.tolist())
            append(self, part)

        patch.setattr(tokens._Columns, "append", dying)
        with suppress(Killed):
            act()
    return len(written)


def documents_recorded(cache: Path, kind: str) -> int:
    """Return how many documents of an unfinished source are certain."""
    return sum(read_json(record)["documents"] for record in cache.glob(f".*.{kind}.json"))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tries=st.lists(st.tuples(st.sampled_from([None, 0, 1]), st.integers(0, 15)), max_size=4),
    in_parts=st.booleans(),
    joined=st.integers(0, 5),
    torn=st.binary(max_size=20),
)
def test_however_it_was_killed_it_goes_on_from_what_was_certain(
    tmp_path_factory: pytest.TempPathFactory,
    by: Tokenising,
    written: Written,
    tries: list[tuple[int | None, int]],
    in_parts: bool,
    joined: int,
    torn: bytes,
) -> None:
    """Alone, in a part, or while parts are joined; with bytes half written after what was recorded."""
    cache = tmp_path_factory.mktemp("killed")
    (source, by_one) = written
    alone = partial(by.make, source, cache)
    finished_parts: list[tuple[int | None, int]] = [(0, 10**6), (1, 10**6), (None, joined)]
    kind = "joined" if in_parts else "progress"
    certain = 0
    for share, num_chunks in tries + finished_parts * in_parts:
        if share is not None and by.cache(cache).open_if_there(source):
            continue  # nobody prepares a part of what is whole
        if share is None:
            written_by(alone, num_chunks)
        else:
            written_by(partial(by.make_part, source, cache, share, 2), num_chunks)
        for file in cache.rglob(".*.unfinished/*"):
            file.write_bytes(file.read_bytes() + torn)
        now = documents_recorded(cache, kind)
        assert certain <= now or contents(cache)
        certain = now
    num_written = written_by(alone)
    assert contents(cache) == by_one
    if in_parts or not (cache / PARTS).exists():
        assert num_written in (len(alone()) - certain, 0), (
            "parts that are joined are not copied again"
        )
    assert {entry.name for entry in cache.iterdir()} <= {
        PARTS,
        *(name.partition("/")[0] for name in by_one),
    }


@pytest.mark.parametrize(
    "damaged", ["unfinished/tokens.bin", "unfinished/offsets.bin", "progress.json"]
)
def test_unfinished_work_that_is_damaged_is_begun_again(
    tmp_path: Path, by: Tokenising, written: Written, damaged: str
) -> None:
    source, by_one = written
    written_by(lambda: by.make(source, tmp_path), 12)
    assert documents_recorded(tmp_path, "progress")
    [file] = tmp_path.glob(f".*.{damaged}")
    os.truncate(file, 8)
    by.make(source, tmp_path)
    assert contents(tmp_path) == by_one


# Who does what


def test_a_task_reads_its_own_files_alone_and_what_all_have_made_is_joined_and_not_tokenised(
    tmp_path: Path, by: Tokenising, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_files(tmp_path)
    opened = list[str]()
    sha256 = atomic.file_sha256

    def noted(path: Path, _moved: object) -> str:
        opened.append(path.name)
        return sha256(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "file_sha256", noted)
        for index in range(3):
            by.make_part(source, tmp_path / "cache", index, 3)
    assert sorted(opened) == sorted(Path(file.name).name for file in files.source_files(source))
    monkeypatch.setattr(Encoder, "encode", None)
    with ThreadPoolExecutor(3) as threads:
        made = list(threads.map(lambda _: by.make(source, tmp_path / "cache"), range(3)))
    assert len({corpus.ids.tobytes() for corpus in made}) == 1


@pytest.mark.parametrize("counted", [{"skip_documents": 7}, {"max_documents": 20}])
def test_where_documents_are_counted_one_process_reads_all(
    tmp_path: Path, by: Tokenising, counted: dict[str, int]
) -> None:
    by.make_part(write_files(tmp_path).model_copy(update=counted), tmp_path / "many", 0, 2)
    assert not (tmp_path / "many").exists()


def test_a_source_without_text_is_refused_when_its_parts_are_joined(
    tmp_path: Path, by: Tokenising
) -> None:
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_text("{\n" * 600)
    source = source_of(tmp_path / "*.jsonl")
    by.make_part(source, tmp_path / "cache", 0, 1)
    with pytest.raises(CorpusError, match="no document with text"):
        by.make(source, tmp_path / "cache")


def test_a_changed_file_is_tokenised_again_and_the_other_parts_are_joined(
    tmp_path: Path, by: Tokenising
) -> None:
    source = write_files(tmp_path)
    by.make_part(source, tmp_path / "many", 0, 1)
    assert len(list((tmp_path / "many" / PARTS).iterdir())) > 2
    with (tmp_path / "07.jsonl").open("a") as file:
        file.write('{"text": "A new one."}\n')
    many = by.make(source, tmp_path / "many").folder
    [_left] = (tmp_path / "many" / PARTS).iterdir()  # of the file as it was
    one = by.make(source, tmp_path / "one").folder
    assert all((many / file.name).read_bytes() == file.read_bytes() for file in one.iterdir())


# Workers


def documents_of(texts: list[str]) -> Iterator[Document]:
    return (Document(text, len(text.encode(errors="replace"))) for text in texts)


def test_a_worker_that_fails_or_dies_is_one_error_here(by: Tokenising) -> None:
    encoder = Encoder(by.tokenizer, conversations=False)
    with pytest.raises(RunError, match=r"^tokenising failed: .*$"):
        list(encode_all(documents_of([*TEXTS[:25], "\ud800", *TEXTS]), encoder, 2))
    assert not multiprocessing.active_children()
    encoded = encode_all(documents_of(TEXTS * 20), encoder, 2)
    next(encoded)
    for child in multiprocessing.active_children():
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(RunError, match=re.escape("corpus.num_workers")):
        list(encoded)
