from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from scale_cli.config.sources import ReadingConfig, TextSource
from scale_cli.data.tokens import DocumentMarkers, TokenisedCorpus, tokenised, tokenizer_sha256
from scale_cli.errors import CorpusError

# One has BOS and EOS, the other EOS alone.
CHECKPOINTS = ("ckpt-stories260K", "ckpt-eltec")
TEXTS = ["Once upon a time,\nthere was a cat.", "옛날 옛적에", "The end."]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def tokenizer(request: pytest.FixtureRequest, shared_data: Path) -> PreTrainedTokenizerBase:
    return load(shared_data / request.param / "hf")


def load(folder: Path) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return loaded


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "body": text[::-1]}) + "\n" for text in texts), encoding="utf-8")
    return path


def open_corpus(path: Path | str, tokenizer: PreTrainedTokenizerBase, cache: Path, **options: Any) -> TokenisedCorpus:
    reading = options.pop("reading", None)
    source = TextSource(name="source", path=str(path), language="ko", **options)
    return tokenised(source, tokenizer, cache, show_progress=False, reading=reading)


def written_at(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}


# Content


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(TEXT, min_size=1, max_size=8).filter(lambda texts: any(text.strip() for text in texts)))
def test_the_stream_is_every_document_tokenised_alone_and_framed(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase, texts: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("stream")
    path, reading = write_jsonl(folder / "corpus.jsonl", texts), ReadingConfig(max_bad_fraction=1.0)
    corpus = open_corpus(path, tokenizer, folder / "cache", reading=reading)
    kept = [text for text in texts if text.strip()]
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    framed = [bos + tokenizer.encode(text, add_special_tokens=False) + eos for text in kept]
    assert len(corpus) == len(kept)
    assert [corpus.document(i).tolist() for i in range(len(corpus))] == framed
    assert corpus.ids.tolist() == [token for document in framed for token in document]
    assert corpus.num_bytes.tolist() == [len(text.encode()) for text in kept]


def test_more_documents_than_are_tokenised_at_once_keep_their_order(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    texts = [f"document {i}" if i % 7 else "" for i in range(1500)]
    path, reading = write_jsonl(tmp_path / "corpus.jsonl", texts), ReadingConfig(max_bad_fraction=0.2)
    corpus = open_corpus(path, tokenizer, tmp_path / "cache", reading=reading)
    kept = [text for text in texts if text]
    decoded = [str(tokenizer.decode(corpus.document(i), skip_special_tokens=True)).strip() for i in range(len(corpus))]
    assert decoded == kept


def test_boundaries_stand_at_document_boundaries_only(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    corpus = open_corpus(write_jsonl(tmp_path / "corpus.jsonl", TEXTS), tokenizer, tmp_path / "cache")
    starts, ends = corpus.offsets[:-1], corpus.offsets[1:] - 1
    for boundary, places in ((tokenizer.bos_token_id, starts), (tokenizer.eos_token_id, ends)):
        if boundary is not None:
            assert np.flatnonzero(corpus.ids == boundary).tolist() == places.tolist()


def test_what_a_tokenizer_would_add_by_itself_is_not_added_twice(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    eager = load(Path(tokenizer.name_or_path))
    eos = (eager.eos_token, eager.eos_token_id)
    eager.backend_tokenizer.post_processor = TemplateProcessing(single=f"{eos[0]} $A {eos[0]}", special_tokens=[eos])
    assert eager.encode("text")[0] == eager.eos_token_id
    path = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    streams = [open_corpus(path, each, tmp_path / "cache").ids.tolist() for each in (tokenizer, eager)]
    assert streams[0] == streams[1]


def test_what_a_first_token_is_scored_after_is_a_boundary_that_precedes_it(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    corpus = open_corpus(write_jsonl(tmp_path / "corpus.jsonl", TEXTS), tokenizer, tmp_path / "cache")
    first_token = int(corpus.offsets[1]) + (corpus.markers.bos is not None)
    assert corpus.ids[first_token - 1] == corpus.markers.context


def test_where_bos_is_eos_one_mark_stands_between_two_documents(tmp_path: Path, shared_data: Path) -> None:
    tokenizer = load(shared_data / "ckpt-stories260K" / "hf")
    tokenizer.bos_token = tokenizer.eos_token  # as SmolLM2's
    corpus = open_corpus(write_jsonl(tmp_path / "corpus.jsonl", TEXTS), tokenizer, tmp_path / "cache")
    framed = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in TEXTS]
    assert corpus.ids.tolist() == [token for document in framed for token in document]
    assert corpus.markers == DocumentMarkers(None, tokenizer.eos_token_id)


@pytest.mark.parametrize(
    ("bos", "eos", "context"), [(1, 2, 1), (1, None, 1), (None, 2, 2), (None, None, None), (0, 2, 0)]
)
def test_a_document_is_scored_after_the_boundary_there_is(
    bos: int | None, eos: int | None, context: int | None
) -> None:
    assert DocumentMarkers(bos, eos).context == context


# The cache


@pytest.fixture(scope="module")
def english(shared_data: Path) -> PreTrainedTokenizerBase:
    return load(shared_data / CHECKPOINTS[0] / "hf")


def test_a_second_opening_tokenises_nothing(tmp_path: Path, english: PreTrainedTokenizerBase) -> None:
    path = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    first = open_corpus(path, english, tmp_path / "cache")
    before = written_at(first.folder)
    second = open_corpus(path, english, tmp_path / "cache")
    assert second.folder == first.folder
    assert written_at(second.folder) == before
    assert second.ids.tolist() == first.ids.tolist()


@pytest.mark.parametrize("name", ["other.jsonl", "v1.2.corpus.jsonl", "deep/er/corpus.jsonl"])
def test_the_same_content_under_another_name_is_not_tokenised_again(
    tmp_path: Path, english: PreTrainedTokenizerBase, name: str
) -> None:
    path = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    first = open_corpus(path, english, tmp_path / "cache")
    before = written_at(first.folder)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    moved = path.rename(tmp_path / name)
    os.utime(moved, (0, 0))
    second = open_corpus(moved, english, tmp_path / "cache")
    assert second.folder == first.folder
    assert written_at(second.folder) == before


def test_the_same_tokenizer_in_another_folder_is_the_same_tokenizer(
    tmp_path: Path, shared_data: Path, english: PreTrainedTokenizerBase
) -> None:
    copy = load(Path(shutil.copytree(shared_data / CHECKPOINTS[0] / "hf", tmp_path / "copy")))
    before = tokenizer_sha256(english)
    english(TEXTS)
    assert tokenizer_sha256(copy) == before
    assert tokenizer_sha256(english) == before


def folders_of(cache: Path) -> set[str]:
    return {folder.name for folder in cache.iterdir()}


@pytest.mark.parametrize(
    "options",
    [
        {"text_field": "body"},
        {"max_documents": 2},
        {"skip_documents": 1},
        {"reading": ReadingConfig(max_document_bytes=15, max_bad_fraction=1.0)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_another_setting_makes_another_folder(
    tmp_path: Path, english: PreTrainedTokenizerBase, options: dict[str, Any]
) -> None:
    path, cache = write_jsonl(tmp_path / "corpus.jsonl", TEXTS), tmp_path / "cache"
    first = open_corpus(path, english, cache)
    second = open_corpus(path, english, cache, **options)
    assert folders_of(cache) == {first.folder.name, second.folder.name}
    assert first.folder != second.folder
    assert first.ids.tolist() != second.ids.tolist()


def test_another_cut_into_documents_makes_another_folder(tmp_path: Path, english: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("\n\n".join(TEXTS), encoding="utf-8")
    paragraphs = open_corpus(path, english, tmp_path / "cache")
    whole = open_corpus(path, english, tmp_path / "cache", documents="file")
    lines = open_corpus(path, english, tmp_path / "cache", documents="line")
    assert folders_of(tmp_path / "cache") == {paragraphs.folder.name, lines.folder.name, whole.folder.name}
    assert (len(paragraphs), len(lines), len(whole)) == (3, sum(len(text.splitlines()) for text in TEXTS), 1)
    assert whole.num_bytes.tolist() == [path.stat().st_size]


def test_another_text_makes_another_folder(tmp_path: Path, english: PreTrainedTokenizerBase) -> None:
    path = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    first = open_corpus(path, english, tmp_path / "cache")
    stat = path.stat()
    write_jsonl(path, [TEXTS[0].replace("cat", "dog"), *TEXTS[1:]])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second = open_corpus(path, english, tmp_path / "cache")
    assert path.stat().st_size == stat.st_size
    assert first.folder != second.folder
    assert "dog" in english.decode(second.ids)


def test_another_order_of_files_makes_another_folder(tmp_path: Path, english: PreTrainedTokenizerBase) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    first = open_corpus(tmp_path / "*.txt", english, tmp_path / "cache")
    (tmp_path / "a.txt").rename(tmp_path / "c.txt")
    second = open_corpus(tmp_path / "*.txt", english, tmp_path / "cache")
    assert first.folder != second.folder
    assert first.ids.tolist() != second.ids.tolist()


def test_the_same_bytes_in_another_format_make_another_folder(tmp_path: Path, english: PreTrainedTokenizerBase) -> None:
    path = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    first = open_corpus(path, english, tmp_path / "cache")
    second = open_corpus(path.rename(tmp_path / "corpus.txt"), english, tmp_path / "cache")
    assert first.folder != second.folder
    assert first.ids.tolist() != second.ids.tolist()


def test_another_tokenizer_makes_another_folder(
    tmp_path: Path, shared_data: Path, english: PreTrainedTokenizerBase
) -> None:
    path = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    other = load(shared_data / CHECKPOINTS[1] / "hf")
    folders = [open_corpus(path, each, tmp_path / "cache").folder for each in (english, other)]
    assert folders[0] != folders[1]


def test_a_tokenizer_with_another_eos_makes_another_folder(
    tmp_path: Path, shared_data: Path, english: PreTrainedTokenizerBase
) -> None:
    path = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    other = load(shared_data / CHECKPOINTS[0] / "hf")
    other.eos_token = english.bos_token
    folders = [open_corpus(path, each, tmp_path / "cache").folder for each in (english, other)]
    assert folders[0] != folders[1]


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin", "num_bytes.bin", "ledger.json", "manifest.json"])
@pytest.mark.parametrize("how", ["missing", "cut"])
def test_a_cache_that_is_not_whole_is_made_again(
    tmp_path: Path, english: PreTrainedTokenizerBase, name: str, how: str
) -> None:
    path = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    first = open_corpus(path, english, tmp_path / "cache")
    ids, damaged = first.ids.tolist(), first.folder / name
    if how == "missing":
        damaged.unlink()
    else:
        damaged.write_bytes(damaged.read_bytes()[:-3])
    again = open_corpus(path, english, tmp_path / "cache")
    assert again.ids.tolist() == ids
    assert again.ledger == first.ledger


def test_a_source_of_which_too_much_is_bad_is_refused_now_and_later_and_taken_where_that_is_allowed(
    tmp_path: Path, english: PreTrainedTokenizerBase
) -> None:
    path = write_jsonl(tmp_path / "corpus.jsonl", TEXTS * 3)
    with path.open("ab") as file:
        file.write(b"{\n")
    for _ in range(2):
        with pytest.raises(CorpusError, match=rf"source \({path}\): 10\.000 % .* 1 not JSON: {path}:10$"):
            open_corpus(path, english, tmp_path / "cache")
    with pytest.raises(CorpusError, match="max_bad_fraction"):
        open_corpus(path, english, tmp_path / "cache", reading=ReadingConfig(max_bad_fraction=0.0999))
    corpus = open_corpus(path, english, tmp_path / "cache", reading=ReadingConfig(max_bad_fraction=0.1))
    assert len(corpus) == 9


def test_a_source_with_a_cut_off_file_is_refused(tmp_path: Path, english: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "corpus.txt.gz"
    path.write_bytes(gzip.compress("\n\n".join(TEXTS * 99).encode())[:-4])
    with pytest.raises(CorpusError, match=f"1 damaged file: {path} "):
        open_corpus(path, english, tmp_path / "cache")
    corpus = open_corpus(path, english, tmp_path / "cache", reading=ReadingConfig(max_bad_fraction=1.0))
    assert 0 < len(corpus) <= len(TEXTS * 99)


def test_a_source_without_a_document_leaves_no_cache(tmp_path: Path, english: PreTrainedTokenizerBase) -> None:
    path = write_jsonl(tmp_path / "corpus.jsonl", ["", " "])
    with pytest.raises(CorpusError, match=rf"source \(.*\): no document with text \(2 empty: {path}:1, {path}:2\)"):
        open_corpus(path, english, tmp_path / "cache", reading=ReadingConfig(max_bad_fraction=1.0))
    assert not list((tmp_path / "cache").iterdir())


def test_a_changed_dataset_folder_is_tokenised_again(shared_data: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "ckpt-eltec" / "hf")
    folder = tmp_path / "dataset"
    folder.mkdir()
    source = TextSource(name="source", dataset=str(folder), language="en")
    folders = []
    for text in ("one", "two", "one"):
        (folder / "train.jsonl").write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
        folders.append(tokenised(source, tokenizer, tmp_path / "cache", show_progress=False).folder)
    assert folders[0] == folders[2] != folders[1]


def test_a_hub_dataset_whose_commit_cannot_be_told_is_named(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "ckpt-eltec" / "hf")
    source = TextSource(name="source", dataset="no-such-owner/no-such-dataset", language="en")
    with pytest.raises(CorpusError, match="no-such-owner/no-such-dataset"):
        tokenised(source, tokenizer, tmp_path, show_progress=False)


def test_a_special_token_spelled_out_in_a_text_is_text(shared_data: Path, tmp_path: Path) -> None:
    for checkpoint in CHECKPOINTS:
        tokenizer = load(shared_data / checkpoint / "hf")
        spelled = f"One {tokenizer.eos_token} and {tokenizer.bos_token or tokenizer.eos_token} two."
        source = TextSource(name=checkpoint, path=str(write_jsonl(tmp_path / "a.jsonl", [spelled])), language="en")
        corpus = tokenised(source, tokenizer, tmp_path / "cache", show_progress=False)
        inside = corpus.document(0)[int(tokenizer.bos_token_id is not None) : -1]
        assert not {tokenizer.eos_token_id, tokenizer.bos_token_id} & set(inside.tolist())
