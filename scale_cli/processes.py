"""The processes of one launch (`accelerate launch`, torchrun), and this process's device.

| verb            | under several processes                           |
|-----------------|---------------------------------------------------|
| train, evaluate | all of them work; the main one writes             |
| run             | each of its verbs behaves as it does alone        |
| init, serve     | refused                                           |
| schema          | every process prints the schema                   |
| any other       | the main one works, the others wait (`on_main`)   |
"""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from scale_cli.errors import EndedElsewhere, ScaleError, TrainingError, UsageError, one_line

if TYPE_CHECKING:
    import torch
    from accelerate import PartialState
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

Item = TypeVar("Item")
Result = TypeVar("Result")
AnyModule = TypeVar("AnyModule", bound="nn.Module")


@dataclass(frozen=True)
class Share:
    """The place of this process among those that share some work."""

    index: int = 0
    num_processes: int = 1


ALONE = Share()

# Timeouts for the other processes: while one tokenises, upscales, exports or saves; between steps;
# at the end.
_SET_UP = timedelta(hours=24)
_STEPS = timedelta(minutes=30)
_FAREWELL = timedelta(seconds=5)


def are_several() -> bool:
    """Return whether a launcher has started several processes; imports nothing."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "1")


def check_launch() -> None:
    """Refuse processes that `srun` started without a launcher: each would do the whole work.

    Raises UsageError on the first process, EndedElsewhere on the others.
    """
    number = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if number == "1" or "WORLD_SIZE" in os.environ:
        return
    if os.environ.get("SLURM_PROCID", "0") != "0":
        raise EndedElsewhere(UsageError.exit_code)
    raise UsageError(
        f"srun has started {number} independent processes; let it start one torchrun per node "
        "(--ntasks-per-node=1), as docs/processes.md shows"
    )


@contextmanager
def without_collections() -> Iterator[None]:
    """Let a block run without garbage collections if it is the one that imports torch.

    The collector then takes what is there for permanent. Otherwise it would look through the
    million objects of torch and transformers again and again, for a second of CPU in every verb.
    """
    is_first = "torch" not in sys.modules and gc.isenabled()
    if is_first:
        gc.disable()
    try:
        yield
    finally:
        if is_first:
            gc.freeze()
            gc.enable()


def process_state() -> PartialState:
    """Return Accelerate's state of this process.

    The first call joins the process group of a launch.
    """
    import torch
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    # Without `cpu`, Accelerate takes each of several processes without an accelerator to be alone.
    has_none = torch.accelerator.current_accelerator(check_available=True) is None
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or has_none
    is_told = "LOCAL_WORLD_SIZE" in os.environ
    state = PartialState(cpu=on_cpu, timeout=_SET_UP)
    if not is_told:  # Accelerate has then set it as if a CPU process were alone on its machine
        os.environ.pop("LOCAL_WORLD_SIZE", None)
    return state


def device() -> torch.device:
    return process_state().device


def device_name(device: torch.device) -> str:
    """Return the name of a GPU; for any other device, its type."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_memory_bytes(device: torch.device) -> int:
    """Return this process's peak memory so far, on the GPU or in main memory."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def lowered_dtype(mixed_precision: str) -> torch.dtype | None:
    """Return the dtype in which autocast computes products; None without autocast."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision)


def autocast(device_type: str, mixed_precision: str) -> torch.autocast:
    import torch

    dtype = lowered_dtype(mixed_precision)
    return torch.autocast(device_type, dtype or torch.bfloat16, enabled=dtype is not None)


def computes_in_bfloat16() -> bool:
    """Return whether this process's device is an accelerator with instructions for bfloat16."""
    import torch

    if device().type == "cpu":
        return False
    module = torch.get_device_module(device())
    if hasattr(module, "is_bf16_supported"):  # CUDA's and Intel's
        return bool(module.is_bf16_supported(including_emulation=False))
    return torch.bfloat16 in module.get_amp_supported_dtype()


def cpu_precision() -> Literal["no", "bf16"]:
    """Return this CPU's fast `mixed_precision`; without AVX-512 bfloat16 is ten times slower."""
    import torch

    # Builds without oneDNN, as for Apple's processors, have no such operation.
    has_one_dnn = torch.backends.mkldnn.is_available()
    return "bf16" if has_one_dnn and torch.ops.mkldnn._is_mkldnn_bf16_supported() else "no"


def fast_precision() -> Literal["no", "bf16"]:
    """Return the fast `mixed_precision` of this process's device."""
    if device().type == "cpu":
        return cpu_precision()
    return "bf16" if computes_in_bfloat16() else "no"


def slow_in_bfloat16(device_type: str, avoided_by: dict[str, bool]) -> list[str]:
    """Return warnings of bfloat16 on a CPU that has no instructions for it, by setting."""
    if device_type != "cpu" or cpu_precision() == "bf16":
        return []
    words = "this CPU has no instructions for bfloat16; {} is many times faster here"
    return [words.format(setting) for setting, is_used in avoided_by.items() if is_used]


def move_to_device(module: AnyModule) -> AnyModule:
    """Move a module to the device of this process, and return it."""
    module.to(device())
    return module


def share() -> Share:
    return (
        Share(process_state().process_index, process_state().num_processes)
        if are_several()
        else ALONE
    )


