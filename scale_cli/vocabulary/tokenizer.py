"""The tokenizer of a run that adds tokens: learned once for the same texts, or given; proved, and kept by content."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from scale_cli.config.scripts import Script
from scale_cli.config.sources import ReadingConfig, TextSource
from scale_cli.config.vocabulary import ROWS_MULTIPLE, TAKEN_FOR_OTHERS, VocabularyConfig
from scale_cli.data.documents import CorpusReader, Document
from scale_cli.data.tokens import content_name
from scale_cli.errors import BaseModelError, ConfigError
from scale_cli.storage.atomic import is_whole, new_folder, read_json, write_json, writing
from scale_cli.vocabulary.extension import extended
from scale_cli.vocabulary.learning import NewToken, count_words, learn
from scale_cli.vocabulary.sentencepiece import SENTENCEPIECE
from scale_cli.vocabulary.spelling import Spelling

_FORMAT_VERSION = 1
# Of every source: what comes after it would change hardly a token, and the words of more are held in memory.
_BYTES_READ = 1 << 28
_MIN_COUNT_OF_BEGINNINGS = 10
_MOST_OF_THE_SCRIPT = 0.1  # of the base's own tokens
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    SENTENCEPIECE,
)
# What older tools would read in its place, and what holds the old tokens alone.
_STALE = (SENTENCEPIECE, "vocab.json", "merges.txt", "added_tokens.json")
_OF_TRANSFORMERS_5 = ("backend", "is_local", "local_files_only")


def grown_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    first_id: int,
    vocabulary: VocabularyConfig,
    sources: Sequence[TextSource],
    cache_dir: Path,
    reading: ReadingConfig,
) -> PreTrainedTokenizerBase:
    """Return a base's tokenizer with the tokens that a config adds: from the cache, where they were learned before.

    Args:
        tokenizer: the base's.
        first_id: of the new tokens: how many rows the base's embedding has.
        vocabulary: what is added.
        sources: the texts that they are learned on.
        cache_dir: where what was learned lies, with the tokenised corpora.
        reading: limits of the texts.

    Raises:
        BaseModelError: no token can be added to it, or it has the script already; a given folder is not of this base.
        ConfigError: more tokens than the texts give, or a number that llama.cpp takes for another model.
        CorpusError: a source cannot be read.
    """
    if vocabulary.folder is not None:
        return _given(tokenizer, first_id, vocabulary.folder)
    folder = learned_folder(tokenizer, first_id, vocabulary, sources, cache_dir, reading)
    if not is_whole(folder):
        num_new, min_count = num_added(first_id, vocabulary), vocabulary.min_count
        new = _learned(tokenizer, first_id, vocabulary, read_texts(sources, reading, _BYTES_READ), min_count)
        if len(new) < num_new:
            raise ConfigError(
                f"method.vocabulary.new_tokens: {num_new:,}, but the text gives {len(new):,} that occur "
                f"{min_count:,} times (method.vocabulary.min_count)"
            )
        with new_folder(folder) as partial:
            write_grown(partial, tokenizer)
            extended(tokenizer.backend_tokenizer, new, first_id).save(str(partial / TOKENIZER_FILES[0]))
    return load_grown(folder)


def learned_folder(
    tokenizer: PreTrainedTokenizerBase,
    first_id: int,
    vocabulary: VocabularyConfig,
    sources: Sequence[TextSource],
    cache_dir: Path,
    reading: ReadingConfig,
) -> Path:
    """Return where what is learned lies, or will; arguments as of `grown_tokenizer`."""
    learned = {
        "format": _FORMAT_VERSION,
        "sources": [content_name(source, tokenizer, cache_dir, reading) for source in sources],
        "script": Script.named(vocabulary.script).ranges,
        "new_tokens": num_added(first_id, vocabulary),
        "first_id": first_id,
        "min_count": vocabulary.min_count,
    }
    return cache_dir / f"vocabulary.{hashlib.sha256(json.dumps(learned).encode()).hexdigest()[:16]}"


def sketched_tokenizer(
    tokenizer: PreTrainedTokenizerBase, first_id: int, vocabulary: VocabularyConfig, texts: Iterable[str]
) -> Tokenizer:
    """Return about what a tokenizer will be, learned on the beginnings of texts; it may lack the rarest tokens."""
    new = _learned(tokenizer, first_id, vocabulary, texts, min(vocabulary.min_count, _MIN_COUNT_OF_BEGINNINGS))
    return extended(tokenizer.backend_tokenizer, new, first_id)


def _learned(
    tokenizer: PreTrainedTokenizerBase, first_id: int, vocabulary: VocabularyConfig, texts: Iterable[str], least: int
) -> list[NewToken]:
    backend = tokenizer.backend_tokenizer
    spelling, script = Spelling.of(backend, tokenizer.name_or_path), Script.named(vocabulary.script)
    _check_script_is_new(tokenizer, spelling, script, vocabulary.script)
    num_new = num_added(first_id, vocabulary)
    check_size(first_id + num_new)
    return learn(count_words(texts, backend, script), backend, spelling, script, most=num_new, min_count=least)


def num_added(first_id: int, vocabulary: VocabularyConfig) -> int:
    """Return how many tokens are learned, after so many rows of the base."""
    return vocabulary.new_tokens + -(first_id + vocabulary.new_tokens) % ROWS_MULTIPLE


def check_size(vocab_size: int) -> None:
    """Check that nobody takes a model of so many tokens for another.

    Raises:
        ConfigError: llama.cpp does.
    """
    if vocab_size in TAKEN_FOR_OTHERS:
        raise ConfigError(
            f"method.vocabulary.new_tokens: {vocab_size:,} tokens in all are what llama.cpp knows another model by; "
            f"add {ROWS_MULTIPLE} more"
        )


def read_texts(sources: Sequence[TextSource], reading: ReadingConfig, most_bytes: float = math.inf) -> Iterator[str]:
    """Yield the documents of some sources, of each up to so many bytes."""
    for source in sources:
        size = 0
        for record in CorpusReader(source, reading.max_document_bytes):
            if isinstance(record, Document):
                yield record.text
                size += record.num_bytes
                if size >= most_bytes:
                    break


def _check_script_is_new(tokenizer: PreTrainedTokenizerBase, spelling: Spelling, script: Script, name: str) -> None:
    tokens = tokenizer.get_vocab()
    of_script = sum(script.alone_begins(spelling.to_bytes(token)) for token in tokens)
    if of_script > _MOST_OF_THE_SCRIPT * len(tokens):
        raise BaseModelError(
            f"method.vocabulary.script: {of_script:,} of the {len(tokens):,} tokens of {tokenizer.name_or_path} are "
            f"{name} already; leave method.vocabulary out"
        )


def _given(tokenizer: PreTrainedTokenizerBase, first_id: int, folder: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a folder, whose new ids begin where the base's rows end."""
    try:
        given = load_grown(Path(folder))
        ids = sorted(given.get_vocab().values())
    except Exception as error:  # of a damaged folder it may say anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise BaseModelError(f"method.vocabulary.folder: {folder} holds no tokenizer: {reason}") from None
    old = tokenizer.get_vocab()
    new = [index for index in ids if index >= first_id]
    if not new or new != list(range(first_id, ids[-1] + 1)) or len(ids) - len(new) != first_id:
        raise BaseModelError(
            f"method.vocabulary.folder: {folder} does not add its tokens from {first_id:,} on, where the base's "
            f"embedding of {first_id:,} rows ends, to a vocabulary without gaps"
        )
    if moved := next((token for token, index in given.get_vocab().items() if old.get(token, index) != index), None):
        raise BaseModelError(f"method.vocabulary.folder: {folder} gives another id to the base's token {moved!r}")
    check_size(first_id + len(new))
    return given


def write_grown(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Save a tokenizer that has new tokens so that every version of transformers takes it as it stands."""
    with writing(folder):
        tokenizer.save_pretrained(folder)
        for name in _STALE:
            (folder / name).unlink(missing_ok=True)
    settings = read_json(folder / "tokenizer_config.json")
    # The classes of single families put their own steps in the place of those that are described.
    kept = {name: value for name, value in settings.items() if name not in _OF_TRANSFORMERS_5}
    write_json(folder / "tokenizer_config.json", {**kept, "tokenizer_class": "PreTrainedTokenizerFast"})


def load_grown(folder: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer that was written here."""
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer
