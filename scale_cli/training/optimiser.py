"""AdamW over what trains, and its state as named tensors (no pickle)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scale_cli.config.schema import TrainConfig
from scale_cli.errors import StorageError

_MOMENTS = ("exp_avg", "exp_avg_sq")


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name; trainability is decided by the model's structure, at load."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def build_optimiser(model: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters; nothing frozen has any state.

    Weight decay acts on matrices only: not on gains and biases, and not on embeddings, whose rows would shrink at every
    step in which their token does not occur.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    parameters = trainable_parameters(model).values()
    decayed = [p for p in parameters if p.ndim >= 2 and id(p) not in embeddings]
    kept = [p for p in parameters if p.ndim < 2 or id(p) in embeddings]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": train.weight_decay}, {"params": kept, "weight_decay": 0.0}],
        lr=train.lr,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_epsilon,
        fused=True,
    )


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
