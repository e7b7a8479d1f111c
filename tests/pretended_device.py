"""A device that is none: its tensors lie on the CPU, and it refuses to mix with the CPU as CUDA does.

It takes the place that PyTorch keeps for devices from outside (PrivateUse1), under the name `pretended`. Every operator
below autograd runs on the CPU tensors inside; what a GPU would refuse is refused:

- a tensor of the CPU beside one of the device, unless it is a number (no dimensions) in an elementwise operator;
- writing into a tensor of the CPU by anything but a copy;
- a generator of the CPU's;
- NumPy's view of a tensor.

Indices may lie on the CPU, as with CUDA. What is drawn comes from the CPU's default generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretended"
_aten = torch.ops.aten
_COPIES = {_aten._to_copy.default, _aten.copy_.default}  # from one device to the other
# Not elementwise by PyTorch's tags, and yet they read a number that lies on the CPU.
_READ_NUMBERS = {
    "fill",
    "fill_",
    "masked_fill",
    "masked_fill_",
    "index_put",
    "index_put_",
    "_index_put_impl_",
}
_INDEXING = {
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index",
    "_unsafe_index_put",
}
# These have no tensor to be dispatched by, and are not made of `empty` and a filling alone.
_FACTORIES = (
    "empty.memory_format",
    "empty_strided",
    "arange",
    "arange.start",
    "arange.start_step",
    "eye",
    "linspace",
)
_LOWERED_BY_AUTOCAST = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "linear",
    "matmul",
    "scaled_dot_product_attention",
)

_backend = SimpleNamespace(
    is_available=lambda: False,
    is_initialized=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: 0,
    set_device=lambda _: None,
    synchronize=lambda *_: None,
    manual_seed_all=lambda _: None,
    get_rng_state=lambda _=None: torch.empty(0),
    set_rng_state=lambda *_: None,
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    _is_in_bad_fork=lambda: False,
)
_registered: list[torch.library.Library] = []


class PretendedTensor(Tensor):
    """A tensor that says it lies on the device; what it holds lies on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> PretendedTensor:
        """Wrap a tensor of the CPU."""
        made: PretendedTensor = cast(Any, Tensor)._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        made.held = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Have nn.Module.to swap parameters in their places, so that tied ones stay tied."""
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Tensor], *_: Any) -> PretendedTensor:
        """Undo `__tensor_flatten__`."""
        return PretendedTensor(tensors["held"])

    @property
    def data(self) -> Any:
        """Return the same tensor without its history."""
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        cast(Any, Tensor).data.__set__(self, value)
        self.held = value.held

    def tolist(self) -> Any:
        """Return the numbers, which PyTorch will not read out of a wrapper."""
        return self.held.tolist()

    def untyped_storage(self) -> Any:
        """Return the memory that safetensors knows tied tensors by."""
        return self.held.untyped_storage()

    def numpy(self, **_: Any) -> Any:
        """Refuse, as CUDA does."""
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first."
        )

    def __array__(self, *_: Any) -> Any:
        """Refuse, as CUDA does."""
        return self.numpy()

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operator that has a tensor of the device among its arguments."""
        if op is _aten._fused_sdp_choice.default:
            return SDPBackend.MATH.value  # every fused kernel is some device's own
        return _run(op, *args, **(kwargs or {}))


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the tensors inside; what comes of it lies on the device, unless the CPU was asked for."""
    outer: dict[int, Tensor] = {}  # by what is inside: what is written in place comes back as it is
    num_on_cpu = 0

    def inside(value: Any) -> Any:
        nonlocal num_on_cpu
        if isinstance(value, PretendedTensor):
            outer[id(value.held)] = value
            return value.held
        if isinstance(value, Tensor):
            outer[id(value)] = value
            num_on_cpu += 1
        elif isinstance(value, torch.Generator):
            raise RuntimeError(
                f"{op}: expected a '{NAME}' device type for generator but found 'cpu'"
            )
        return value

    def outside(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        known = outer.get(id(value))
        if known is not None and known.shape != value.shape:
            raise NotImplementedError(
                f"{op} changes a shape in place, which the pretended device cannot"
            )
        return PretendedTensor(value) if known is None else known

    inner_args = [_mapped(inside, value) for value in args]
    inner_kwargs = {
        name: _mapped(inside, value) for name, value in kwargs.items() if name != "pin_memory"
    }
    if num_on_cpu and op not in _COPIES:
        _refuse_mixtures(op, args, kwargs)
    wanted = inner_kwargs.get("device")
    if wanted is not None:
        inner_kwargs["device"] = "cpu"
    result = op(*inner_args, **inner_kwargs)
    return (
        result
        if wanted is not None and torch.device(wanted).type == "cpu"
        else _mapped(outside, result)
    )


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return an operator's argument or result with a function called on it, or on each element of a list."""
    if isinstance(value, (list, tuple)):
        return [function(element) for element in value]
    return function(value)