def share_of_machine() -> Share | None:
    """Return this process's place among those of its machine.

    None if it is alone, or the launcher does not say.
    """
    if not are_several() or "LOCAL_WORLD_SIZE" not in os.environ:
        return None
    return Share(process_state().local_process_index, int(os.environ["LOCAL_WORLD_SIZE"]))


def is_main() -> bool:
    """Return whether this process is the one that writes files and messages."""
    return not are_several() or process_state().is_main_process


def on_main(work: Callable[[], Result]) -> Result | None:
    """Run `work` on the main process and return its result.

    The other processes wait, and return None. `work` must not wait for other processes. If it
    fails, the main process raises its error, the others EndedElsewhere.
    """
    if not are_several():
        return work()
    works = is_main()  # joins the group of the launch, if nothing has yet
    from torch.distributed import group

    with all_succeed(group.WORLD):
        return work() if works else None


def group_beside() -> ProcessGroup | None:
    """Return a CPU group of all processes, apart from the one that the steps use.

    None for a single process.
    """
    if not are_several():
        return None
    from torch.distributed import new_group

    return new_group(backend="gloo", timeout=_STEPS)


@contextmanager
def all_succeed(group: ProcessGroup | None) -> Iterator[None]:
    """Wait until every process of `group` has finished the body.

    If one fails, raise EndedElsewhere on the others. Without a group, do not wait.
    """
    exit_code = ScaleError.exit_code
    try:
        yield
        exit_code = 0
    except ScaleError as error:
        exit_code = error.exit_code
        raise
    finally:
        if group is not None:
            exit_code = _highest(exit_code, group)
    if exit_code:
        raise EndedElsewhere(exit_code)


def _highest(number: int, group: ProcessGroup) -> int:
    """Return the highest number of any process of a group."""
    import torch
    from torch.distributed import ReduceOp, all_reduce, get_backend

    highest = torch.tensor(
        [number], device="cpu" if get_backend(group) == "gloo" else process_state().device
    )
    all_reduce(highest, ReduceOp.MAX, group)
    return int(highest.item())


def main_decides(decide: Callable[[], Result]) -> Result:
    """Return what the main process decides on every process; errors as in `on_main`."""
    decided: list[Any] = [on_main(decide)]
    if are_several():
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(decided)
    decision: Result = decided[0]
    return decision


def main_first(work: Callable[[], Result]) -> Result:
    """Run `work` on the main process first, then on the others, which find what it wrote.

    Errors as in `on_main`.
    """
    result = on_main(work)
    return work() if result is None else result


def map_over_processes(
    batches: Sequence[Sequence[Item]],
    share: Share,
    compute: Callable[[Sequence[Item]], Sequence[Tensor]],
) -> dict[Item, Tensor]:
    """Compute batches on all processes; return every item's result, on the CPU.

    The caller cuts the batches, so no figure depends on the number of processes. `compute` returns
    a tensor of any shape for each item.
    """
    import torch

    mine: dict[Item, Tensor] = {}
    for first in range(0, len(batches), share.num_processes):
        place = first + share.index
        # A sharded model can be run only by all processes together, so none is without a batch.
        batch = batches[place if place < len(batches) else first]
        mine.update(zip(batch, compute(batch), strict=True))

    # Behind all passes, so that the device waits for none; a tensor would be pickled with all of the
    # batch that it is a part of.
    held = {item: result.cpu().numpy() for item, result in mine.items()}
    everyone = gathered(held, share)
    return {item: torch.from_numpy(own) for of_one in everyone for item, own in of_one.items()}


def gathered(held: Result, share: Share) -> list[Result]:
    """Return the objects that all processes hold, in their order, on each of them."""
    if share.num_processes == 1:
        return [held]
    from accelerate.utils import gather_object

    everyone: list[Result] = gather_object([held])
    return everyone


@contextmanager
def shorter_timeout() -> Iterator[None]:
    """Shorten the timeout to minutes within the body, where all processes do the same work."""
    if not are_several():
        yield
        return
    from torch.distributed import distributed_c10d as c10d

    group = c10d._get_default_group()
    c10d._set_pg_timeout(_STEPS, group)
    try:
        yield
    finally:
        c10d._set_pg_timeout(_SET_UP, group)


def is_first_to_end() -> bool:
    """Return whether this process is the launch's first to say why it ends.

    True if that cannot be known.
    """
    if not are_several():
        return True
    from torch._C._distributed_c10d import TCPStore

    place = f"scale/ended/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        store = TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=_FAREWELL
        )
        return store.add(place, 1) == 1
    except (KeyError, ValueError, RuntimeError):
        return True


def leave() -> None:
    """Leave the process group, if there is one; every verb does this last."""
    if are_several():
        process_state().wait_for_everyone()
        process_state().destroy_process_group()


def refuse_several(verb: str) -> None:
    """Raise UsageError if several processes were launched for a verb that works in one."""
    if are_several():
        raise UsageError(
            f"scale {verb} works in one process; start it without torchrun or `accelerate launch`"
        )


@contextmanager
def name_lost_peers() -> Iterator[None]:
    """Turn the error of a lost connection into one line: another process is gone."""
    try:
        yield
    except RuntimeError as error:  # gloo raises nothing more specific
        if not are_several():
            raise
        from torch.distributed import DistError

        if not isinstance(error, DistError) and "gloo" not in str(error):
            raise
        raise TrainingError(
            f"another process has ended; its own message says why ({one_line(error)})"
        ) from None
