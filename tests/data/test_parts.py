"""Many machines tokenise parts of a source's files; whoever opens the source joins them, to what one would write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from scale_cli.config.sources import ReadingConfig, TextSource
from scale_cli.data import encoding, files, tokenise
from scale_cli.data.encoding import Document, Encoded, Encoder
from scale_cli.data.tokens import PARTS, TokenCache, TokenisedCorpus
from scale_cli.errors import CorpusError
from scale_cli.processes import Share
from scale_cli.storage import atomic
from scale_cli.storage.atomic import verify_folder

Written = tuple[TextSource, dict[str, bytes]]
READING = ReadingConfig(num_workers=1, max_bad_fraction=1.0)


@pytest.fixture(scope="module")
def tokenizer(shared_data: Path) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(shared_data / "ckpt-stories260K" / "hf")
    loaded.chat_template = "{% for m in messages %}{{ '[' + m.role + '] ' + m.content }}{% endfor %}"
    return loaded


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is about 600 bytes, a chunk 3 documents, and progress is recorded about every 100 tokens."""
    monkeypatch.setattr(files, "_PART_BYTES", 600)
    monkeypatch.setattr(encoding, "_CHUNK_DOCUMENTS", 3)
    monkeypatch.setattr(tokenise, "_TOKENS_A_SHARD", 100)


def source_in(folder: Path, *patterns: str, **options: object) -> TextSource:
    paths = [str(folder / pattern) for pattern in patterns or ("*.jsonl", "*.txt")]
    return TextSource.model_validate({"name": "web", "path": paths, "language": "ko", **options})


def write_files(folder: Path, num_files: int = 6) -> TextSource:
    """Write files of different lengths, some without a document, two of the same text, with bad records between."""
    for number in range(num_files):
        lines = [
            json.dumps({"text": f"{number} cats and {line} dogs. 고양이 {line}마리."}) for line in range(3 * number)
        ]
        if number % 3 == 1:
            lines[1:1] = ["{", '{"text": 1}']
        (folder / f"{number:02}.jsonl").write_text("".join(line + "\n" for line in lines))
    (folder / f"{num_files:02}.jsonl").write_bytes((folder / f"{num_files - 1:02}.jsonl").read_bytes())
    (folder / "empty.jsonl").write_text("\n")
    (folder / "tales.txt").write_text("Once upon a time.\n\nThe end.\n")
    return source_in(folder)


def make(source: TextSource, tokenizer: PreTrainedTokenizerBase, cache: Path) -> TokenisedCorpus:
    return TokenCache(cache, tokenizer, READING).open(source)


def make_part(source: TextSource, tokenizer: PreTrainedTokenizerBase, cache: Path, index: int, number: int) -> None:
    TokenCache(cache, tokenizer, READING).tokenise_parts(source, Share(index, number))


