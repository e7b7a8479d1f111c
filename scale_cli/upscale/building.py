"""The model that a method trains, built on a base: widened or plain, with or without new tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.config.vocabulary import Script
from scale_cli.errors import ConfigError
from scale_cli.methods.starts.start import TextToLearn
from scale_cli.methods.starts.stream_sizes import random_ids
from scale_cli.model.family_scale import family_of
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.model.vocabulary_scale import NewTokens
from scale_cli.upscale.base import load_base_config
from scale_cli.upscale.quantised_base import is_quantised
from scale_cli.vocabulary.growing import Spelling, pieces

if TYPE_CHECKING:
    from peft import PeftModel  # slow to import, and only PEFT's methods need it


# What a method trains: a widened model, a plain one, or a plain one with PEFT's adapters.
MethodModel: TypeAlias = "ScaleForCausalLM | PreTrainedModel | PeftModel"


# Offset of a new token's first logit from that of its first piece; without it, so many tokens would
# take much mass.
_BIAS = -8.0


@dataclass(frozen=True)
class NewPieces:
    """The pieces of new tokens, as `ScaleConfig` stores them."""

    new_tokens: list[str]
    own_pieces: list[int]


def new_pieces(
    config: RunConfig, base: PreTrainedTokenizerBase, grown: PreTrainedTokenizerBase
) -> NewPieces | None:
    """Return the pieces of a run's new tokens; None if it has no new tokens."""
    vocabulary = config.method.vocabulary
    if vocabulary is None:
        return None
    spelling = Spelling.of(base.backend_tokenizer, config.model.base)
    script = Script.named(vocabulary.script)
    of_each = pieces(grown.backend_tokenizer, spelling, load_base_config(config.model).vocab_size)
    first = sorted({old[0] for old in of_each})
    spelt = map(spelling.to_bytes, grown.convert_ids_to_tokens(first))
    own = [
        index for index, of_piece in zip(first, spelt, strict=True) if script.alone_begins(of_piece)
    ]
    return NewPieces([" ".join(map(str, old)) for old in of_each], own)


def start_model(
    base: PreTrainedModel,
    method: MethodConfig,
    seed: int,
    new: NewPieces | None = None,  # tokens that are added
    text: TextToLearn | None = None,
) -> MethodModel:
    """Return a method's model before any training; `base` becomes a part of it."""
    if method.vocabulary is not None and new is None:
        raise ConfigError("method.vocabulary: only `scale upscale` adds tokens; remove it here")
    ids = random_ids(base, seed)
    model: Any = build_model(base, method, seed, new)
    if new is not None:
        head = model.expansion.new_tokens.lm_head if method.definition.widens else model.lm_head
        _start_new_head(head.weight[-len(new.new_tokens) :], base, new, ids)
    method.definition.start(model, method.settings, seed, text)
    return model


def build_model(
    base: PreTrainedModel, method: MethodConfig, seed: int, new: NewPieces | None = None
) -> MethodModel:
    """Return a method's model with `requires_grad` set; `start_model` fills the parameters that it
    adds.

    Parameters that train are in float32, whatever the base's dtype: the optimiser updates this
    master copy.
    """
    definition = method.definition
    if any(map(is_quantised, base.parameters())):
        method.check_goes_with_8_bits()
    if new is not None and not definition.widens:
        base = grow_plainly(base, new)
    if method.trains_base_weights:
        base.float()
    model: MethodModel = definition.build(base, method.settings, seed, new)
    return model


@torch.no_grad()
def _start_new_head(rows_ND: Tensor, base: Any, new: NewPieces, input_ids: Tensor) -> None:
    """Start the rows that predict new tokens as those of their first pieces, with logits lower by
    about 8 (`_BIAS`).

    A plain Llama's head has no bias. Instead, a multiple of the mean last state is added, measured
    on (1, T) old tokens: all last states have about the same component along it.
    """
    mean_D = (
        base.model(input_ids, use_cache=False).last_hidden_state.float().flatten(0, 1).mean(dim=0)
    )
    rows_VD = base.lm_head.weight
    first = [int(token.split()[0]) for token in new.new_tokens]
    of_first_ND = rows_VD[torch.tensor(first, device=rows_VD.device)]
    rows_ND.copy_(of_first_ND + _BIAS * mean_D / mean_D.square().sum())


@torch.no_grad()
def grow_plainly(base: PreTrainedModel, new: NewPieces) -> PreTrainedModel:
    """Untie a plain base's embedding and head, and add rows for new tokens; the head's rows are not
    filled yet.
    """
    model: Any = base
    embed_tokens = model.model.embed_tokens
    rows = NewTokens(base, new.new_tokens, new.own_pieces).to(base.device)
    of_x = rows.embed_tokens.weight / family_of(base.config).embedding_factor(embed_tokens)
    embedding, head = (
        torch.cat([old.weight, added.to(old.weight)])
        for old, added in ((embed_tokens, of_x), (model.lm_head, rows.lm_head.weight))
    )
    embed_tokens.weight = nn.Parameter(embedding)
    embed_tokens.num_embeddings = len(embedding)
    embed_tokens.padding_idx = None
    model.lm_head = nn.Linear(head.shape[1], len(head), bias=False)
    model.lm_head.weight = nn.Parameter(head)
    base.config.update({"vocab_size": len(head), "tie_word_embeddings": False, **asdict(new)})
    return base
