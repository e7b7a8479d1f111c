"""A run's own tokenizer, where its method adds tokens, and the base that has rows for them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from scale_cli.config.load import load_config
from scale_cli.config.schema import ModelConfig, RunConfig
from scale_cli.config.sources import CorpusSource, TextSource
from scale_cli.config.vocabulary import Script, VocabularyConfig
from scale_cli.data.corpora import cache_dir, replay_sources
from scale_cli.errors import BaseModelError
from scale_cli.model.vocabulary_scale import BaseOfNewTokens, NewTokens
from scale_cli.storage.atomic import is_whole, read_json
from scale_cli.storage.layout import RunFolder
from scale_cli.upscale.base import load_base_config, stage_folder
from scale_cli.upscale.tokenizer import load_tokenizer, tokenizer_place
from scale_cli.vocabulary.extension import SENTENCEPIECE, pieces, with_new_pieces
from scale_cli.vocabulary.proofs import check_extension
from scale_cli.vocabulary.spelling import Spelling
from scale_cli.vocabulary.tokenizer import (
    TOKENIZER_FILES,
    Extension,
    load_grown,
    read_texts,
    write_grown,
)

# Of every source that new tokens are learned on: text that has to come back from them.
_BYTES_RETURNED = 1 << 22
# What a new token's logit begins with beside its first piece's: else so many would take mass from everything.
_BIAS = -8.0


@dataclass(frozen=True)
class NewPieces:
    """What new tokens are made of, as a configuration holds it (`ScaleConfig`)."""

    new_tokens: list[str]
    own_pieces: list[int]

    @classmethod
    def written(cls, config: dict[str, Any]) -> NewPieces:
        """Read them in a config.json."""
        return cls(list(config["new_tokens"]), list(config["own_pieces"]))

    @property
    def first(self) -> list[int]:
        """Of every new token the first piece."""
        return [int(token.split()[0]) for token in self.new_tokens]

    @classmethod
    def unknown(cls, count: int) -> NewPieces:
        """Return as many as there will be, for sizes alone."""
        return cls(["0"] * count, [])

    def rows(self, base: Any) -> NewTokens:
        """Return the new tokens' rows on a plain base, those of x filled."""
        new = NewTokens(base, [[int(index) for index in token.split()] for token in self.new_tokens], self.own_pieces)
        new.compose(base.model.embed_tokens)
        return new


def load_run_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a run: the base's, or the one with new tokens, learned first where nobody has yet."""
    upscaled = RunFolder(config.output_dir).upscaled
    return load_grown(upscaled) if _is_upscaled(config) else make_run_tokenizer(config)


def _is_upscaled(config: RunConfig) -> bool:
    vocabulary, written = config.method.vocabulary, RunFolder(config.output_dir).upscaled / "scale.yaml"
    return vocabulary is not None and written.is_file() and load_config(written).method.vocabulary == vocabulary


def make_run_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a run that is about to be upscaled: as `load_run_tokenizer`, whatever was before."""
    vocabulary = config.method.vocabulary
    if vocabulary is None:
        return load_tokenizer(config.model)
    if stage_folder(config.model) is not None:
        raise BaseModelError(f"method.vocabulary: {config.model.base} is widened; only a plain base takes new tokens")
    return _extension(config, vocabulary).tokenizer()


def _extension(config: RunConfig, vocabulary: VocabularyConfig) -> Extension:
    first_id = load_base_config(config.model).vocab_size
    base, sources = load_tokenizer(config.model), learned_on(config)
    return Extension(base, first_id, vocabulary, sources, config.corpus, cache_dir(config))


def known_run_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase | None:
    """Return a run's tokenizer; None where it would have to be learned first."""
    vocabulary, cache = config.method.vocabulary, cache_dir(config)
    if vocabulary is None or vocabulary.folder is not None or _is_upscaled(config):
        return load_run_tokenizer(config)
    if not any(cache.glob("vocabulary.*")):
        return None  # and no text has to be looked at
    folder = _extension(config, vocabulary).folder
    return load_grown(folder) if is_whole(folder) else None


def sketched_run_tokenizer(config: RunConfig, num_bytes: int) -> Tokenizer:
    """Return about what a run's tokenizer will be, from so much of each of its texts."""
    assert config.method.vocabulary is not None
    return _extension(config, config.method.vocabulary).sketched(num_bytes)


def learned_on(config: RunConfig) -> list[CorpusSource]:
    """Return the sources that a run's new tokens are learned on."""
    assert config.method.vocabulary is not None
    named = config.method.vocabulary.sources
    return [source for source in config.corpus.sources if (source.name in named if named else source.role == "new")]


