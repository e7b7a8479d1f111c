"""A base that has rows for new tokens, and what these are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from scale_cli.config.schema import RunConfig
from scale_cli.config.vocabulary import Script
from scale_cli.model.vocabulary_scale import BaseOfNewTokens, NewTokens
from scale_cli.upscale.base import load_base_config
from scale_cli.vocabulary.extension import Spelling, pieces

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
