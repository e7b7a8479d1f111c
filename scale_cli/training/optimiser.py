"""AdamW or Muon over the trainable parameters, and its state as named tensors (no pickle)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from scale_cli.config.training import TrainConfig
from scale_cli.errors import StorageError
from scale_cli.methods.recipes import Hook, local_part, trainable_parameters
from scale_cli.methods.starts import start_rates
from scale_cli.model.configuration_scale import ScaleConfig

# Muon's updates times this and the root of a matrix's longer side have the size of AdamW's (arXiv
# 2502.16982).
_SIZE_OF_ADAMW = 0.2
# Entries of matrices that Muon steps together: a few copies of 32 MiB in float32 on a GPU, where
# what counts is the number of launches, and of 4 MiB on a CPU, whose caches they fit.
_ENTRIES_AT_ONCE = 1 << 23
_ENTRIES_AT_ONCE_ON_CPU = 1 << 20


def rates_of(model: nn.Module, train: TrainConfig) -> dict[str, float]:
    """Return the learning rates by kind of tensor, relative to `train.lr`: the config's, or
    defaults by the start and the optimiser.
    """
    rates: Mapping[str, float] = dict.fromkeys(("embedding", "head", "gains", "matrix"), 1.0)
    config = getattr(model, "config", None)
    if isinstance(config, ScaleConfig):
        rates = start_rates(config, train.optimiser)
    given: dict[str, float] = train.lr_multipliers.model_dump(exclude_none=True)
    return {**rates, **given}


def build_optimiser(model: nn.Module, train: TrainConfig) -> torch.optim.Optimizer:
    """Return an optimiser over the trainable parameters, with a group per kind of them.

    It is AdamW, or for `muon`, Muon on the matrices (each block and each LoRA factor by itself) and
    AdamW on the rest. Muon's updates are scaled to AdamW's size (Liu et al. 2025, arXiv
    2502.16982), so that one `lr` serves both.

    Weight decay acts on matrices only: not on gains and biases, and not on embeddings, whose rows
    would shrink at every step without their token.
    """
    lr = 0.0 if train.lr == "auto" else train.lr  # each step sets it
    rates = rates_of(model, train)
    kinds = kinds_of_parameters(model)
    trained = trainable_parameters(model)
    of_adamw: list[dict[str, Any]] = []
    of_muon: list[dict[str, Any]] = []
    for kind in sorted({*kinds.values()}):
        by_muon = kind == "matrix" and train.optimiser == "muon"
        group = {
            "params": [trained[name] for name, its_kind in kinds.items() if its_kind == kind],
            "lr_multiplier": rates[kind],
            "weight_decay": train.weight_decay if kind in ("head", "matrix") else 0.0,
            # torch's names of what is kept per parameter, each as large as the parameter
            "moments": ("momentum_buffer",) if by_muon else ("exp_avg", "exp_avg_sq"),
        }
        (of_muon if by_muon else of_adamw).append(group)

    parts: list[torch.optim.Optimizer] = []
    if of_muon:
        muon = BatchedMuon(of_muon, lr=lr, adjust_lr_fn="match_rms_adamw")
        muon.dtype_of_products = dtype_of_products(train)
        parts.append(muon)
    if of_adamw:
        betas = (train.adam_beta1, train.adam_beta2)
        eps = train.adam_epsilon
        adamw = torch.optim.AdamW(of_adamw, lr=lr, betas=betas, eps=eps, fused=True)
        parts.append(adamw)
    return MuonBesideAdamW(parts) if of_muon else parts[0]


def dtype_of_products(train: TrainConfig) -> torch.dtype:
    """Return the dtype of Muon's products, that of the run's autocast: a CPU without instructions
    for bfloat16 needs many times as long for them.
    """
    return torch.bfloat16 if train.mixed_precision == "bf16" else torch.float32


class MuonBesideAdamW(torch.optim.Optimizer):
    """Muon over some groups of parameters and AdamW over others; it shares their groups and their
    state.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in self._parts:
            part.state = self.state

    def step(self, closure: Any = None) -> Any:
        """Update all parameters; none if `found_inf` is set and not 0."""
        assert closure is None, "gradients are there already"
        for part in self._parts:
            part.found_inf = getattr(self, "found_inf", None)
            part.step()