def _refuse_mixtures(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name = op._schema.name.removeprefix("aten::")
    reads_numbers = (
        torch.Tag.pointwise in op.tags or name in _READ_NUMBERS or name.startswith("_foreach")
    )
    for place, argument in enumerate(op._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if not isinstance(tensor, Tensor) or isinstance(tensor, PretendedTensor):
                continue
            is_index = (
                name in _INDEXING
                and argument.name == "indices"
                and isinstance(args[0], PretendedTensor)
            )
            is_number = tensor.dim() == 0 and reads_numbers and not written
            if not is_index and not is_number:
                raise RuntimeError(
                    f"{op}: expected all tensors to be on the same device, but found at least two devices, "
                    f"{NAME}:0 and {tensor.device} ({argument.name}, shape {tuple(tensor.shape)})!"
                )


def _lowered_by_autocast(op: Any) -> Any:
    """Return an operator that rounds what it reads to autocast's precision, as CUDA's does."""
    key = torch._C.DispatchKeySet(cast(Any, torch._C.DispatchKey).AutocastPrivateUse1)

    def lowered(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME)

        def cast_down(value: Any) -> Any:
            lowers = isinstance(value, PretendedTensor) and value.dtype == torch.float32
            return value.to(dtype) if lowers else value

        with torch._C._ExcludeDispatchKeyGuard(key):
            return op(
                *map(cast_down, args), **{name: cast_down(value) for name, value in kwargs.items()}
            )

    return lowered


def _register() -> None:
    if _registered:
        return
    # Autograd counts devices at its first backward pass, and for each starts a thread that no fork survives.
    torch.ones((), requires_grad=True).backward()
    _setup_privateuseone_for_python_backend(NAME, backend_module=_backend)
    library = torch.library.Library("aten", "IMPL")

    def register(name: str, key: str, kernel: Any) -> None:
        packet, _, overload = name.partition(".")
        library.impl(name, kernel(getattr(getattr(_aten, packet), overload or "default")), key)

    for name in _FACTORIES:
        register(name, "PrivateUse1", lambda op: lambda *args, **kwargs: _run(op, *args, **kwargs))
    # torch.tensor fills what it makes by this, past __torch_dispatch__.
    register(
        "_copy_from",
        "PrivateUse1",
        lambda _: lambda source, made, *_: _run(_aten.copy_.default, made, source),
    )
    everything_else = torch.library.Library("_", "IMPL")
    everything_else.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in _LOWERED_BY_AUTOCAST:
        register(name, "AutocastPrivateUse1", _lowered_by_autocast)
    _registered.extend([library, everything_else])


@contextmanager
def pretended_device() -> Iterator[torch.device]:
    """Yield the device; outside it is registered still, but says that it is not there."""
    _register()
    _backend.is_available = lambda: True
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield torch.device(NAME, 0)
    finally:
        _backend.is_available = lambda: False


@contextmanager
def accelerate_on(device: torch.device) -> Iterator[None]:
    """Let Accelerate, and so every verb, compute on a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_TORCH_DEVICE", str(device))
        AcceleratorState._reset_state(reset_partial_state=True)
        yield
    AcceleratorState._reset_state(reset_partial_state=True)
