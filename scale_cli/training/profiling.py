"""What a step's time goes into: traces of torch.profiler, for Perfetto or TensorBoard, one of each process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.profiler import profile, schedule

from scale_cli.training.run import TrainingRun


@contextmanager
def profiled(run: TrainingRun) -> Iterator[Callable[[], None]]:
    """Yield what is to be called after every step, and write a trace of `train.profile_steps`, where they are ahead."""
    done, steps = run.state.step, run.config.train.profile_steps
    if steps is None or steps[1] <= done:
        yield lambda: None
        return
    first, last = max(steps[0], done + 1), steps[1]
    path = run.folder.profile / f"steps-{first}-{last}.process-{run.accelerator.process_index}.json.gz"
    path.parent.mkdir(exist_ok=True)
    warmup = min(first - done - 1, 1)
    parts = schedule(wait=first - done - 1 - warmup, warmup=warmup, active=last - first + 1, repeat=1)
    with profile(schedule=parts, on_trace_ready=lambda trace: trace.export_chrome_trace(str(path))) as profiler:
        yield profiler.step