def tokenizer_of(folder: Path, model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a method folder: its own where it has new tokens, else its base's."""
    grown = read_json(folder / "config.json").get("new_tokens")
    return load_grown(folder) if grown else load_tokenizer(model)


def write_run_tokenizer(folder: Path, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Save a run's tokenizer."""
    if config.method.vocabulary is None:
        tokenizer.save_pretrained(folder)
    else:
        write_grown_tokenizer(folder, config.model, tokenizer)


def write_grown_tokenizer(folder: Path, base: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Save a tokenizer that has new tokens; where its base has a SentencePiece model too, that with them."""
    write_grown(folder, tokenizer)
    found = tokenizer_place(base).file(SENTENCEPIECE)
    if found is not None and not Spelling.of(tokenizer.backend_tokenizer, base.base).byte_level:
        first_id = load_base_config(base).vocab_size
        grown = with_new_pieces(found.read_bytes(), tokenizer.backend_tokenizer, first_id)
        (folder / SENTENCEPIECE).write_bytes(grown)


def copy_grown_tokenizer(config: RunConfig, folder: Path) -> None:
    """Put a run's tokenizer into another of its folders, where it is not the base's."""
    if config.method.vocabulary is not None:
        for name in TOKENIZER_FILES:
            if (file := RunFolder(config.output_dir).upscaled / name).is_file():
                shutil.copyfile(file, folder / name)


def prove_vocabulary(config: RunConfig, base: PreTrainedTokenizerBase, grown: PreTrainedTokenizerBase) -> int:
    """Hold a grown tokenizer to the base's; return how many texts were compared."""
    vocabulary = config.method.vocabulary
    assert vocabulary is not None
    kept: list[TextSource] = [source for source in config.evaluation.perplexity if source.role == "retention"]
    kept += replay_sources(config)
    return check_extension(
        base.backend_tokenizer,
        grown.backend_tokenizer,
        Script.named(vocabulary.script),
        read_texts(kept, config.corpus),
        read_texts(learned_on(config), config.corpus, _BYTES_RETURNED),
        config.seed,
    )


def new_pieces(config: RunConfig, base: PreTrainedTokenizerBase, grown: PreTrainedTokenizerBase) -> NewPieces | None:
    """Return what the new tokens of a run are made of; None where it has none."""
    vocabulary = config.method.vocabulary
    if vocabulary is None:
        return None
    spelling, script = Spelling.of(base.backend_tokenizer, config.model.base), Script.named(vocabulary.script)
    of_each = pieces(grown.backend_tokenizer, spelling, load_base_config(config.model).vocab_size)
    first = sorted({old[0] for old in of_each})
    spelt = map(spelling.to_bytes, grown.convert_ids_to_tokens(first))
    own = [index for index, of_piece in zip(first, spelt, strict=True) if script.alone_begins(of_piece)]
    return NewPieces([" ".join(map(str, old)) for old in of_each], own)


@torch.no_grad()
def start_new_head(rows_ND: Tensor, base: Any, first: Sequence[int], input_ids: Tensor) -> None:
    """Let the rows that predict new tokens start as those of their first pieces, and lower.

    A plain Llama's head has no bias: what is added is a direction along which the last states have about one size,
    measured on (1, T) old tokens.
    """
    mean_D = base.model(input_ids, use_cache=False).last_hidden_state.float().flatten(0, 1).mean(dim=0)
    rows_VD = base.lm_head.weight
    started_ND = rows_VD[torch.tensor(first, device=rows_VD.device)] + _BIAS * mean_D / mean_D.square().sum()
    rows_ND.copy_(started_ND)


@torch.no_grad()
def grow_plainly(base: PreTrainedModel, pieces: NewPieces) -> PreTrainedModel:
    """Give a plain base's embedding and head, untied, rows for new tokens; those of the head are not filled yet."""
    new = pieces.rows(base).to(base.device)
    for owner, name, rows in ((base.model, "embed_tokens", new.embed_tokens), (base, "lm_head", new.lm_head)):
        old = getattr(owner, name).weight
        grown = torch.cat([old, rows.weight.to(old.device, old.dtype)])
        module = (
            nn.Embedding(*grown.shape) if name == "embed_tokens" else nn.Linear(grown.shape[1], len(grown), bias=False)
        )
        module.weight = nn.Parameter(grown)
        setattr(owner, name, module)
    base.config.update(
        {
            "vocab_size": len(base.lm_head.weight),
            "tie_word_embeddings": False,
            "new_tokens": pieces.new_tokens,
            "own_pieces": pieces.own_pieces,
        }
    )
    return base


def beside_new_tokens(base: PreTrainedModel, trained: Any) -> nn.Module | PreTrainedModel:
    """Return an untouched base, still whole, that reads the tokens which a trained plain model has beside its own."""
    if not getattr(trained.config, "new_tokens", None):
        return base
    new = NewPieces.written(trained.config.to_dict()).rows(base).to(trained.device)
    return BaseOfNewTokens(base, new, trained.config)