class BatchedMuon(torch.optim.Muon):
    """torch's Muon that steps matrices of one shape together, and changes nothing if `found_inf` is
    set.

    It never waits for the device. Sharded matrices are gathered for their products, which every
    process computes; momenta and weights stay sharded.
    """

    dtype_of_products = torch.bfloat16

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all matrices; if `found_inf` is set and not 0, neither they nor their momenta
        change.
        """
        assert closure is None, "gradients are there already"
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            for matrices in _pieces(group["params"]):
                self._step_together(group, matrices, found_inf)

    def _step_together(
        self, group: dict[str, Any], matrices: list[nn.Parameter], found_inf: Tensor | None
    ) -> None:
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        here = [local_part(matrix.detach()) for matrix in matrices]
        momenta = [local_part(self.state[matrix]["momentum_buffer"]) for matrix in matrices]

        # All (matrices, rows here, columns).
        gradients = torch.stack([local_part(m.grad) for m in matrices if m.grad is not None])
        before, momenta_before = torch.stack(here), torch.stack(momenta)
        momenta_after = momenta_before.lerp(gradients, 1 - group["momentum"])
        updates = momenta_after
        if group["nesterov"]:
            updates = gradients.lerp(momenta_after, group["momentum"])

        like = matrices[0]
        updates = updates.to(self.dtype_of_products)
        if isinstance(like, DTensor):
            mesh = like.device_mesh
            split = like.placements
            size: Any = {"shape": like.shape, "stride": like.stride()}
            parts = [
                DTensor.from_local(part, mesh, split, run_check=False, **size) for part in updates
            ]
            updates = torch.stack([part.full_tensor() for part in parts])
        directions = orthogonalised(
            updates, group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        if isinstance(like, DTensor):
            # Every process has the whole, so none is sent.
            parts = [
                distribute_tensor(whole.contiguous(), mesh, split, src_data_rank=None)
                for whole in directions
            ]
            directions = torch.stack([part.to_local() for part in parts])
        rate = group["lr"] * _SIZE_OF_ADAMW * math.sqrt(max(like.shape))
        after = (before * (1 - group["lr"] * group["weight_decay"])).add_(directions, alpha=-rate)

        if found_inf is not None:
            after = torch.where(found_inf > 0, before, after)
            momenta_after = torch.where(found_inf > 0, momenta_before, momenta_after)
        torch._foreach_copy_(here, list(after))
        torch._foreach_copy_(momenta, list(momenta_after))


def orthogonalised(
    matrices_BMN: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> Tensor:
    """Return matrices of the same singular directions, all of a size near 1, by Newton-Schulz
    steps.

    Source: Keller Jordan's Muon, as in torch.optim.Muon, here with batched products.
    """
    a, b, c = coefficients
    is_tall = matrices_BMN.shape[1] > matrices_BMN.shape[2]
    x = matrices_BMN.mT if is_tall else matrices_BMN
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(num_steps):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def _pieces(matrices: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the matrices that have gradients, those of one shape together, in pieces of bounded
    memory.
    """
    alike = defaultdict(list)
    for matrix in matrices:
        if matrix.grad is not None:
            alike[matrix.shape, matrix.device].append(matrix)
    pieces = []
    for (shape, device), same in alike.items():
        entries = _ENTRIES_AT_ONCE_ON_CPU if device.type == "cpu" else _ENTRIES_AT_ONCE
        at_once = max(1, entries // shape.numel())
        pieces += [same[first : first + at_once] for first in range(0, len(same), at_once)]
    return pieces


def set_learning_rate(optimiser: torch.optim.Optimizer, lr: float) -> None:
    """Set every group's rate to `lr`, the rate of the matrices, times its multiplier."""
    for group in optimiser.param_groups:
        group["lr"] = lr * group.get("lr_multiplier", 1.0)


def optimiser_tensors(optimiser: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the state of every trainable parameter by torch's names: `exp_avg.NAME`, `step.NAME`
    and so on.
    """
    return {
        f"{moment}.{name}": tensor
        for name, parameter in trainable_parameters(model).items()
        for moment, tensor in optimiser.state[parameter].items()  # empty before the first step
    }


def empty_optimiser_tensors(
    optimiser: torch.optim.Optimizer, model: nn.Module, beside: Sequence[Hook] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield an optimiser's state to be filled, named as by `optimiser_tensors`, sharded like the
    parameters.
    """
    moments = {
        parameter: group["moments"]
        for group in optimiser.param_groups
        for parameter in group["params"]
    }
    for name, parameter in trainable_parameters(model).items():
        for moment in moments[parameter]:
            yield f"{moment}.{name}", torch.zeros_like(parameter.detach())
        for hook in beside:
            yield f"{hook.name}.{name}", hook.empty(parameter.detach())
        if "exp_avg" in moments[parameter]:
            # The fused AdamW keeps its step counts on the parameters' device, in float32; Muon
            # counts none.
            yield f"step.{name}", torch.zeros((), dtype=torch.float32, device=parameter.device)


def load_optimiser_tensors(
    optimiser: torch.optim.Optimizer,
    model: nn.Module,
    tensors: dict[str, Tensor],
    beside: Sequence[Hook] = (),
) -> None:
    """Load saved moments and the tensors of hooks; StorageError if one is missing or has another
    shape.
    """
    if not tensors:
        return  # no step had been taken
    parameters = trainable_parameters(model)
    optimiser.state.clear()
    for name, empty in empty_optimiser_tensors(optimiser, model, beside):
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != empty.shape:
            raise StorageError(f"optimiser state: {name} is missing or has another shape")
        moment, _, parameter = name.partition(".")
        optimiser.state[parameters[parameter]][moment] = tensor.to(empty.device)


# Kinds of parameters: learning rate, weight decay and optimiser depend on the kind.
TensorKind = Literal["embedding", "head", "gains", "matrix"]


def kinds_of_parameters(model: nn.Module) -> dict[str, TensorKind]:
    """Return the kind of every parameter that trains, by name; a tied embedding counts as an
    embedding.
    """
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }

    kinds: dict[str, TensorKind] = {}
    for name, parameter in trainable_parameters(model).items():
        if id(parameter) in embeddings or "lora_embedding_" in name:
            kinds[name] = "embedding"
        elif parameter.ndim < 2:
            kinds[name] = "gains"
        else:
            kinds[name] = "head" if "lm_head" in name else "matrix"
    return kinds
