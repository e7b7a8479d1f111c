"""The verb `scale train`: open everything, decide where to start, run the loop, write `final/`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from accelerate import Accelerator, DistributedDataParallelKwargs

from scale_cli.config.schema import RunConfig
from scale_cli.data.corpora import (
    training_sources,
)
from scale_cli.errors import OutOfMemory, RunFolderError, is_out_of_memory, one_line
from scale_cli.evaluation.benchmarks import open_benchmarks_of
from scale_cli.planning.device import peak_tokens_per_s
from scale_cli.planning.sizes import BaseSizes
from scale_cli.processes import (
    device_name,
    on_main,
    process_state,
    slow_in_bfloat16,
)
from scale_cli.runs.opened import MethodFolder, Run
from scale_cli.runs.precision import slower_than_here
from scale_cli.storage.atomic import (
    claimed,
    remove_leftovers,
)
from scale_cli.terminal import Log
from scale_cli.training.checkpoint import (
    starting_point,
)
from scale_cli.training.finishing import put_back_best, write_final
from scale_cli.training.loop import run_loop
from scale_cli.training.opening import check_finished, open_training
from scale_cli.training.records import TrainState
from scale_cli.training.sharding import (
    check_machines,
)
from scale_cli.training.tracking import check_trackers, tracked


def train(
    config: RunConfig, resume: str | None, log: Log, accepted: Collection[str] = ()
) -> TrainState:
    """Train from `upscaled/` or from a checkpoint, and write `final/`; return its state: the last step's or the best.

    `resume` is None, `auto` or a checkpoint's path; `accepted` are the keys that may have changed since the run began.
    A finished run is only checked under `auto`, unless `accepted` allows the config to ask for more steps now.
    """
    process_state()  # joins the process group, with our own time-out
    run = Run(config)
    config = run.config
    # `no`, whatever the launcher was told: each step uses autocast itself, as the config says.
    accelerator = Accelerator(
        mixed_precision="no",
        log_with=list(config.train.trackers) or None,
        project_dir=run.folder.tensorboard,
        # Buffers do not change, so they are not sent. Gradients lie in the exchange buckets, and are not kept twice.
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
        ],
    )
    log = log if accelerator.is_main_process else lambda _: None  # only the main process logs
    final = MethodFolder(run.folder.final, run)
    goes_on = (  # a finished run that is to be longer now: it resumes from its last checkpoint
        "train.max_steps" in accepted
        and final.path.is_dir()
        and config.train.max_steps > final.config.train.max_steps
    )
    if resume == "auto" and final.path.is_dir() and not goes_on:
        check_finished(final, accepted)
        log(f"done already   {final.path}")
        return TrainState.load(final.path)
    if not run.folder.upscaled.is_dir():
        raise RunFolderError(f"{run.folder.upscaled}: does not exist; run `scale upscale` first")
    run.check(training_sources(config), accelerator.num_processes)
    check_machines(config.train, accelerator.num_processes)
    check_trackers(config.train.trackers)
    benchmarks = (
        open_benchmarks_of(config.evaluation) if config.train.eval_benchmarks_every_steps else None
    )
    for skipped in benchmarks.skipped if benchmarks is not None else ():
        log(f"warning: {skipped.name} is not measured: {skipped.reason}")
    accelerator.wait_for_everyone()  # the main process removes leftovers; the others have looked through them by now
    with ExitStack() as held:
        on_main(lambda: held.enter_context(claimed(run.folder.root)))
        on_main(lambda: remove_leftovers(run.folder.checkpoints))  # what a killed launch has left
        resumed_from = starting_point(run, resume, log, accepted)
        held.enter_context(_explaining_out_of_memory(config, accelerator))
        _log_processes(run, accelerator, log)
        name, num_processes = device_name(accelerator.device), accelerator.num_processes
        sizes = BaseSizes.of(run.base_config.to_dict(), config.model.base)
        num_new = max(0, len(run.tokenizer) - sizes.vocab_size)
        peak = on_main(lambda: peak_tokens_per_s(config, sizes, name, num_processes, num_new))
        training = open_training(run, accelerator, resumed_from, benchmarks, peak, log)
        on_main(lambda: held.enter_context(tracked(training.metrics, config, accelerator)))
        run_loop(training)
        kept = put_back_best(training, log)
        write_final(training, kept)
    _log_trained(final.path, training.state, log)
    return kept


@contextmanager
def _explaining_out_of_memory(config: RunConfig, accelerator: Accelerator) -> Iterator[None]:
    """If memory runs out, raise OutOfMemory, which says what to lower and what the plan expects."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        at_once = config.train.sequences_at_once(accelerator.num_processes)
        raise OutOfMemory(
            f"out of memory on {accelerator.device.type} while training ({one_line(error)}): lower "
            f"train.micro_batch_size (now {at_once}) or corpus.sequence_length (now "
            f"{config.corpus.sequence_length:,}), or set train.activation_checkpointing=true or, with several "
            "processes, train.sharding=all; `scale plan CONFIG` says what a step needs"
        ) from None


def _log_processes(run: Run, accelerator: Accelerator, log: Log) -> None:
    """Log the devices and the precision, and warn if a precision is slow."""
    config = run.config
    device_type = accelerator.device.type
    avoided_by = {
        "train.mixed_precision=no": config.train.mixed_precision == "bf16",
        "evaluation.mixed_precision=no": config.train.observes
        and config.evaluation.mixed_precision == "bf16",
        "train.optimiser=adamw": config.train.optimiser == "muon",  # its products are in bfloat16
    }
    log(
        f"processes      {accelerator.num_processes} x {device_type}, {config.train.mixed_precision} autocast, "
        f"base in {config.model.dtype}"
    )
    slow = [*slow_in_bfloat16(device_type, avoided_by), *slower_than_here(run.given, config)]
    for warning in slow:
        log(f"warning: {warning}")


def _log_trained(folder: Path, state: TrainState, log: Log) -> None:
    best = state.best
    rate = f" ({state.tokens_per_s:,.0f} tokens/s)" if state.tokens_per_s else ""
    kept = (
        f", the best step {best.step:,}: {best.forgetting:+.4f} bits/byte on retention text"
        if best
        else ""
    )
    log(
        f"trained        {state.step:,} steps, {state.num_tokens:,} tokens in {state.stepping_s:,.0f} s{rate}; "
        f"also {state.evaluating_s:,.0f} s evaluating, {state.saving_s:,.0f} s saving"
    )
    log(f"written        {folder}{kept}")
    if not state.num_tokens:
        log(
            "warning: no step had a token to learn; raise corpus.sequence_length, or look at the conversations' turns"
        )
