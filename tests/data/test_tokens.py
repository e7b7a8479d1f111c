import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from scale_cli.config.sources import ReadingConfig
from scale_cli.data.encoding import DocumentMarkers
from scale_cli.data.tokens import TokenCache, TokenisedCorpus
from scale_cli.errors import CorpusError
from tests.data.corpus_files import source_of, tokenised, write_jsonl

OTHER = "ckpt-eltec"  # it has EOS alone, and the tokenizer that tests use otherwise BOS and EOS
TEXTS = ["Once upon a time,\nthere was a cat.", "옛날 옛적에", "The end."]


both = pytest.mark.parametrize("tokenizer", ["ckpt-stories260K", OTHER], indirect=True)


def load(folder: Path) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return loaded


def open_corpus(
    path: Path, tokenizer: PreTrainedTokenizerBase, cache: Path, **options: Any
) -> TokenisedCorpus:
    return tokenised(path, tokenizer, cache, options.pop("reading", ReadingConfig()), **options)


# Content


# SentencePiece loses its own mark for a space.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\u2581"), max_size=30)


@pytest.mark.parametrize(
    ("tokenizer", "bos_is_eos"),  # as SmolLM2's: one mark stands between two documents
    [("ckpt-stories260K", False), ("ckpt-stories260K", True), (OTHER, False)],
    indirect=["tokenizer"],
)
@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    texts=st.lists(TEXT, min_size=1, max_size=8).filter(
        lambda texts: any(text.strip() for text in texts)
    )
)
def test_the_stream_is_every_document_tokenised_alone_and_framed(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: PreTrainedTokenizerBase,
    bos_is_eos: bool,
    texts: list[str],
) -> None:
    folder = tmp_path_factory.mktemp("stream")
    if bos_is_eos:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.bos_token = tokenizer.eos_token
    path = write_jsonl(folder / "corpus.jsonl", texts)
    reading = ReadingConfig(max_bad_fraction=1.0)
    corpus = open_corpus(path, tokenizer, folder / "cache", reading=reading)
    kept = [text for text in texts if text.strip()]
    bos = [] if tokenizer.bos_token_id is None or bos_is_eos else [tokenizer.bos_token_id]
    framed = [
        [*bos, *tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        for text in kept
    ]
    assert corpus.markers == DocumentMarkers(bos[0] if bos else None, tokenizer.eos_token_id)
    assert len(corpus) == len(kept)
    assert [corpus.document(i).tolist() for i in range(len(corpus))] == framed
    assert corpus.ids.tolist() == [token for document in framed for token in document]
    assert corpus.num_bytes.tolist() == [len(text.encode()) for text in kept]


def test_marks_that_the_tokenizer_itself_adds_are_not_doubled(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    ids = open_corpus(path, tokenizer, tmp_path / "cache").ids.tolist()
    eager = load(Path(tokenizer.name_or_path))
    eos = (eager.eos_token, eager.eos_token_id)
    eager.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{eos[0]} $A {eos[0]}", special_tokens=[eos]
    )
    assert eager.encode("text")[0] == eager.eos_token_id
    assert open_corpus(path, eager, tmp_path / "cache").ids.tolist() == ids


# The cache


def test_the_same_content_is_not_tokenised_again_under_any_name_nor_by_a_tokenizer_elsewhere(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    first = open_corpus(path, tokenizer, tmp_path / "cache")
    before = {file.name: file.stat().st_mtime_ns for file in first.folder.iterdir()}
    for name in ("corpus.jsonl", "v1.2.corpus.jsonl", "deep/er/corpus.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        path = path.rename(tmp_path / name)
        os.utime(path, (0, 0))
        again = open_corpus(path, tokenizer, tmp_path / "cache")
        assert again.folder == first.folder and again.ids.tolist() == first.ids.tolist()
        assert {file.name: file.stat().st_mtime_ns for file in again.folder.iterdir()} == before
        tokenizer = load(
            Path(shutil.copytree(tokenizer.name_or_path, path.parent / f"{path.name}-copy"))
        )
        tokenizer(TEXTS)  # which changes its state


def test_what_decides_the_tokens_makes_another_folder(
    tmp_path: Path, shared_data: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / "corpus.jsonl"
    other_eos = copy.deepcopy(tokenizer)
    path.write_text(
        "".join(json.dumps({"text": text, "body": text[::-1]}) + "\n" for text in TEXTS)
    )
    other_eos.eos_token = tokenizer.bos_token
    settings: list[dict[str, Any]] = [
        {},
        {"text_field": "body"},
        {"max_documents": 2},
        {"skip_documents": 1},
        {"reading": ReadingConfig(max_document_bytes=15, max_bad_fraction=1.0)},
    ]
    made = [open_corpus(path, tokenizer, tmp_path / "cache", **options) for options in settings]
    made += [open_corpus(path, load(shared_data / OTHER / "hf"), tmp_path / "cache")]
    made += [open_corpus(path, other_eos, tmp_path / "cache")]
    text = path.rename(tmp_path / "corpus.txt")
    cuts = ("paragraph", "line", "file")
    made += [
        open_corpus(text, tokenizer, tmp_path / "cache", documents=documents) for documents in cuts
    ]
    assert (
        len({corpus.folder.name for corpus in made})
        == len(made)
        == len(list((tmp_path / "cache").iterdir()))
    )


def test_another_text_or_order_of_files_makes_another_folder(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    folders = set()
    (tmp_path / "b.txt").write_text("two")
    for text, name in (("cat", "a"), ("dog", "a"), ("dog", "c")):
        (tmp_path / f"{name}.txt").write_text(text)
        os.utime(tmp_path / f"{name}.txt", (1, 1))
        corpus = open_corpus(tmp_path / f"[b{name}].txt", tokenizer, tmp_path / "cache")
        folders.add(corpus.folder)
        decoded = tokenizer.decode(corpus.ids, skip_special_tokens=True)
        assert (decoded.index(text) < decoded.index("two")) == (name == "a")
    assert len(folders) == 3


@pytest.mark.parametrize(
    "name", ["tokens.bin", "offsets.bin", "num_bytes.bin", "ledger.json", "manifest.json"]
)
def test_a_cache_that_is_not_whole_is_made_again(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    path = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    first = open_corpus(path, tokenizer, tmp_path / "cache")
    ids = first.ids.tolist()
    damaged = first.folder / name
    for content in (None, damaged.read_bytes()[:-3]):
        damaged.unlink() if content is None else damaged.write_bytes(content)
        again = open_corpus(path, tokenizer, tmp_path / "cache")
        assert again.ids.tolist() == ids and again.ledger == first.ledger


def test_a_source_of_which_too_much_is_bad_is_refused_now_and_later_and_taken_where_that_is_allowed(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_jsonl(tmp_path / "corpus.jsonl", TEXTS * 3)
    with path.open("ab") as file:
        file.write(b"{\n")
    for _ in range(2):
        with pytest.raises(
            CorpusError, match=rf"source \({path}\): 10\.000 % .* 1 not JSON: {path}:10$"
        ):
            open_corpus(
                path, tokenizer, tmp_path / "cache", reading=ReadingConfig(max_bad_fraction=0.0999)
            )
    assert (
        len(
            open_corpus(
                path, tokenizer, tmp_path / "cache", reading=ReadingConfig(max_bad_fraction=0.1)
            )
        )
        == 9
    )


def test_a_dataset_is_tokenised_again_where_its_folder_has_changed_and_named_where_its_commit_is_unknown(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "dataset"
    folders = []
    folder.mkdir()
    source = source_of(None, dataset=str(folder))
    for text in ("one", "two", "one"):
        write_jsonl(folder / "train.jsonl", [text])
        folders.append(TokenCache(tmp_path / "cache", tokenizer).open(source).folder)
    assert folders[0] == folders[2] != folders[1]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    source = source_of(None, dataset="no-such-owner/no-such-dataset")
    with pytest.raises(CorpusError, match="no-such-owner/no-such-dataset"):
        TokenCache(tmp_path, tokenizer).open(source)
