"""The processes of one launch (`accelerate launch`, torchrun) and the device of this one: Accelerate's, for every verb.

| verb                                                       | under several processes                               |
|------------------------------------------------------------|-------------------------------------------------------|
| train, evaluate                                            | all of them work; the main one writes                 |
| run                                                        | each of its verbs as by itself                        |
| init, sweep, serve                                         | refused                                               |
| schema                                                     | every one prints the schema                           |
| any other                                                  | the main one works, the others wait (`on_main`)       |
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, TypeVar

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
    """Which of the processes this one is, among those that share some work."""

    index: int = 0
    num_processes: int = 1


ALONE = Share()

# How long a process waits for the others: while one tokenises, upscales, exports or saves; and from step to step.
_SET_UP = timedelta(hours=24)
_STEPS = timedelta(minutes=30)
_FAREWELL = timedelta(seconds=5)
# How launchers say how many processes there are, on a machine and in all: torchrun and Accelerate; MPI's.
_LOCAL_WORLD_SIZES = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
_WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def are_several() -> bool:
    """Return whether a launcher has started several processes; imports nothing."""
    return any(os.environ.get(name, "1") not in ("", "1") for name in _WORLD_SIZES)


def check_launch() -> None:
    """Refuse several processes of which none knows of the others: `srun` starts such, each would do the whole work."""
    number = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if number == "1" or any(name in os.environ for name in _WORLD_SIZES):
        return
    if os.environ.get("SLURM_PROCID", "0") != "0":
        raise EndedElsewhere(UsageError.exit_code)
    raise UsageError(
        f"srun has started {number} processes that do not know of each other; have it start one torchrun a node "
        "(--ntasks-per-node=1), as docs/processes.md shows"
    )


def process_state() -> PartialState:
    """Return Accelerate's state of this process; the first call joins the process group of a launch."""
    import torch
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    # Unless it is told so, Accelerate takes each of several processes without an accelerator to be alone.
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    is_told = any(name in os.environ for name in _LOCAL_WORLD_SIZES)
    state = PartialState(cpu=on_cpu, timeout=_SET_UP)
    if not is_told:  # Accelerate has then taken a CPU's process to be alone on its machine
        os.environ.pop("LOCAL_WORLD_SIZE", None)
    return state


def device() -> torch.device:
    import torch

    chosen = process_state().device
    # The router's weights are float64, which Apple's GPUs do not have.
    return torch.device("cpu") if chosen.type == "mps" else chosen


def device_name(device: torch.device) -> str:
    """Return what a GPU is called; of anything else, its type."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that was taken so far: of a GPU by this process, else of the process itself."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def lowered_dtype(mixed_precision: str) -> torch.dtype | None:
    """Return the dtype in which autocast computes products; None where there is none."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision)


def autocast(device_type: str, mixed_precision: str) -> torch.autocast:
    import torch

    dtype = lowered_dtype(mixed_precision)
    return torch.autocast(device_type, dtype or torch.bfloat16, enabled=dtype is not None)


def cpu_precision() -> Literal["no", "bf16"]:
    """Return the `mixed_precision` that a CPU is fast in: without AVX-512, say, bfloat16 takes ten times as long."""
    import torch

    return "bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "no"


def slow_precisions(device_type: str, **precisions: str) -> list[str]:
    """Return a warning for each section of a config that computes in bfloat16 on a CPU without instructions for it."""
    if device_type != "cpu" or cpu_precision() == "bf16":
        return []
    words = "this CPU has no instructions for bfloat16; {}.mixed_precision=no is many times as fast here"
    return [words.format(section) for section, mixed_precision in precisions.items() if mixed_precision == "bf16"]


def placed(module: AnyModule) -> AnyModule:
    """Move a module to the device of this process, and return it."""
    module.to(device())
    return module


def share() -> Share:
    return Share(process_state().process_index, process_state().num_processes) if are_several() else ALONE


def share_of_machine() -> Share | None:
    """Return its place among the processes of its machine; None where it is alone, or nobody says who is there."""
    if not are_several() or "LOCAL_WORLD_SIZE" not in os.environ:
        return None
    return Share(process_state().local_process_index, int(os.environ["LOCAL_WORLD_SIZE"]))


def is_main() -> bool:
    """Return whether this process is the one that writes and speaks."""
    return not are_several() or process_state().is_main_process


