"""FSDP2: a process holds a part of every sharded tensor, and the whole of one layer's while it computes that layer.

| train.sharding | what trains | what is frozen    |
|----------------|-------------|-------------------|
| none           | replicated  | replicated (DDP)  |
| expansion      | sharded     | replicated        |
| all            | sharded     | sharded           |

Parameters, gradients and moments are split by rows. A unit is one layer; the root unit is all that lies outside the
layers: embeddings, last norms, heads. Gradients are reduced at every micro-batch, not at the last one only: without
that every process would hold them whole.

`fully_shard` is called here and not by Accelerate, whose wrapping knows modules that are called: a widened model's
heads are read without a call (`model/head_loss.py`), and so are its base layers (`model/expansion_scale.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from scale_cli.config.training import TrainConfig
from scale_cli.errors import ConfigError
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.training.optimiser import trainable_parameters
from scale_cli.upscale.base import tensor_sha256
from scale_cli.upscale.folder import MethodModel
from scale_cli.upscale.objective import ChunkedLossModel, for_training


def shard_model(model: MethodModel, accelerator: Accelerator, train: TrainConfig) -> nn.Module:
    """Shard a model in place over all processes, put what this process holds on its device, and return what to train.

    Args:
        model: whole, on the CPU: one layer at a time goes to the device before it is split.
        accelerator: processes and devices.
        train: `sharding` decides whether what does not train is replicated.
    """
    if isinstance(model, ScaleForCausalLM) and isinstance(model.base, ScaleForCausalLM):
        raise ConfigError(f"train.sharding: {train.sharding}: not over a base that is widened already; choose none")
    root = for_training(model, train)
    _shard(model, root, accelerator, keep_frozen_whole=train.sharding == "expansion")
    return root


def _shard(model: MethodModel, root: nn.Module, accelerator: Accelerator, *, keep_frozen_whole: bool) -> None:
    """Make a unit of every layer of a model, and one of the rest, which is gathered when `root` is called."""
    device = accelerator.device
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    whole = set(frozen) if keep_frozen_whole else set()
    for parameter in whole:
        parameter.data = parameter.data.to(device)
    mesh = init_device_mesh(device.type, (accelerator.num_processes,))
    shard = partial(fully_shard, mesh=mesh)
    if isinstance(model, ScaleForCausalLM):
        _shard_widened_layers(model, partial(shard, ignored_params=whole))
    else:
        for layer in _plain_model(model).model.layers:
            if any(parameter not in whole for parameter in layer.parameters()):
                shard(layer, ignored_params=whole)
    # The base layers of a widened model lie in units of their own, but not below the modules that these units are of.
    sharded = {parameter for parameter in model.parameters() if isinstance(parameter, DTensor)}
    shard(root, ignored_params=whole | sharded)


def _shard_widened_layers(model: ScaleForCausalLM, shard: Any) -> None:
    """Make a unit of every added layer with its base layer: the added one computes both."""
    for base_layer, added in zip(model.base.model.layers, model.expansion.layers, strict=True):
        added.base_layer = base_layer
        shard(added)
        del added.base_layer
        # Evaluation runs a collaborating base layer by itself first, for the untouched stream.
        base_layer.register_forward_pre_hook(partial(_gather_unit, added))


def _gather_unit(unit: Any, *_: object) -> None:
    unit.unshard()


def _plain_model(model: MethodModel) -> Any:
    return model if isinstance(model, PreTrainedModel) else model.get_base_model()


def is_sharded(model: nn.Module) -> bool:
    """Return whether a process holds parts of a model only."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def local_part(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor: all of it where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return all of a tensor; of a sharded one by asking every process, so every process has to call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_trained(model: nn.Module, accelerator: Accelerator) -> dict[str, Tensor]:
    """Return every parameter that trains, whole, to the main process, and nothing to the others; all have to call."""
    gathered = {}
    for name, parameter in trainable_parameters(model).items():
        tensor = whole_tensor(parameter.detach())
        if accelerator.is_main_process:
            gathered[name] = tensor.cpu()
    return gathered


def hash_parts(module: nn.Module) -> dict[str, str]:
    """Return the SHA-256 of what this process holds of every parameter."""
    return {name: tensor_sha256(local_part(parameter)) for name, parameter in module.named_parameters()}


def changed_parts(module: nn.Module, before: dict[str, str]) -> list[str]:
    """Return the parameters of which any process holds other bytes than before; every process has to call this."""
    now = hash_parts(module)
    mine = [name for name in sorted(now.keys() | before.keys()) if now.get(name) != before.get(name)]
    return sorted(set(gather_object(mine)))


@contextmanager
def gathered_roots(*modules: Any) -> Iterator[None]:
    """Hold the root units in some modules whole, where parts of sharded models are used without a call of the models.

    Where nothing is sharded this does nothing.
    """
    inside = dict.fromkeys(inner for module in modules for inner in module.modules())
    roots = [module for module in inside if isinstance(module, FSDPModule) and _is_root(module)]
    for root in roots:
        root.unshard()
    try:
        yield
    finally:
        for root in roots:
            root.reshard()


def _is_root(unit: object) -> bool:
    peft = sys.modules.get("peft")  # which whoever made a model of its has imported
    return isinstance(unit, PreTrainedModel | ChunkedLossModel | getattr(peft, "PeftModel", PreTrainedModel))


@torch.no_grad()
def shard_for_evaluation(base: PreTrainedModel, accelerator: Accelerator) -> PreTrainedModel:
    """Shard a frozen model of which only parts will be called."""
    _shard(base, base, accelerator, keep_frozen_whole=False)
    # FSDP2 takes the first module it sees called for the root, so that has to be the model, once.
    base(torch.zeros(1, 1, dtype=torch.long, device=accelerator.device), use_cache=False)
    return base
