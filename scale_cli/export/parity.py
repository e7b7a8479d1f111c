"""Whether an export computes what the trained model computes, on real text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from scale_cli.errors import ExportParityError
from scale_cli.storage.records import Parity
from scale_cli.upscale.method import MethodModel

MAX_LOGIT_DIFFERENCE = 1e-4  # float32
# An export may be this many times as far from the exact model as the trained model itself, held in the export's dtype:
# in the mean, which any wrong weight raises, and, where a float32 model rounds by more than the figure above, at the
# worst position, which is one of hundreds of thousands and scatters.
MAX_OWN_RATIO = 2.0
MAX_OWN_RATIO_AT_WORST = 10.0
_POSITIONS_AT_ONCE = 32

Logits = Callable[[MethodModel, Tensor], Tensor]


def served_logits(model: MethodModel, input_ids: Tensor) -> Tensor:
    """Return what the trained model answers with: routed logits for `route`."""
    return model(input_ids=input_ids, use_cache=False).logits


class _Exact(TorchDispatchMode):
    """Compute whatever is read in a wider precision, one tensor at a time: no exact copy of a model has to be held."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op.is_view:  # of a weight, that is widened where it is read
            return op(*args, **kwargs)
        if isinstance(asked := kwargs.get("dtype"), torch.dtype):
            kwargs = kwargs | {"dtype": self._wider(asked)}
        written = (argument.alias_info is not None for argument in op._schema.arguments)
        pairs = zip(args, written, strict=False)
        read = [value if kept else tree_map_only(Tensor, self._widened, value) for value, kept in pairs]
        if op is torch.ops.aten._grouped_mm.default:
            return _grouped_product(*read)
        return op(*read, **tree_map_only(Tensor, self._widened, kwargs))

    def _wider(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if dtype.is_floating_point and dtype.itemsize < self.dtype.itemsize else dtype

    def _widened(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._wider(tensor.dtype))


def _grouped_product(rows_SD: Tensor, weights_KDC: Tensor, ends_K: Tensor, *_: Any) -> Tensor:
    """Return every expert's product with the rows that came to it, which torch has in no more than float32."""
    starts_and_ends = pairwise([0, *ends_K.tolist()])
    return torch.cat([rows_SD[slice(*at)] @ weight for at, weight in zip(starts_and_ends, weights_KDC, strict=True)])


@contextmanager
def _held_in(parameters: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Let parameters be other tensors, as long as this lasts."""
    before = {parameter: parameter.data for parameter in parameters}
    try:
        for parameter, tensor in parameters.items():
            parameter.data = tensor
        yield
    finally:
        for parameter, tensor in before.items():
            parameter.data = tensor


class _Differences:
    """The largest and the mean of what some logits differ by from others, of which only one prompt's are held."""

    def __init__(self) -> None:
        self.largest, self.total, self.count = torch.zeros(()), 0.0, 0

    def add(self, logits: Tensor, wanted: Tensor) -> None:
        for some, others in zip(logits[0].split(_POSITIONS_AT_ONCE), wanted[0].split(_POSITIONS_AT_ONCE), strict=True):
            apart = (some.double() - others).abs_()
            self.largest = torch.maximum(self.largest, apart.max().cpu())  # NaN stays NaN
            self.total += apart.sum().item()
            self.count += apart.numel()


@torch.no_grad()
def measure_parity(exported: MethodModel, trained: MethodModel, expected: Logits, prompts: list[Tensor]) -> Parity:
    """Compare an export with what it stands for of the trained model, on (1, T) ids, one prompt after another.

    What is exact is computed in float64; for an export of less than float32 in float32, which is exact beside it.
    """
    exact = _Exact(torch.float64 if exported.dtype == torch.float32 else torch.float32)
    lowered = {parameter: parameter.to(exported.dtype) for parameter in trained.parameters()}
    of_export, of_own = _Differences(), _Differences()
    for input_ids in prompts:
        with exact:
            wanted = expected(trained, input_ids)
        of_export.add(exported(input_ids=input_ids, use_cache=False).logits, wanted)
        with _held_in(lowered):
            of_own.add(expected(trained, input_ids), wanted)
    return Parity(
        max_logit_difference=of_export.largest.item(),
        mean_logit_difference=of_export.total / of_export.count,
        own_mean_difference=of_own.total / of_own.count,
        num_positions=sum(input_ids.shape[1] for input_ids in prompts),
        own_max_difference=of_own.largest.item(),
    )


def parity_in_words(parity: Parity) -> str:
    return (
        f"max difference of a logit from the trained model {parity.max_logit_difference:.1e} over "
        f"{parity.num_positions:,} positions (that model's own rounding: {parity.own_max_difference:.1e})"
    )


def check_parity(parity: Parity, dtype: str) -> None:
    good = parity.mean_logit_difference <= MAX_OWN_RATIO * parity.own_mean_difference
    limit = f"a mean of {MAX_OWN_RATIO:g} x {parity.own_mean_difference:.2e}"
    if dtype == "float32":
        at_worst = MAX_OWN_RATIO_AT_WORST * parity.own_max_difference
        good = good and parity.max_logit_difference <= at_worst
        good = good or parity.max_logit_difference <= MAX_LOGIT_DIFFERENCE
        limit = f"{MAX_LOGIT_DIFFERENCE:g} at most, or {limit} and {at_worst:.2g} at most"
    if not good:
        raise ExportParityError(
            f"the export is not the trained model: logits differ by {parity.max_logit_difference:.2e} at most and "
            f"{parity.mean_logit_difference:.2e} in the mean, allowed is {limit} ({dtype})"
        )
