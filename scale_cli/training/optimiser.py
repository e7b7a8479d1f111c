"""AdamW over what trains, and its state as named tensors (no pickle)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from scale_cli.config.schema import TrainConfig
from scale_cli.errors import StorageError

_MOMENTS = ("exp_avg", "exp_avg_sq")


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name; trainability is decided by the model's structure, at load."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


# Of an expansion whose E' has a size of its own: rates relative to train.lr, that of E' to its size as well. At a rate
# of 5e-3 a step moves E' by a fifth of itself. Source: ours (docs/recipe.md).
_EMBEDDING_PER_RMS, _HEAD, _GAINS = 40.0, 2.0, 0.1


@dataclass(frozen=True)
class Rates:
    """Learning rates by kind of tensor, relative to that of the matrices."""

    embedding: float = 1.0
    head: float = 1.0
    gains: float = 1.0


def rates_of(model: nn.Module, train: TrainConfig) -> Rates:
    """Return the rates of a model's kinds of tensors: those of its start, but where the config has others."""
    embedding_rms = getattr(getattr(model, "config", None), "expansion_embedding_rms", None)
    of_start = Rates() if embedding_rms is None else Rates(_EMBEDDING_PER_RMS * embedding_rms, _HEAD, _GAINS)
    return replace(of_start, **train.lr_multipliers.model_dump(exclude_none=True))


def build_optimiser(model: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters, a group for each kind; nothing frozen has any state.

    Weight decay acts on matrices only: not on gains and biases, and not on embeddings, whose rows would shrink at every
    step in which their token does not occur.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    rates = rates_of(model, train)
    kinds = {"embedding": (rates.embedding, 0.0), "gains": (rates.gains, 0.0)}
    kinds |= {"head": (rates.head, train.weight_decay), "matrix": (1.0, train.weight_decay)}
    members: dict[str, list[nn.Parameter]] = {kind: [] for kind in kinds}
    for name, parameter in trainable_parameters(model).items():
        members[_kind(name, parameter, id(parameter) in embeddings)].append(parameter)
    groups = [
        {"params": members[kind], "lr_multiplier": multiplier, "weight_decay": decay}
        for kind, (multiplier, decay) in kinds.items()
        if members[kind]
    ]
    return torch.optim.AdamW(
        groups, lr=train.lr, betas=(train.adam_beta1, train.adam_beta2), eps=train.adam_epsilon, fused=True
    )


def _kind(name: str, parameter: nn.Parameter, embeds: bool) -> str:
    if embeds:
        return "embedding"
    if parameter.ndim < 2:
        return "gains"
    return "head" if "lm_head" in name else "matrix"


def set_learning_rate(optimiser: torch.optim.Optimizer, lr: float) -> None:
    """Give every group its own rate, where the matrices have `lr`."""
    for group in optimiser.param_groups:
        group["lr"] = lr * group.get("lr_multiplier", 1.0)


def optimiser_tensors(optimiser: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the moments of every trainable parameter as `exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME`."""
    tensors = {}
    for name, parameter in trainable_parameters(model).items():
        if not (state := optimiser.state[parameter]):
            continue  # no step has been taken yet
        for moment in (*_MOMENTS, "step"):
            tensors[f"{moment}.{name}"] = state[moment]
    return tensors


def empty_optimiser_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return moments to be filled, named as by `optimiser_tensors`, and sharded where the parameters are."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in trainable_parameters(model).items():
        for moment in _MOMENTS:
            tensors[f"{moment}.{name}"] = torch.zeros_like(parameter.detach())
        tensors[f"step.{name}"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return tensors


def load_optimiser_tensors(optimiser: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Put saved moments back.

    Raises:
        StorageError: a moment is missing or of another shape.
    """
    if not tensors:
        return  # no step had been taken
    for name, parameter in trainable_parameters(model).items():
        state = {}
        for moment in _MOMENTS:
            tensor = tensors.get(f"{moment}.{name}")
            if tensor is None or tensor.shape != parameter.shape:
                raise StorageError(f"optimiser state: {moment}.{name} is missing or of another shape")
            state[moment] = tensor.to(parameter.device)
        # The fused AdamW keeps its step counts on the parameters' device, in float32.
        state["step"] = tensors[f"step.{name}"].to(parameter.device)
        optimiser.state[parameter] = state