def on_main(work: Callable[[], Result]) -> Result | None:
    """Return what the main process's work returns; None on the others, which wait, and end where it fails.

    The work must not wait for other processes. Its error is raised on the main process, EndedElsewhere on the others.
    """
    if not are_several():
        return work()
    if not process_state().is_main_process:
        if (exit_code := _agreed(0)) != 0:
            raise EndedElsewhere(exit_code)
        return None
    exit_code = ScaleError.exit_code
    try:
        result = work()
        exit_code = 0
        return result
    except ScaleError as error:
        exit_code = error.exit_code
        raise
    finally:
        _agreed(exit_code)


def group_beside() -> ProcessGroup | None:
    """Return a group of all processes whose exchanges, on the CPU, meet none of the steps'; None where one is alone."""
    if not are_several():
        return None
    from torch.distributed import new_group

    return new_group(backend="gloo", timeout=_STEPS)


@contextmanager
def all_succeed(group: ProcessGroup | None) -> Iterator[None]:
    """Wait until every process of a group has done the body; where one fails, EndedElsewhere is raised on the others.

    Without a group there is nobody to wait for.
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
            import torch
            from torch.distributed import ReduceOp, all_reduce

            highest = torch.tensor([exit_code])
            all_reduce(highest, ReduceOp.MAX, group)
            exit_code = int(highest.item())
    if exit_code:
        raise EndedElsewhere(exit_code)


def main_decides(decide: Callable[[], int]) -> int:
    """Return, to every process, what the main one decides: a number, or yes or no; errors as of `on_main`."""
    return _agreed(int(on_main(decide) or 0))


def _agreed(value: int) -> int:
    """Return the main process's value to every process."""
    if not are_several():
        return value
    import torch
    from accelerate.utils import broadcast

    return int(broadcast(torch.tensor([value], device=process_state().device)).item())


def main_first(work: Callable[[], Result]) -> Result:
    """Let every process do the same, the main one before the others, who find what it has written; errors likewise."""
    result = on_main(work)
    return work() if result is None else result


def shared_out(
    batches: Sequence[Sequence[Item]],
    share: Share,
    compute: Callable[[Sequence[Item]], Sequence[Tensor]],
    done: Callable[[int], object] = lambda _: None,
) -> list[tuple[Item, Tensor]]:
    """Return every item of some batches with what was computed of it, on the CPU, to every process in the same order.

    Batches are cut before, so that no figure hangs on how many processes there are. `compute` returns a tensor of any
    length for each item; `done` is told how many more items all processes have done.
    """
    import torch

    mine: list[Tensor] = []
    for first in range(0, len(batches), share.num_processes):
        if (place := first + share.index) < len(batches):
            mine += compute(batches[place])
            done(share.num_processes * len(batches[place]))
        else:  # parts of a sharded model are together only while all processes run it
            compute(batches[first])
    shares = (batches[place :: share.num_processes] for place in range(share.num_processes))
    items = [item for of_one in shares for batch in of_one for item in batch]

    # Off the device, and to the others, in one piece; a process may have had no batch.
    held = (torch.cat(mine).cpu(), [len(tensor) for tensor in mine]) if mine else None
    tensors = [tensor for one in gathered(held, share) if one is not None for tensor in one[0].split(one[1])]
    return list(zip(items, tensors, strict=True))


def gathered(held: Result, share: Share) -> list[Result]:
    """Return what all processes hold, in their order, to each of them."""
    if share.num_processes == 1:
        return [held]
    from accelerate.utils import gather_object

    everyone: list[Result] = gather_object([held])
    return everyone


@contextmanager
def waiting_for_steps() -> Iterator[None]:
    """Let a process that waits for the others give up after minutes, where every process works at the same."""
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
    """Return whether no other process of the launch has told yet why it ends; who cannot know it tells."""
    if not are_several():
        return True
    from torch._C._distributed_c10d import TCPStore

    place = f"scale/ended/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=_FAREWELL)
        return store.add(place, 1) == 1
    except (KeyError, ValueError, RuntimeError):
        return True


def leave() -> None:
    """Leave the process group, where there is one: the last thing that a verb does."""
    if are_several():
        process_state().wait_for_everyone()
        process_state().destroy_process_group()


def refuse_several(verb: str) -> None:
    """Refuse a launch of several processes for a verb that has no use for them."""
    if are_several():
        raise UsageError(f"scale {verb} works in one process; start it without torchrun or `accelerate launch`")


@contextmanager
def name_lost_peers() -> Iterator[None]:
    """Say in one line that another process is gone, which is where the reason is to be found."""
    try:
        yield
    except RuntimeError as error:  # gloo's own errors are no more than that
        if not are_several():
            raise
        from torch.distributed import DistError

        if not isinstance(error, DistError) and "gloo" not in str(error):
            raise
        raise TrainingError(f"another process is gone; its own message says why ({one_line(error)})") from None
