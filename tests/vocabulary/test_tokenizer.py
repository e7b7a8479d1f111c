"""The tokenizer of a run: learned once, kept by content, or refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from scale_cli.config.vocabulary import VocabularyConfig
from scale_cli.data.encoding import id_dtype
from scale_cli.data.tokens import TokenCache
from scale_cli.errors import BaseModelError, ConfigError, ScaleError
from scale_cli.storage.atomic import read_json, write_json
from scale_cli.vocabulary import tokenizer as vocabulary_tokenizer
from scale_cli.vocabulary.tokenizer import (
    GrownVocabulary,
    check_ids,
    load_grown,
    open_tokenizer,
    write_grown,
)
from tests.command_line import refused
from tests.data.corpus_files import source_of
from tests.vocabulary.tokenizers_at_hand import KOREAN, llama_3

ROWS = 8192


@pytest.fixture(scope="module")
def base(shared_data: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(shared_data / "ckpt-novels-en/hf")


def added(
    base: PreTrainedTokenizerBase, tmp_path: Path, *texts: str, first_id: int = ROWS, **keys: Any
) -> GrownVocabulary:
    sources = []
    for number, text in enumerate(texts):
        (path := tmp_path / f"{number}.txt").write_text(text)
        sources.append(source_of(path, name=f"ko{number}"))
    vocabulary = VocabularyConfig(**{"new_tokens": 64, "min_count": 1, **keys})
    return GrownVocabulary(first_id, vocabulary, sources, TokenCache(tmp_path / "cache", base))


def grow(
    base: PreTrainedTokenizerBase, tmp_path: Path, *, text: str = KOREAN, **options: Any
) -> PreTrainedTokenizerBase:
    return added(base, tmp_path, text, **options).tokenizer()


def test_what_was_learned_is_kept_by_content(
    base: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = grow(base, tmp_path)
    assert len(first) == ROWS + 64
    assert len(first(KOREAN).input_ids) < len(base(KOREAN).input_ids) / 2

    with monkeypatch.context() as patched:
        patched.setattr(vocabulary_tokenizer, "learn", None)
        assert grow(base, tmp_path).get_vocab() == first.get_vocab()
    assert grow(base, tmp_path, text=KOREAN + " 나라").get_vocab() != first.get_vocab()


def test_special_tokens_of_a_list_are_written_as_every_version_of_transformers_reads_them(
    base: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    base = AutoTokenizer.from_pretrained(
        base.name_or_path, additional_special_tokens=["<s>", "</s>"]
    )
    write_grown(tmp_path, base)
    written = read_json(tmp_path / "tokenizer_config.json")
    assert written["additional_special_tokens"] == ["<s>", "</s>"]
    assert "extra_special_tokens" not in written
    assert load_grown(tmp_path).all_special_ids == base.all_special_ids


def test_all_tokens_together_are_a_multiple_of_64_after_the_rows_of_the_base(
    base: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    grown = grow(base, tmp_path, new_tokens=10, first_id=ROWS + 7)
    assert len(grown) == ROWS + 64
    assert max(grown(KOREAN).input_ids) >= ROWS + 7
    assert not set(range(ROWS, ROWS + 7)) & set(grown(KOREAN).input_ids)


def test_a_folder_that_has_the_tokens_is_taken_and_another_base_s_is_not(
    base: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    grown = grow(base, tmp_path)
    grown.save_pretrained(tmp_path / "given")
    assert grow(base, tmp_path, folder=str(tmp_path / "given")).get_vocab() == grown.get_vocab()

    with pytest.raises(BaseModelError, match="its new tokens must begin at 9,000"):
        grow(base, tmp_path, first_id=9000, folder=str(tmp_path / "given"))


@pytest.mark.parametrize(
    ("keys", "error", "said"),
    [
        (
            {"new_tokens": 4096},
            ConfigError,
            r"4,096, but the text gives only \d+ that occur at least 1 time;",
        ),
        (
            {"new_tokens": 49_152 - ROWS},
            ConfigError,
            r"llama\.cpp takes a model of 49,152 tokens in all for another",
        ),
        ({"folder": "/nowhere"}, BaseModelError, "folder: /nowhere holds no tokenizer"),
    ],
)
def test_what_cannot_be_had_is_one_line(
    base: PreTrainedTokenizerBase,
    tmp_path: Path,
    keys: dict[str, Any],
    error: type[ScaleError],
    said: str,
) -> None:
    with refused(error, said):
        grow(base, tmp_path, **keys)


def test_a_script_that_the_base_has_already_is_refused(shared_data: Path, tmp_path: Path) -> None:
    knows = AutoTokenizer.from_pretrained(shared_data / "ckpt-eltec/hf")
    with pytest.raises(BaseModelError, match=r"already; remove method\.vocabulary"):
        grow(knows, tmp_path)


@pytest.mark.parametrize("script", ["hangeul", "AC00", "D7A3-AC00", "D000-DFFF", "41-5A"])
def test_a_script_is_a_name_or_ranges_beyond_ascii(script: str) -> None:
    with pytest.raises(ValueError, match="a range"):
        VocabularyConfig(script=script)


@pytest.mark.parametrize("opened", [open_tokenizer, load_grown])
def test_settings_saved_in_a_tokenizer_file_do_not_act(
    base: PreTrainedTokenizerBase, tmp_path: Path, opened: Callable[[Path], Any]
) -> None:
    base.save_pretrained(tmp_path)
    expected = base.backend_tokenizer.encode_batch([KOREAN, "a"], add_special_tokens=False)
    described = read_json(tmp_path / "tokenizer.json")
    described["model"]["dropout"] = 0.9
    saved = Tokenizer.from_str(json.dumps(described))
    saved.enable_truncation(8)
    saved.enable_padding(length=100)
    saved.save(str(tmp_path / "tokenizer.json"))

    backend = opened(tmp_path).backend_tokenizer
    found = backend.encode_batch([KOREAN, "a"], add_special_tokens=False)
    assert [encoding.ids for encoding in found] == [encoding.ids for encoding in expected]


@pytest.mark.parametrize(("last", "num_rows"), [(70_000, 8192), (5000, 576), (512, 512)])
def test_an_id_without_a_row_is_refused_however_few_ids_there_are(
    tmp_path: Path, last: int, num_rows: int
) -> None:
    described = json.loads(llama_3().to_str())
    described["model"]["vocab"]["\ue000"] = last
    described["added_tokens"] = []
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(described)))
    assert len(tokenizer) < num_rows
    with pytest.raises(BaseModelError, match=rf"the id {last:,}, but .* only {num_rows:,} rows"):
        check_ids(tokenizer, num_rows)
    with pytest.raises(BaseModelError, match=f"the id {last:,}"):
        grow(tokenizer, tmp_path, first_id=num_rows)
    check_ids(tokenizer, last + 1)
    assert id_dtype(tokenizer) == ("uint32" if last > 2**16 else "uint16")


@pytest.mark.parametrize("named", ["GPT2Tokenizer", "LlamaTokenizer", "TokenizersBackend", None])
def test_a_tokenizer_is_opened_as_transformers_opens_it_whatever_class_is_named(
    named: str | None, shared_data: Path, tmp_path: Path
) -> None:
    """The class of the base's config is not imported for it."""
    base = shared_data / "ckpt-eltec/hf"
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((base / name).read_bytes())
    settings = read_json(base / "tokenizer_config.json") | {"tokenizer_class": named}
    write_json(tmp_path / "tokenizer_config.json", settings)
    wanted = AutoTokenizer.from_pretrained(tmp_path)
    opened = open_tokenizer(tmp_path)
    assert type(opened) is type(wanted)
    assert opened.backend_tokenizer.to_str() == wanted.backend_tokenizer.to_str()