def contents(cache: Path) -> dict[str, bytes]:
    """Return every file of a cache in which there is nothing but one tokenised source."""
    [folder] = [entry for entry in cache.iterdir() if entry.name not in (PARTS, ".sources.json")]
    verify_folder(folder)
    assert not list((cache / PARTS).glob("[!.]*"))
    return {f"{folder.name}/{file.name}": file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Written:
    """Files, and what one process makes of them."""
    folder = tmp_path_factory.mktemp("one")
    source = write_files(folder)
    make(source, tokenizer, folder / "cache")
    return source, contents(folder / "cache")


@settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(number=st.integers(1, 5), data=st.data())
def test_the_bytes_are_one_process_s_whatever_the_number_of_tasks_and_whichever_of_them_ran(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: PreTrainedTokenizerBase,
    written: Written,
    number: int,
    data: st.DataObject,
) -> None:
    cache, (source, by_one) = tmp_path_factory.mktemp("parts"), written
    for index in data.draw(st.lists(st.integers(0, number - 1), unique=True)):
        make_part(source, tokenizer, cache, index, number)
    make(source, tokenizer, cache)
    assert contents(cache) == by_one


def test_conversations_learn_the_same_tokens_in_parts(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    for number in range(6):
        turns = [{"role": role, "content": f"{role} {number} speaks"} for role in ("user", "assistant")]
        (tmp_path / f"{number}.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 7 * number)
    source = source_in(tmp_path, "*.jsonl", messages_field="messages")
    one = make(source, tokenizer, tmp_path / "one")
    make_part(source, tokenizer, tmp_path / "many", 0, 2)
    make(source, tokenizer, tmp_path / "many")
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
    assert one.learned is not None and one.ledger.num_targets == one.learned[1:].sum()


class Killed(BaseException):
    pass


@settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(survived=st.lists(st.integers(0, 12), min_size=1, max_size=2), alone_first=st.booleans())
def test_killed_in_a_part_or_while_they_are_joined_the_bytes_are_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: PreTrainedTokenizerBase,
    written: Written,
    survived: list[int],
    alone_first: bool,
) -> None:
    """Killed after some chunks, any number of times: tasks, what joins their parts, and who begins alone."""
    cache, (source, by_one) = tmp_path_factory.mktemp("killed"), written
    append = tokenise._Shards.append
    shares = [None, 0, 1, None] if alone_first else [0, 1, None]
    for share, num_chunks in ((share, number) for share in shares for number in (*survived, 10**6)):
        if any(cache.glob("web-*")):
            break
        if share is None and num_chunks == 10**6 and not list((cache / PARTS).glob("[!.]*")):
            continue  # it stays unfinished
        calls = iter(range(num_chunks))
        with pytest.MonkeyPatch.context() as patch:

            def dying(self: tokenise._Shards, part: Encoded, calls: Iterator[int] = calls) -> None:
                if next(calls, None) is None:
                    patch.setattr(tokenise._Shards, "_record", lambda _: None)  # a kill leaves no time for it
                    raise Killed
                append(self, part)

            patch.setattr(tokenise._Shards, "append", dying)
            with suppress(Killed):
                if share is None:
                    make(source, tokenizer, cache)
                else:
                    make_part(source, tokenizer, cache, share, 2)
    assert contents(cache) == by_one
    assert {entry.name for entry in cache.iterdir()} <= {PARTS, *(name.partition("/")[0] for name in by_one)}


def test_a_task_reads_its_own_files_alone(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_files(tmp_path)
    opened: list[str] = []
    sha256 = atomic.file_sha256

    def noted(path: Path) -> str:
        opened.append(path.name)
        return sha256(path)

    monkeypatch.setattr(files, "file_sha256", noted)
    for index in range(3):
        make_part(source, tokenizer, tmp_path / "cache", index, 3)
    assert sorted(opened) == sorted(Path(file.name).name for file in files.source_files(source))


def test_what_all_tasks_have_made_is_joined_and_not_tokenised(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_files(tmp_path)
    for index in range(2):
        make_part(source, tokenizer, tmp_path / "cache", index, 2)
    monkeypatch.setattr(Encoder, "encode", None)
    with ThreadPoolExecutor(3) as threads:
        made = list(threads.map(lambda _: make(source, tokenizer, tmp_path / "cache"), range(3)))
    assert len({corpus.ids.tobytes() for corpus in made}) == 1


def test_a_part_that_goes_while_one_looks_at_it_is_not_there(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has joined it, and removes it between its description and its files."""
    make_part(write_files(tmp_path), tokenizer, tmp_path / "cache", 0, 1)
    part = next((tmp_path / "cache" / PARTS).glob("[!.]*"))
    assert tokenise.is_tokenised(part)
    described = atomic.described_files(part)
    monkeypatch.setattr(tokenise, "described_files", lambda _: described)
    shutil.rmtree(part)
    assert not tokenise.is_tokenised(part)


@pytest.mark.parametrize("counted", [{"skip_documents": 7}, {"max_documents": 20}])
def test_where_documents_are_counted_one_process_reads_all(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, counted: dict[str, int]
) -> None:
    source = write_files(tmp_path).model_copy(update=counted)
    make(source, tokenizer, tmp_path / "one")
    make_part(source, tokenizer, tmp_path / "many", 0, 2)
    assert not (tmp_path / "many").exists()
    make(source, tokenizer, tmp_path / "many")
    assert contents(tmp_path / "many") == contents(tmp_path / "one")


def test_a_source_without_text_is_refused_when_its_parts_are_joined(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_text("{\n" * 600)
    source = source_in(tmp_path, "*.jsonl")
    make_part(source, tokenizer, tmp_path / "cache", 0, 1)
    with pytest.raises(CorpusError, match="no document with text"):
        make(source, tokenizer, tmp_path / "cache")


def test_a_changed_file_is_tokenised_again_and_the_other_parts_are_not(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_files(tmp_path)
    make_part(source, tokenizer, tmp_path / "many", 0, 1)
    with (tmp_path / "07.jsonl").open("a") as file:
        file.write('{"text": "A new one."}\n')
    encoded: list[Document] = []
    encode = Encoder.encode

    def noted(self: Encoder, texts: list[Document]) -> Encoded:
        encoded.extend(texts)
        return encode(self, texts)

    monkeypatch.setattr(Encoder, "encode", noted)
    make(source, tokenizer, tmp_path / "many")
    assert 0 < len(encoded) < 30
    assert len(list((tmp_path / "many" / PARTS).iterdir())) == 1  # of the file as it was
    make(source, tokenizer, tmp_path / "one")
    (name,) = (entry.name for entry in (tmp_path / "one").iterdir())
    assert {file.name: file.read_bytes() for file in (tmp_path / "many" / name).iterdir()} == {
        file.name: file.read_bytes() for file in (tmp_path / "one" / name).iterdir()
    }
