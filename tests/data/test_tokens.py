import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from scale_cli.config.sources import ReadingConfig
from scale_cli.data.encoding import DocumentMarkers
from scale_cli.data.tokens import TokenCache
from scale_cli.errors import CorpusError
from tests.data.corpus_files import FORMATS, source_of, tokenised, write_jsonl

OTHER = "ckpt-eltec"  # it has EOS alone, and the tokenizer that tests use otherwise BOS and EOS
TEXTS = ["Once upon a time,\nthere was a cat.", "옛날 옛적에", "The end."]


def load(folder: Path) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return loaded


# Content


# SentencePiece loses its own mark for a space.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\u2581"), max_size=30)


@pytest.mark.parametrize(
    ("tokenizer", "bos_is_eos"),  # as SmolLM2's: one mark stands between two documents
    [("ckpt-stories260K", False), ("ckpt-stories260K", True), (OTHER, False)],
    indirect=["tokenizer"],
)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    tokenizer = copy.deepcopy(tokenizer)
    if bos_is_eos:
        tokenizer.bos_token = tokenizer.eos_token
    eos = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(  # whose marks are not doubled
        single=f"{eos} $A {eos}", special_tokens=[(eos, tokenizer.eos_token_id)]
    )
    assert tokenizer.encode("text")[0] == tokenizer.eos_token_id
    path = write_jsonl(folder / "corpus.jsonl", texts)
    reading = ReadingConfig(max_bad_fraction=1.0)
    corpus = tokenised(path, tokenizer, folder / "cache", reading=reading)
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


# The cache


def test_the_same_content_is_not_tokenised_again_under_any_name(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    first = tokenised(path, tokenizer, tmp_path / "cache")
    before = {file.name: file.stat().st_mtime_ns for file in first.folder.iterdir()}
    for name in ("corpus.jsonl", "v1.2.corpus.jsonl", "deep/er/corpus.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        path = path.rename(tmp_path / name)
        os.utime(path, (0, 0))
        again = tokenised(path, tokenizer, tmp_path / "cache")
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
    made = [tokenised(path, tokenizer, tmp_path / "cache", **options) for options in settings]
    made += [tokenised(path, load(shared_data / OTHER / "hf"), tmp_path / "cache")]
    made += [tokenised(path, other_eos, tmp_path / "cache")]
    text = path.rename(tmp_path / "corpus.txt")
    for cut in ("paragraph", "line", "file"):
        made.append(tokenised(text, tokenizer, tmp_path / "cache", documents=cut))
    for name, content in (("b", "two"), ("a", "cat"), ("a", "dog"), ("c", "dog")):
        (tmp_path / f"{name}.txt").write_text(content)
        os.utime(tmp_path / f"{name}.txt", (1, 1))
        if name != "b":  # of two files in their order
            made.append(tokenised(tmp_path / f"[b{name}].txt", tokenizer, tmp_path / "cache"))
    folders = {corpus.folder.name for corpus in made}
    assert len(folders) == len(made) == len(list((tmp_path / "cache").iterdir()))
    orders = [tokenizer.decode(corpus.ids, skip_special_tokens=True) for corpus in made[-2:]]
    assert [text.index("dog") < text.index("two") for text in orders] == [True, False]


def test_messages_of_another_field_are_tokenised_to_another_folder(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    chat = copy.deepcopy(tokenizer)
    chat.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    path = tmp_path / "corpus.jsonl"
    talks = {
        field: [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": said}]
        for field, said in (("one", "A cat."), ("other", "A dog."))
    }
    path.write_text(json.dumps(talks) + "\n")
    for field, said in (("one", "A cat."), ("other", "A dog.")):
        corpus = tokenised(path, chat, tmp_path / "cache", messages_field=field)
        assert said in chat.decode(corpus.ids)


def test_where_an_earlier_version_read_the_same_tokens_their_folder_keeps_its_name(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked = copy.deepcopy(tokenizer)
    marked.chat_template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    special = copy.deepcopy(marked)
    for changed, is_special in ((marked, False), (special, True)):
        changed.add_tokens([AddedToken("<|user|>", special=is_special)], special_tokens=is_special)

    def names() -> dict[tuple[str, str], str]:
        tokenizers = {"plain": tokenizer, "marked": marked, "special": special}
        return {
            (form, kind): TokenCache(tmp_path, one).name_of(source_of(tmp_path / f"corpus{form}"))
            for form in FORMATS
            for kind, one in tokenizers.items()
        }

    for form, write in FORMATS.items():
        (tmp_path / f"corpus{form}").write_bytes(write(TEXTS))
    now = names()
    monkeypatch.setattr("scale_cli.data.files.line_rules", lambda _: [])
    monkeypatch.setattr("scale_cli.data.tokens.unspecial_marks", lambda _: set())
    before = names()
    renamed = {key for key in now if now[key] != before[key]}
    assert renamed == {
        (form, kind) for form, kind in now if kind == "marked" or form not in (".csv", ".parquet")
    }


@pytest.mark.parametrize(
    "name", ["tokens.bin", "offsets.bin", "num_bytes.bin", "ledger.json", "manifest.json"]
)
def test_a_cache_that_is_not_whole_is_made_again(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    path = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    first = tokenised(path, tokenizer, tmp_path / "cache")
    ids = first.ids.tolist()
    damaged = first.folder / name
    for content in (None, damaged.read_bytes()[:-3]):
        damaged.unlink() if content is None else damaged.write_bytes(content)
        again = tokenised(path, tokenizer, tmp_path / "cache")
        assert again.ids.tolist() == ids and again.ledger == first.ledger


def test_a_dataset_is_tokenised_again_where_its_folder_has_changed(
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
