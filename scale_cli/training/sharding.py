"""FSDP2: a process holds a part of every sharded tensor, and gathers a layer's tensors while it
computes that layer.

| train.sharding | what trains | what is frozen    |
|----------------|-------------|-------------------|
| none           | replicated  | replicated (DDP)  |
| expansion      | sharded     | replicated        |
| all            | sharded     | sharded           |

Parameters, gradients and moments are split by rows. A unit is one layer; the root unit is
everything outside the layers: embeddings, norms, heads.

A base layer that no expansion writes into is a unit of its own. Only the forward pass reads its
weights, so only the forward pass gathers them. The layer added beside it is gathered in the
precision of its products; its gains and biases, which autocast does not lower, are in the root
unit. If what trains is the smaller part of the model, gradients are reduced once per step, and
every process holds them whole until then; otherwise at every micro-batch.

This module calls `fully_shard` itself, because Accelerate's wrapping only handles modules that are
called. A widened model's heads are read without a call (`model/head_loss.py`), and so are its base
layers (`model/expansion_scale.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from scale_cli.config.training import TrainConfig
from scale_cli.errors import ConfigError
from scale_cli.methods.recipes import local_part
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.processes import lowered_dtype
from scale_cli.training.objective import ChunkedLossModel, for_training, plain_of
from scale_cli.upscale.building import MethodModel


def check_machines(train: TrainConfig, num_processes: int) -> None:
    """Raise ConfigError if `train.sharded_within: node` cannot split these processes into machines."""
    if train.sharding == "none" or train.sharded_within == "launch" or num_processes == 1:
        return
    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise ConfigError(
            "train.sharded_within node: the launcher does not say how many processes a machine has; "
            "set LOCAL_WORLD_SIZE, or start with torchrun or `accelerate launch`"
        )
    within = _processes_within(train, num_processes)
    if num_processes % within:
        raise ConfigError(
            f"train.sharded_within node: {num_processes} processes are not a multiple of the {within} of a machine"
        )


def _processes_within(train: TrainConfig, num_processes: int) -> int:
    """Return over how many processes the model is split."""
    if train.sharded_within == "launch":
        return num_processes
    return min(int(os.environ["LOCAL_WORLD_SIZE"]), num_processes)


def shard_model(model: MethodModel, train: TrainConfig, accelerator: Accelerator) -> nn.Module:
    """Shard a model in place, move this process's parts to its device, and return the module to
    train.

    It is split over the processes of the launch or of each machine (`train.sharded_within`), and
    replicated over machines. The model is whole and on the CPU before; one layer at a time goes to
    the device before it is split.
    """
    within = _processes_within(train, accelerator.num_processes)
    replicas = accelerator.num_processes // within
    device_type = accelerator.device.type
    if replicas == 1:
        mesh = init_device_mesh(device_type, (within,))
    else:
        names = ("machines", "within")
        mesh = init_device_mesh(device_type, (replicas, within), mesh_dim_names=names)
    root = for_training(model, train)
    lowered = MixedPrecisionPolicy()
    # Gather matrices as autocast would lower them before every product.
    if lowered_dtype(train.mixed_precision) is not None:
        lowered = MixedPrecisionPolicy(
            torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    _shard(model, root, mesh, keep_frozen_whole=train.sharding == "expansion", lowered=lowered)
    return root


def _shard(
    model: MethodModel,
    root: nn.Module,
    mesh: DeviceMesh,
    *,
    keep_frozen_whole: bool,
    lowered: MixedPrecisionPolicy,
) -> None:
    """Make a unit of every layer of a model, and a root unit of the rest, which is gathered when
    `root` is called.
    """
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    replicated = set(frozen) if keep_frozen_whole else set()
    for parameter in replicated:
        parameter.data = parameter.data.to(mesh.device_type)
    left_over: list[nn.Module] = []
    if isinstance(model, ScaleForCausalLM):
        left_over = _shard_widened_layers(model, mesh, replicated, lowered)
    else:
        for layer in plain_of(model).model.layers:
            if any(parameter not in replicated for parameter in layer.parameters()):
                fully_shard(layer, mesh=mesh, ignored_params=replicated)
    # The base layers of a widened model are in units, but are not submodules of the modules that
    # these units are of.
    sharded = {parameter for parameter in model.parameters() if isinstance(parameter, DTensor)}
    with _also_holding(root, left_over):
        fully_shard(root, mesh=mesh, ignored_params=replicated | sharded)


@contextmanager
def _also_holding(module: nn.Module, others: Sequence[nn.Module]) -> Iterator[None]:
    """Make other modules parts of one that becomes a unit: it gets their parameters too, but for
    those of units below.
    """
    module.add_module("held_too", nn.ModuleList(others))
    yield
    del module.held_too


def _shard_widened_layers(
    model: ScaleForCausalLM,
    mesh: DeviceMesh,
    replicated: set[nn.Parameter],
    lowered: MixedPrecisionPolicy,
) -> list[nn.Module]:
    """Make units of every added layer and its base layer: one unit if they write into each other,
    else two.

    Return the modules whose gains or biases are left to the root unit.
    """
    left_over: list[nn.Module] = []
    layers: Any = zip(model.base.model.layers, model.expansion.layers, strict=True)
    for index, (base_layer, added) in enumerate(layers):
        if index >= model.expansion.first_collaborating_layer:
            with _also_holding(added, [base_layer]):
                fully_shard(added, mesh=mesh, ignored_params=replicated)
            # Evaluation first runs a collaborating base layer alone, for the unchanged stream.
            base_layer.register_forward_pre_hook(lambda *_, unit=added: unit.unshard())
            continue
        vectors = {
            vector
            for layer in (base_layer, added)
            for vector in layer.parameters()
            if vector.dim() < 2
        }
        holders = (module for layer in (base_layer, added) for module in layer.modules())
        left_over += [
            module for module in holders if not vectors.isdisjoint(module.parameters(recurse=False))
        ]
        fully_shard(added, mesh=mesh, ignored_params=replicated | vectors, mp_policy=lowered)
        if not replicated:
            fully_shard(base_layer, mesh=mesh, ignored_params=vectors)
            added.register_forward_pre_hook(lambda *_, unit=base_layer: unit.unshard())
            added.register_forward_hook(lambda *_, unit=base_layer: unit.reshard())
    return left_over


@contextmanager
def gradients_kept(model: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Keep the gradients of a micro-batch unreduced, unless most of a sharded model trains.

    For all micro-batches of a step but the last.
    """
    if not isinstance(model, FSDPModule):
        with accelerator.no_sync(model):
            yield
        return
    surplus = sum(p.numel() if p.requires_grad else -p.numel() for p in model.parameters())
    model.set_requires_gradient_sync(surplus > 0)
    yield
    model.set_requires_gradient_sync(True)


