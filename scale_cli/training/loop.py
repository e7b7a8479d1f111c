"""The training loop: step, log, evaluate, save, until the last step or a signal."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm

from scale_cli.config.schema import RunConfig
from scale_cli.data.batches import Batches, BatchSource
from scale_cli.data.prefetch import BatchesAhead
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.errors import Interrupted, NonFiniteError, TrainingError
from scale_cli.evaluation.scoring import score_corpus
from scale_cli.model.observing import TwoHeaded
from scale_cli.processes import ALONE, share
from scale_cli.storage.layout import RunFolder
from scale_cli.training.checkpoint import Origin, Position
from scale_cli.training.interruption import StopNow, StopRequest, describe_stop, stop_requests
from scale_cli.training.metrics import EVALUATION, MetricsLog
from scale_cli.training.saving import Saver
from scale_cli.training.sharding import gathered_roots, is_sharded
from scale_cli.training.spikes import SpikeWatch
from scale_cli.training.step import StepResult, train_step
from scale_cli.upscale.folder import MethodModel

_WINDOWS_NAMED = 8


@dataclass
class TrainingRun:
    """Everything the loop works on.

    Args:
        config: the resolved config.
        accelerator: processes and devices.
        model: what is trained.
        observed: the same with its base head, for the periodic evaluation; None where there is none.
        wrapped: the model as it is run: by Accelerate (DistributedDataParallel with several processes), or sharded.
        origin: what checkpoints say of the run.
        optimiser: over what trains.
        batches: of the whole run.
        held_out: corpora of the periodic evaluation.
        position: where the run stands.
        metrics: the log; None except on the main process.
        saved_step: of the checkpoint in this run's folder that it began with, if it did.
        stepped_tokens: target tokens of the steps that this process took part in.
        stepping_s: seconds inside those steps, without evaluations and checkpoints.
        saving_s: seconds that training waited for checkpoints.
        spikes: warns of losses far above the usual.
    """

    config: RunConfig
    accelerator: Accelerator
    model: MethodModel
    observed: TwoHeaded | None
    wrapped: nn.Module
    origin: Origin
    optimiser: torch.optim.Optimizer
    batches: Batches
    held_out: list[TokenisedCorpus]
    position: Position
    metrics: MetricsLog | None
    saved_step: int | None = None
    stepped_tokens: int = 0
    stepping_s: float = 0.0
    saving_s: float = 0.0
    spikes: SpikeWatch = field(default_factory=SpikeWatch)

    @property
    def folder(self) -> RunFolder:
        """Where the run lands."""
        return RunFolder(self.config.output_dir)


def run_loop(run: TrainingRun) -> None:
    """Train from the run's position to its last step.

    Raises:
        TrainingError: losses or gradients are not finite, more often than the config allows.
        StorageError: a checkpoint or the log could not be written.
        Interrupted: SIGTERM or SIGINT came, or the time is over; a checkpoint was written.
    """
    run.wrapped.train()
    accelerator, max_hours = run.accelerator, run.config.train.max_hours
    processes = accelerator.process_index, accelerator.num_processes
    ahead = BatchesAhead(run.batches, run.position.step, *processes)
    saver = Saver(run.origin, accelerator, run.model, run.optimiser, run.metrics, run.saved_step)
    alone = accelerator.num_processes == 1
    with _progress_bar(run) as bar, stop_requests(max_hours, alone=alone) as stop, ahead, saver:
        _take_steps(run, ahead, stop, saver, bar)
    run.saving_s += saver.stalled_s


def _take_steps(run: TrainingRun, batches: BatchSource, stop: StopRequest, saver: Saver, bar: Any) -> None:
    train, first_step = run.config.train, run.position.step
    before_s, started_s = run.position.elapsed_s, time.monotonic()
    if run.position.evaluation_due:
        run.position = replace(run.position, evaluation_due=False)
        _evaluate_unless_asked(run, stop, saver)
    while run.position.step < train.max_steps:
        saver.check()
        try:
            look = partial(stop.between_micro_batches, clock_too=run.position.step > first_step)
            result = _step(run, batches, look)
        except StopNow:
            _stop(run, stop, saver)
        elapsed_s = before_s + time.monotonic() - started_s
        if result is None:
            run.position = run.position.skipped(run.batches.num_target_tokens(run.position.step), elapsed_s)
        else:
            run.position = run.position.advanced(result.num_tokens, elapsed_s)
            _log(run, result, bar)
        bar.update(1)
        if train.eval_every_steps and run.position.step % train.eval_every_steps == 0:
            _evaluate_unless_asked(run, stop, saver)
        last = run.position.step == train.max_steps
        if not last and stop.agreed(run.accelerator):
            _stop(run, stop, saver)
        if last or run.position.step % train.save_every_steps == 0:
            saver.save(run.position)


def _evaluate_unless_asked(run: TrainingRun, stop: StopRequest, saver: Saver) -> None:
    """Evaluate; where a signal comes meanwhile, leave it to the resumed run."""
    try:
        with stop.at_once():
            records = _evaluate(run)
    except StopNow:
        run.position = replace(run.position, evaluation_due=True)
        _stop(run, stop, saver)
    if run.metrics is not None:
        for record in records:
            run.metrics.append(record)


def _stop(run: TrainingRun, stop: StopRequest, saver: Saver) -> NoReturn:
    """Save the position, wait until it is safe, and leave; every process has to call this.

    Raises:
        Interrupted: always.
    """
    asked = stop.agreed(run.accelerator)
    run.optimiser.zero_grad(set_to_none=True)
    saver.save(run.position)
    saver.finish()
    run.accelerator.wait_for_everyone()  # a launcher ends all processes as soon as one of them has ended
    words, exit_code = describe_stop(asked)
    raise Interrupted(
        f"{words} after step {run.position.step}; checkpoint {run.folder.checkpoint(run.position.step)}", exit_code
    )


def _step(run: TrainingRun, batches: BatchSource, between_micro_batches: Callable[[], None]) -> StepResult | None:
    """Take one step, or return None where it was left out for not being finite."""
    train, step = run.config.train, run.position.step
    started_s = time.monotonic()
    try:
        result = train_step(run.accelerator, run.wrapped, run.optimiser, batches, step, train, between_micro_batches)
    except NonFiniteError as error:
        told = f"{error}; its batch: {_sources(run, step)}"
        if train.on_nonfinite == "stop":
            raise TrainingError(
                f"{told}; nothing was updated. Lower train.lr, raise train.warmup_steps, or set train.on_nonfinite=skip"
            ) from None
        if run.position.skipped_steps >= train.max_skipped_steps:
            raise TrainingError(f"{told}; train.max_skipped_steps {train.max_skipped_steps} are used up") from None
        _warn(run, f"{told}; left out")
        if run.metrics is not None:
            run.metrics.append({"step": step + 1, "skipped": str(error)})
        return None
    run.stepping_s += time.monotonic() - started_s
    run.stepped_tokens += result.num_tokens
    if (usual := run.spikes.usual_loss_of_spike(result.loss)) is not None:
        told = f"step {step + 1}: loss {result.loss:.4f}, where {usual:.4f} was usual; its batch: {_sources(run, step)}"
        advice = f"raise train.warmup_steps (now {train.warmup_steps:,}) or lower train.lr (now {train.lr:g})"
        _warn(run, f"{told}; where losses leap again and again, {advice}")
    return result


def _sources(run: TrainingRun, step: int) -> str:
    """Return how many sequences of a step came from each source, and which ones."""
    windows = defaultdict(list)
    for source, window in run.batches.windows_of(step):
        windows[run.config.corpus.sources[source].name].append(window)
    named = []
    for name, indices in windows.items():
        shown = ", ".join(str(index) for index in indices[:_WINDOWS_NAMED])
        named.append(f"{len(indices)} of {name} (windows {shown}{', ...' if len(indices) > _WINDOWS_NAMED else ''})")
    return ", ".join(named)


def _warn(run: TrainingRun, line: str) -> None:
    if run.accelerator.is_main_process:
        tqdm.write(f"warning: {line}", file=sys.stderr)


def _progress_bar(run: TrainingRun) -> Any:
    return tqdm(
        total=run.config.train.max_steps,
        initial=run.position.step,
        desc="training",
        unit="step",
        disable=not run.accelerator.is_main_process,
    )


def _log(run: TrainingRun, result: StepResult, bar: Any) -> None:
    """Show the loss; every `log_every_steps`, and at the last step, write a record of that step alone.

    An average over the steps since the last record would differ after a resume.
    """
    elapsed_s = max(run.position.elapsed_s, 1e-9)
    tokens_per_s = run.position.num_tokens / elapsed_s
    bar.set_postfix_str(f"loss {result.loss:.4f}, {tokens_per_s:,.0f} tokens/s", refresh=False)
    last = run.position.step == run.config.train.max_steps
    if run.position.step % run.config.train.log_every_steps and not last:
        return
    if run.metrics is not None:
        run.metrics.append(
            {
                "step": run.position.step,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "lr": result.lr,
                "num_tokens": run.position.num_tokens,
                "tokens_per_s": round(tokens_per_s, 1),
                "elapsed_s": round(elapsed_s, 3),
                "log_every_steps": run.config.train.log_every_steps,  # it may change at a resume
            }
        )


def _evaluate(run: TrainingRun) -> list[dict[str, Any]]:
    """Score a few documents of every held-out corpus, shared among the processes, and return what to log."""
    assert run.observed is not None, "opened where train.eval_every_steps is set"
    run.model.eval()
    with gathered_roots(run.wrapped, run.observed):
        losses = _held_out_losses(run, run.observed)
    run.model.train()
    return [{"step": run.position.step, EVALUATION: losses}]


def _held_out_losses(run: TrainingRun, observed: TwoHeaded) -> dict[str, dict[str, float | None]]:
    """Return nats per token of every head on every held-out corpus; None for an infinite loss."""
    evaluation, losses = run.config.evaluation, {}
    for source, corpus in zip(evaluation.perplexity, run.held_out, strict=True):
        scored = score_corpus(
            observed,
            corpus,
            run.config.method.router,
            sequence_length=evaluation.sequence_length or run.config.corpus.sequence_length,
            batch_size=evaluation.batch_size,
            mixed_precision=evaluation.mixed_precision,
            max_documents=run.config.train.eval_max_documents,
            progress=f"evaluating {source.name}" if run.accelerator.is_main_process else None,
            # The parts of a sharded model are only together while all processes run the same batch.
            share=ALONE if is_sharded(run.model) else share(),
        )
        heads = {
            "base": scored.base,
            "adapted": scored.adapted,
            "routed": getattr(scored, run.config.method.router.rule),
        }
        per_token = {head: float(nats.sum() / scored.num_tokens.sum()) for head, nats in heads.items()}
        losses[source.name] = {head: loss if loss < float("inf") else None for head, loss in per_token.items()}
    return losses
