"""The verb `scale train`: open everything, decide where to start, run the loop, write `final/`."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack

from scale_cli.config.schema import RunConfig
from scale_cli.processes import on_main, process_state
from scale_cli.runs.opened import Run
from scale_cli.storage.atomic import claimed, remove_leftovers
from scale_cli.terminal import Log
from scale_cli.training.checkpoint import check_to_go_on, starting_point
from scale_cli.training.finishing import log_trained, put_back_best, write_final
from scale_cli.training.loop import run_loop
from scale_cli.training.opening import (
    check_to_train,
    explaining_out_of_memory,
    finished_state,
    open_accelerator,
    open_training,
)
from scale_cli.training.records import TrainState
from scale_cli.training.taking import take
from scale_cli.training.tracking import tracked


def train(
    config: RunConfig,
    resume: str | None,
    log: Log,
    accepted: Collection[str] = (),
) -> TrainState:
    """Train from `upscaled/` or from a checkpoint, and write `final/`.

    Return its state: the last step's or the best. `resume` is None, `auto` or a checkpoint's path;
    `accepted` are the keys that may have changed since the run began. A finished run is only checked
    under `auto`, unless `accepted` allows the config to ask for more steps now.
    """
    process_state()  # joins the process group, with our own time-out
    run = Run(config)
    if not run.config.method.definition.trains:
        on_main(lambda: take(run, log))
        return TrainState.load(run.folder.final)
    accelerator = open_accelerator(run)
    log = log if accelerator.is_main_process else lambda _: None  # only the main process logs

    on_main(lambda: check_to_go_on(run, resume, accepted))
    if resume == "auto" and (finished := finished_state(run, accepted, log)) is not None:
        return finished

    check_to_train(run, accelerator)
    # The main process removes leftovers; the others have looked through the folders by now.
    accelerator.wait_for_everyone()
    with ExitStack() as held:
        on_main(lambda: held.enter_context(claimed(run.folder.root)))
        on_main(lambda: remove_leftovers(run.folder.checkpoints))  # what a killed launch has left
        resumed_from = starting_point(run, resume, log, accepted)
        held.enter_context(explaining_out_of_memory(run.config, accelerator))
        training = open_training(run, accelerator, resumed_from, log)
        on_main(lambda: held.enter_context(tracked(training.metrics, run.config, accelerator)))
        run_loop(training)
        kept = put_back_best(training, log)
        write_final(training, kept)
    log_trained(training, log)
    return kept