def is_sharded(model: nn.Module) -> bool:
    """Return whether each process holds only parts of a model."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor; a sharded one is gathered, so every process must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parts_here(module: nn.Module) -> dict[str, Tensor]:
    """Return this process's part of every parameter; call it between steps, since within one some
    are gathered.
    """
    return {name: local_part(parameter).detach() for name, parameter in module.named_parameters()}


@contextmanager
def gathered_roots(*modules: Any) -> Iterator[None]:
    """Keep the root units of some modules gathered, to use parts of sharded models without calling
    the models.

    It does nothing if nothing is sharded.
    """
    peft = sys.modules.get("peft")  # imported already if there is a PEFT model
    models = PreTrainedModel | ChunkedLossModel | getattr(peft, "PeftModel", PreTrainedModel)
    inside = dict.fromkeys(inner for module in modules for inner in module.modules())
    roots: list[Any] = [
        module for module in inside if isinstance(module, FSDPModule) and isinstance(module, models)
    ]
    for root in roots:
        root.unshard()
    try:
        yield
    finally:
        for root in roots:
            root.reshard()


@torch.no_grad()
def shard_for_evaluation(base: PreTrainedModel, accelerator: Accelerator) -> PreTrainedModel:
    """Shard a frozen model whose parts will be called, but not the whole."""
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    _shard(base, base, mesh, keep_frozen_whole=False, lowered=MixedPrecisionPolicy())
    # FSDP2 takes the first module that is called as the root, so the model must be called once.
    base(torch.zeros(1, 1, dtype=torch.long, device=accelerator.device), use_cache=False)
    return base
