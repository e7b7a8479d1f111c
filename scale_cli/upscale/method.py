"""From a config to the model that its method trains, at its start; that model beside its base; what trains in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from scale_cli.config.schema import MethodConfig, ModelConfig, RunConfig
from scale_cli.config.vocabulary import Script
from scale_cli.data.encoding import Ids
from scale_cli.errors import ConfigError
from scale_cli.methods.starts import random_ids
from scale_cli.methods.widened import RouterConfig
from scale_cli.model.heads import BaseAndTrained, HeadedModel
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.model.serving_scale import WidenedModel
from scale_cli.model.vocabulary_scale import BaseOfNewTokens, NewTokens
from scale_cli.upscale.base import load_base, load_base_config
from scale_cli.vocabulary.extension import Spelling, pieces

if TYPE_CHECKING:
    from peft import PeftModel  # takes a moment to import, and only LoRA needs it

# What a method trains: a widened model, a plain one, or a plain one with PEFT's adapters.
MethodModel: TypeAlias = "ScaleForCausalLM | PreTrainedModel | PeftModel"
# Of parameters: learning rates, weight decay and optimisers tell them apart.
Kind = Literal["embedding", "head", "gains", "matrix"]
# What a new token's logit begins with beside its first piece's: else so many would take mass from everything.
_BIAS = -8.0


@dataclass(frozen=True)
class NewPieces:
    """What new tokens are made of, as a configuration holds it (`ScaleConfig`)."""

    new_tokens: list[str]
    own_pieces: list[int]

    @classmethod
    def unknown(cls, count: int) -> NewPieces:
        """Return as many as there will be, for sizes alone."""
        return cls(["0"] * count, [])

    @property
    def first(self) -> list[int]:
        """Of every new token the first piece."""
        return [int(token.split()[0]) for token in self.new_tokens]

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


def start_model(
    base: PreTrainedModel,  # plain or widened
    method: MethodConfig,
    seed: int,
    new: NewPieces | None = None,  # tokens that are added
    tokenizer: PreTrainedTokenizerBase | None = None,  # the run's; only codes of E' that are random do without
    ids_N: Ids | None = None,  # the text in which codes by cooccurrence are counted
) -> MethodModel:
    """Return what a method makes of a base before any training; `base` becomes a part of it."""
    if method.vocabulary is not None and new is None:
        raise ConfigError("method.vocabulary: only `scale upscale` adds tokens; leave it out here")
    ids, num_old = random_ids(base, seed), base.config.vocab_size
    model = build_model(base, method, seed, new)
    if new is not None:
        _start_new_head(method.definition.new_rows(model, num_old), base, new, ids)
    method.definition.start(model, method.settings, seed, tokenizer, ids_N)
    return model


def build_model(base: PreTrainedModel, method: MethodConfig, seed: int, new: NewPieces | None = None) -> MethodModel:
    """Return a method's model, which of it trains decided; what it adds is filled by `start_model`.

    What trains is held in float32, whatever the base's dtype: it is the master copy that the optimiser updates.
    """
    definition = method.definition
    if isinstance(base, ScaleForCausalLM) and not definition.widens:
        raise ConfigError(
            f"method.variant: {method.variant}: a widened base is only widened further (preserve, route); to train it "
            "otherwise, export it as llama and start from that"
        )
    if new is not None and not definition.widens:
        base = grow_plainly(base, new)
    if method.trains_base_weights:
        base.float()
    model: MethodModel = definition.build(base, method.settings, seed, new)
    return model


@torch.no_grad()
def _start_new_head(rows_ND: Tensor, base: Any, new: NewPieces, input_ids: Tensor) -> None:
    """Let the rows that predict new tokens start as those of their first pieces, and lower.

    A plain Llama's head has no bias: what is added is a direction along which the last states have about one size,
    measured on (1, T) old tokens.
    """
    mean_D = base.model(input_ids, use_cache=False).last_hidden_state.float().flatten(0, 1).mean(dim=0)
    rows_VD = base.lm_head.weight
    started_ND = rows_VD[torch.tensor(new.first, device=rows_VD.device)] + _BIAS * mean_D / mean_D.square().sum()
    rows_ND.copy_(started_ND)


@torch.no_grad()
def grow_plainly(base: PreTrainedModel, new: NewPieces) -> PreTrainedModel:
    """Give a plain base's embedding and head, untied, rows for new tokens; those of the head are not filled yet."""
    model: Any = base
    rows = new.rows(base).to(base.device)
    embedding, head = (
        torch.cat([old.weight, added.weight.to(old.weight)])
        for old, added in ((model.model.embed_tokens, rows.embed_tokens), (model.lm_head, rows.lm_head))
    )
    model.model.embed_tokens = nn.Embedding.from_pretrained(embedding, freeze=False)
    model.lm_head = nn.Linear(head.shape[1], len(head), bias=False)
    model.lm_head.weight = nn.Parameter(head)
    grown = {"vocab_size": len(head), "tie_word_embeddings": False}
    base.config.update({**grown, "new_tokens": new.new_tokens, "own_pieces": new.own_pieces})
    return base


def set_router(model: MethodModel, router: RouterConfig) -> None:
    """Give a widened model the router that a config asks for now; it may differ from the one it was trained under."""
    if isinstance(model, ScaleForCausalLM):
        for name in RouterConfig.model_fields:
            setattr(model.config, f"router_{name}", getattr(router, name))


def router_of(model: WidenedModel) -> RouterConfig:
    return RouterConfig.model_validate(
        {name: getattr(model.config, f"router_{name}") for name in RouterConfig.model_fields}
    )


def two_headed(model: MethodModel, base: ModelConfig) -> HeadedModel:
    """Return a model whose base head and trained head are observed together.

    A widened model is one already; any other gets the untouched base at its side, a second model in memory.
    """
    return model if isinstance(model, ScaleForCausalLM) else beside_base(model, load_base(base))


def beside_base(model: Any, untouched: PreTrainedModel) -> HeadedModel:
    beside: BaseAndTrained = BaseAndTrained(beside_new_tokens(untouched, model), model).to(model.device)
    return beside.eval()


def beside_new_tokens(base: PreTrainedModel, trained: Any) -> nn.Module:
    """Return an untouched base, still whole, that reads the tokens which a trained plain model has beside its own."""
    config = trained.config
    if not getattr(config, "new_tokens", None):
        return base
    return BaseOfNewTokens(base, NewPieces(config.new_tokens, config.own_pieces).rows(base).to(trained.device), config)


def kinds_of_parameters(model: nn.Module) -> dict[str, Kind]:
    """Return of every parameter that trains, by name, what it is; a tied embedding is an embedding."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}

    def kind(name: str, parameter: nn.Parameter) -> Kind:
        if id(parameter) in embeddings:
            return "embedding"
        if parameter.ndim < 2:
            return "gains"
        return "head" if "lm_head" in name else "matrix"

    named = model.named_parameters()
    return {name: kind(name, parameter) for name, parameter in named if parameter.requires_grad}


def moments_of(kind: Kind, optimiser: Literal["adamw", "muon"]) -> tuple[str, ...]:
    """Return what an optimiser keeps of a parameter, each as large as it, by torch's names."""
    return ("momentum_buffer",) if optimiser == "muon" and kind == "matrix" else ("exp_avg", "exp_avg_sq")
