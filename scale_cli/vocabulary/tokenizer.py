"""The tokenizer of a run that adds tokens: learned once per set of texts and cached by content, or
given.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer
from transformers import (
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from scale_cli.config.sources import ReadingConfig, TextSource
from scale_cli.config.vocabulary import ROWS_MULTIPLE, TAKEN_FOR_OTHERS, Script, VocabularyConfig
from scale_cli.data.documents import CorpusReader
from scale_cli.data.encoding import Document, forget_settings_of_calls, num_ids
from scale_cli.data.tokens import TokenCache
from scale_cli.errors import BaseModelError, ConfigError, one_line
from scale_cli.storage.atomic import (
    is_whole,
    json_sha256,
    new_folder,
    read_json,
    write_json,
    writing,
)
from scale_cli.terminal import progress_bar
from scale_cli.values import counted
from scale_cli.vocabulary.growing import SENTENCEPIECE, NewToken, Spelling, extended
from scale_cli.vocabulary.learning import count_words, learn

_FORMAT_VERSION = 1
# Limit per source: more text would hardly change a token, and its words are held in memory.
_BYTES_READ = 1 << 28
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# Files with only the old tokens, which older tools would read instead of tokenizer.json.
_STALE = (SENTENCEPIECE, "vocab.json", "merges.txt", "added_tokens.json")
_OF_TRANSFORMERS_5 = ("backend", "is_local", "local_files_only")


@dataclass(frozen=True)
class GrownVocabulary:
    """A base's tokenizer with the tokens that a config adds: learned, or given in a folder."""

    first_id: int  # of the new tokens: the number of rows of the base's embedding
    vocabulary: VocabularyConfig
    sources: Sequence[TextSource]  # the texts to learn them from
    cache: TokenCache  # with the base's tokenizer; the learned tokenizer is saved in its folder

    @property
    def base(self) -> PreTrainedTokenizerBase:
        return self.cache.tokenizer

    @property
    def note(self) -> str:
        """What a user should know of the base's tokenizer; empty if nothing."""
        spelling = Spelling.of(self.base.backend_tokenizer, self.base.name_or_path)
        notes = []
        if spelling.missing:
            notes.append(
                f"the base's tokenizer has no token for the bytes {bytes(sorted(spelling.missing)).hex(' ')}, with or "
                f"without new tokens; {self.vocabulary.script} needs none of them"
            )
        if not spelling.byte_level:
            notes.append(
                f"llama.cpp reads tokens with byte fallback from {SENTENCEPIECE} alone, which gets no new ones: do not "
                "convert this run's exports"
            )
        return "; ".join(notes)

    @property
    def num_new(self) -> int:
        """Return `new_tokens`, rounded up so that all rows together are a multiple of
        ROWS_MULTIPLE.
        """
        asked = self.vocabulary.new_tokens
        return asked + -(self.first_id + asked) % ROWS_MULTIPLE

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the base's tokenizer with the new tokens, from the cache if they were learned
        before.
        """
        if self.vocabulary.folder is not None:
            return _given(self.first_id, self.vocabulary.folder)
        if not is_whole(folder := self.folder):
            grown = extended(self.base.backend_tokenizer, self._learned(), self.first_id)
            with new_folder(folder) as partial:
                write_grown(partial, self.base, grown)
        return load_grown(folder)

    @property
    def folder(self) -> Path:
        learned = {
            "format": _FORMAT_VERSION,
            "sources": [self.cache.name_of(source) for source in self.sources],
            "script": Script.named(self.vocabulary.script).ranges,
            "new_tokens": self.num_new,
            "first_id": self.first_id,
            "min_count": self.vocabulary.min_count,
        }
        return self.cache.folder / f"vocabulary.{json_sha256(learned)[:16]}"

    def _learned(self) -> list[NewToken]:
        """Return the tokens learned from the sources; ConfigError if they give too few."""
        backend = self.base.backend_tokenizer
        script = Script.named(self.vocabulary.script)
        spelling = Spelling.of(backend, self.base.name_or_path)
        spelling.check(script, backend, self.base.name_or_path)
        check_ids(self.base, self.first_id)
        check_size(self.first_id + self.num_new)
        words = Counter[str]()
        for text in read_texts(self.sources, self.cache.reading, _BYTES_READ):
            words.update(count_words(text, backend, script))
        min_count = self.vocabulary.min_count
        new = learn(words, backend, spelling, script, most=self.num_new, min_count=min_count)
        if len(new) < self.num_new:
            most = most_added(self.first_id, len(new))
            instead = f"set it to {most}, or lower" if most > 0 else "lower"
            raise ConfigError(
                f"method.vocabulary.new_tokens: {self.vocabulary.new_tokens:,}, but the text gives only "
                f"{len(new):,} that occur at least {counted(min_count, 'time')}; {instead} "
                "method.vocabulary.min_count"
            )
        return new


def most_added(first_id: int, num_found: int) -> int:
    """Return the largest `new_tokens` that `num_found` tokens allow; 0 or less if none does."""
    total = (first_id + num_found) // ROWS_MULTIPLE * ROWS_MULTIPLE
    return total - first_id - (ROWS_MULTIPLE if total in TAKEN_FOR_OTHERS else 0)


def check_size(vocab_size: int) -> None:
    if vocab_size in TAKEN_FOR_OTHERS:
        raise ConfigError(
            f"method.vocabulary: llama.cpp takes a model of {vocab_size:,} tokens in all for another one; change the "
            f"number of new tokens by {ROWS_MULTIPLE}"
        )


def read_texts(
    sources: Sequence[TextSource], reading: ReadingConfig, most_bytes: float = math.inf
) -> Iterator[str]:
    """Yield the documents of some sources, from each until `most_bytes` are read."""
    for source in sources:
        with progress_bar(
            desc=f"reading {source.name}", unit="B", unit_scale=True, delay=1.0, leave=False
        ) as bar:
            size = 0
            for record in CorpusReader(source, reading.max_document_bytes):
                if isinstance(record, Document):
                    yield record.text
                    bar.update(record.num_bytes)
                    size += record.num_bytes
                    if size >= most_bytes:
                        break


def _given(first_id: int, folder: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a folder; BaseModelError if its new ids do not begin where the base's
    rows end.
    """
    try:
        given = load_grown(Path(folder))
        ids = sorted(given.get_vocab().values())
    except Exception as error:  # a damaged folder may raise anything
        raise BaseModelError(
            f"method.vocabulary.folder: {folder} holds no tokenizer: {one_line(error)}"
        ) from None
    if len(ids) <= first_id or ids != list(range(len(ids))):
        raise BaseModelError(
            f"method.vocabulary.folder: the ids of {folder} must have no gaps, and its new tokens must begin at "
            f"{first_id:,}, because the base's embedding has {first_id:,} rows"
        )
    check_size(len(ids))
    return given


