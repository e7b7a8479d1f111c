"""From a config to the model that its method trains, at its start; that model beside its base; what trains in it."""

from __future__ import annotations

from typing import Literal

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from scale_cli.config.schema import MethodConfig, ModelConfig
from scale_cli.data.encoding import Ids
from scale_cli.errors import ConfigError
from scale_cli.methods.starts import random_ids
from scale_cli.methods.widened import RouterConfig
from scale_cli.model.heads import BaseAndTrained, HeadedModel
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.model.serving_scale import WidenedModel
from scale_cli.upscale.base import load_base
from scale_cli.upscale.folder import MethodModel
from scale_cli.upscale.vocabulary import NewPieces, beside_new_tokens, grow_plainly, start_new_head

# Of parameters: learning rates, weight decay and optimisers tell them apart.
Kind = Literal["embedding", "head", "gains", "matrix"]


def start_model(
    base: PreTrainedModel,
    method: MethodConfig,
    seed: int,
    new: NewPieces | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    ids_N: Ids | None = None,
) -> MethodModel:
    """Return what a method makes of a base before any training; `base` becomes a part of it.

    Args:
        base: a plain or a widened model.
        method: what is made of it.
        seed: of what is drawn.
        new: tokens that are added.
        tokenizer: the run's; only codes of E' that are random do without.
        ids_N: the text in which codes by cooccurrence are counted.
    """
    if method.vocabulary is not None and new is None:
        raise ConfigError("method.vocabulary: only `scale upscale` adds tokens; leave it out here")
    ids, num_old = random_ids(base, seed), base.config.vocab_size
    model = build_model(base, method, seed, new)
    if new is not None:
        start_new_head(method.definition.new_rows(model, num_old), base, new.first, ids)
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


def set_router(model: MethodModel, router: RouterConfig) -> None:
    """Give a widened model the router that a config asks for now; it may differ from the one it was trained under."""
    if isinstance(model, ScaleForCausalLM):
        for name in RouterConfig.model_fields:
            setattr(model.config, f"router_{name}", getattr(router, name))


def router_of(model: WidenedModel) -> RouterConfig:
    """Return the router that a model has."""
    return RouterConfig.model_validate(
        {name: getattr(model.config, f"router_{name}") for name in RouterConfig.model_fields}
    )


def two_headed(model: MethodModel, base: ModelConfig) -> HeadedModel:
    """Return a model whose base head and trained head are observed together.

    A widened model is one already; any other gets the untouched base at its side, a second model in memory.
    """
    if isinstance(model, ScaleForCausalLM):
        return model
    beside: BaseAndTrained = BaseAndTrained(beside_new_tokens(load_base(base), model), model).to(model.device)
    return beside.eval()


def kinds_of_parameters(model: nn.Module) -> dict[str, Kind]:
    """Return of every parameter that trains, by name, what it is; a tied embedding is an embedding."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {
        name: _kind(name, parameter, id(parameter) in embeddings)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _kind(name: str, parameter: nn.Parameter, embeds: bool) -> Kind:
    if embeds:
        return "embedding"
    if parameter.ndim < 2:
        return "gains"
    return "head" if "lm_head" in name else "matrix"


def moments_of(kind: Kind, optimiser: Literal["adamw", "muon"]) -> tuple[str, ...]:
    """Return what an optimiser keeps of a parameter, each as large as it, by torch's names."""
    return ("momentum_buffer",) if optimiser == "muon" and kind == "matrix" else ("exp_avg", "exp_avg_sq")
