"""Kinds of parameters, which learning rates, weight decay and optimisers tell apart."""

from __future__ import annotations

from typing import Literal

from torch import nn

Kind = Literal["embedding", "head", "gains", "matrix"]


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