def write_grown(
    folder: Path, tokenizer: PreTrainedTokenizerBase, backend: Tokenizer | None = None
) -> None:
    """Save a tokenizer, with the tokens of `backend` if given, so that transformers 4 and 5 can
    load it.
    """
    with writing(folder):
        tokenizer.save_pretrained(folder)
        for name in _STALE:
            (folder / name).unlink(missing_ok=True)
        if backend is not None:
            backend.save(str(folder / TOKENIZER_FILES[0]))
    settings = read_json(folder / "tokenizer_config.json")
    kept = {name: value for name, value in settings.items() if name not in _OF_TRANSFORMERS_5}
    # Transformers 4 takes a list of special tokens only under this name, 5 under either.
    if isinstance(kept.get("extra_special_tokens"), list):
        kept["additional_special_tokens"] = kept.pop("extra_special_tokens")
    # The tokenizer classes of single families would replace the described steps by their own.
    write_json(
        folder / "tokenizer_config.json", {**kept, "tokenizer_class": "PreTrainedTokenizerFast"}
    )


def load_grown(folder: Path) -> PreTrainedTokenizerBase:
    return open_tokenizer(folder, kind=PreTrainedTokenizerFast)


def open_tokenizer(
    place: str | Path, revision: str | None = None, *, kind: type[Any] = AutoTokenizer
) -> PreTrainedTokenizerBase:
    """Load a tokenizer without the settings of calls that its tokenizer.json may hold.

    Everything that reads a tokenizer's files calls this, so that no truncation, padding or dropout
    that somebody once saved acts here.

    Args:
        place: folder or hub id.
        revision: on the hub.
        kind: transformers' class; PreTrainedTokenizerFast replaces no step of the file by those of
        a model family.

    Raises:
        BaseModelError: it has no tokenizer.json form.
        Exception: a damaged folder may raise anything.
    """
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    named = get_tokenizer_config(place, revision=revision)
    if kind is AutoTokenizer and named.get("tokenizer_class") and "auto_map" not in named:
        # The base's own class of configs decides nothing then; its import takes a second of CPU.
        described, _ = PreTrainedConfig.get_config_dict(place, revision=revision)
        known = {"name_or_path": str(place), "model_type": described.get("model_type")}
        options["config"] = PreTrainedConfig.from_dict(known)
    tokenizer: Any = kind.from_pretrained(place, **options)
    if not tokenizer.is_fast:
        raise BaseModelError(
            f"{place}: its tokenizer has no tokenizer.json form (a fast tokenizer); choose another in "
            "model.tokenizer"
        )
    forget_settings_of_calls(tokenizer.backend_tokenizer)
    return cast("PreTrainedTokenizerBase", tokenizer)


def check_ids(tokenizer: PreTrainedTokenizerBase, num_rows: int) -> None:
    """Raise BaseModelError if an id of a tokenizer has no row in the base's embedding."""
    if (num := num_ids(tokenizer)) > num_rows:
        raise BaseModelError(
            f"model.base: the tokenizer of {tokenizer.name_or_path} has the id {num - 1:,}, but the base's embedding "
            f"has only {num_rows:,} rows; set model.tokenizer to the base's own"
        )
