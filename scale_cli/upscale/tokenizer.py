"""Tokenizers: a model's, wherever it comes from, and a run's own, where its method adds tokens."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from scale_cli.config.schema import ModelConfig, RunConfig
from scale_cli.config.sources import CorpusSource, TextSource
from scale_cli.config.vocabulary import Script
from scale_cli.data.tokens import tokenizer_sha256
from scale_cli.errors import BaseModelError, ChangedBaseError, one_line
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.records import BaseRecord
from scale_cli.upscale.base import REMEDY, load_base_config, stages_below
from scale_cli.vocabulary.extension import SENTENCEPIECE, Spelling, with_new_pieces
from scale_cli.vocabulary.proofs import check_extension
from scale_cli.vocabulary.tokenizer import TOKENIZER_FILES, load_grown, read_texts, write_grown

_BYTES_RETURNED = 1 << 22  # of every source that new tokens are learned on: text that has to come back from them


@dataclass(frozen=True)
class TokenizerPlace:
    """Where a tokenizer lies."""

    key: str  # of the config, that says so
    name: str  # hub id or folder
    revision: str | None  # on the hub
    of_run: bool = False  # whether a run with new tokens has it


def tokenizer_place(model: ModelConfig) -> TokenizerPlace:
    """Return where a model's tokenizer lies; of a widened base without new tokens, that of what it stands on."""
    for folder, config in stages_below(model):
        if model.tokenizer is not None:
            break
        if config.method.vocabulary is not None:
            return TokenizerPlace("model.base", str(folder), None, of_run=True)
        model = config.model
    if model.tokenizer is not None:
        return TokenizerPlace("model.tokenizer", model.tokenizer, None)
    return TokenizerPlace("model.base", model.base, model.revision)


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer: the one that the config names, or the base's own."""
    place = tokenizer_place(model)
    try:
        if place.of_run:
            return load_grown(Path(place.name))
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            place.name, revision=place.revision, trust_remote_code=False
        )
    except Exception as error:  # of a damaged folder it may say anything
        raise BaseModelError(
            f"{place.key}: the tokenizer of {place.name} cannot be loaded; say in model.tokenizer where one is: "
            f"{one_line(error)}"
        ) from None
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, record: BaseRecord) -> None:
    now = tokenizer_sha256(tokenizer)
    if record.tokenizer_sha256 and now != record.tokenizer_sha256:
        raise ChangedBaseError(
            f"model.base: the tokenizer of {tokenizer.name_or_path} is not the one at `scale upscale` (SHA-256 "
            f"{record.tokenizer_sha256[:12]} -> {now[:12]}); {REMEDY}"
        )


def learned_on(config: RunConfig) -> list[CorpusSource]:
    assert config.method.vocabulary is not None
    named = config.method.vocabulary.sources
    return [source for source in config.corpus.sources if source.name in named] if named else config.corpus.new


def write_grown_tokenizer(folder: Path, base: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Save a tokenizer that has new tokens; where its base has a SentencePiece model too, that with them."""
    write_grown(folder, tokenizer)
    place = tokenizer_place(base)
    found = None
    with suppress(OSError):  # it has none, or it is not at hand
        found = cached_file(place.name, SENTENCEPIECE, revision=place.revision)
    if found is not None and not Spelling.of(tokenizer.backend_tokenizer, base.base).byte_level:
        first_id = load_base_config(base).vocab_size
        grown = with_new_pieces(Path(found).read_bytes(), tokenizer.backend_tokenizer, first_id)
        (folder / SENTENCEPIECE).write_bytes(grown)


def copy_grown_tokenizer(config: RunConfig, folder: Path) -> None:
    """Put a run's tokenizer into another of its folders, where it is not the base's."""
    if config.method.vocabulary is not None:
        for name in TOKENIZER_FILES:
            if (file := RunFolder(config.output_dir).upscaled / name).is_file():
                shutil.copyfile(file, folder / name)


def prove_vocabulary(config: RunConfig, base: PreTrainedTokenizerBase, grown: PreTrainedTokenizerBase) -> int:
    assert config.method.vocabulary is not None
    kept: list[TextSource] = [source for source in config.evaluation.perplexity if source.role == "retention"]
    return check_extension(
        base.backend_tokenizer,
        grown.backend_tokenizer,
        Script.named(config.method.vocabulary.script),
        read_texts([*kept, *config.corpus.replay], config.corpus),
        read_texts(learned_on(config), config.corpus, _BYTES_RETURNED),
        config.seed,
    )
