"""Ends a run: the weights that are kept, and `final/`."""

from __future__ import annotations

from dataclasses import replace

from scale_cli.methods.recipes import trainable_parameters
from scale_cli.processes import all_succeed, main_decides
from scale_cli.runs.folder import TRAINED
from scale_cli.runs.opened import MethodFolder
from scale_cli.storage.atomic import is_whole, new_folder, save_tensors
from scale_cli.terminal import Log
from scale_cli.training.checkpoint import load_checkpoint
from scale_cli.training.records import Cost, TrainState
from scale_cli.training.sharding import whole_tensor
from scale_cli.training.training_run import TrainingRun
from scale_cli.values import counted


def put_back_best(run: TrainingRun, log: Log) -> TrainState:
    """Return the state that `final/` holds, the last step or the best that is kept, and restore the
    model to it.
    """
    best = run.state.best
    bound = run.config.train.max_forgetting
    if best is None or bound is None:
        return run.state
    if best.forgetting > bound:
        lost = f"{best.forgetting:+.4f} bits/byte at step {best.step:,}"
        log(
            f"warning: train.max_forgetting {bound:g}: every evaluation forgot more; the least was {lost}"
        )
    if best.step == run.state.step:
        return run.state
    kept = MethodFolder(run.folder.checkpoint(best.step), run.start.run)
    if not main_decides(lambda: is_whole(kept.path)):
        log(
            f"warning: {kept.path}: the best checkpoint is damaged; final/ has the last step's weights"
        )
        run.state = replace(run.state, best=None)
        return run.state
    state = load_checkpoint(kept, run.model, run.optimiser, run.hooks)
    # A signal may have saved it before it was evaluated.
    return replace(state, best=best, evaluation_due=False)


def write_final(run: TrainingRun, state: TrainState) -> None:
    """Write `final/`: a method folder of unsharded tensors."""
    with all_succeed(run.beside):
        run.check_frozen_base(state.step)
    trained = {}
    for name, parameter in trainable_parameters(run.model).items():
        tensor = whole_tensor(parameter.detach())  # every process must call this
        if run.accelerator.is_main_process:
            trained[name] = tensor.cpu()
    if run.accelerator.is_main_process:
        with new_folder(run.folder.final) as partial:
            run.describe(partial, state)
            save_tensors(partial / TRAINED, trained)
            processes = run.accelerator
            Cost.of(run.model, run.state, processes.device, processes.num_processes).save(partial)
    run.accelerator.wait_for_everyone()


def log_trained(run: TrainingRun, log: Log) -> None:
    """Log what a run has cost, and where its weights are."""
    state = run.state
    best = run.state.best
    rate = f" ({state.tokens_per_s:,.0f} tokens/s)" if state.tokens_per_s else ""
    kept = (
        f", the best step {best.step:,}: {best.forgetting:+.4f} bits/byte on retention text"
        if best
        else ""
    )
    log(
        f"trained        {counted(state.step, 'step')}, {state.num_tokens:,} tokens in "
        f"{state.stepping_s:,.0f} s{rate}; also {state.evaluating_s:,.0f} s evaluating, {state.saving_s:,.0f} s saving"
    )
    log(f"written        {run.folder.final}{kept}")
    if not state.num_tokens:
        reason = "no step had a token to learn; raise corpus.sequence_length, or look at the conversations' turns"
        if state.skipped_tokens:
            reason = "nothing was learned: the loss or gradient of every step was not finite"
        log(f"warning: {reason}")
