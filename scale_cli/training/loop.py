"""The training loop: step, log, evaluate, save, until the last step or a signal."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm

from scale_cli.config.schema import RunConfig
from scale_cli.data.batches import Batches
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.errors import Interrupted
from scale_cli.evaluation.scoring import score_corpus
from scale_cli.model.observing import TwoHeaded
from scale_cli.storage.layout import RunFolder
from scale_cli.training.checkpoint import Origin, Position, save_checkpoint
from scale_cli.training.metrics import MetricsLog
from scale_cli.training.sharding import gathered_roots
from scale_cli.training.step import StepResult, train_step
from scale_cli.upscale.folder import MethodModel


@dataclass
class TrainingRun:
    """Everything the loop works on.

    Args:
        config: the resolved config.
        accelerator: processes and devices.
        model: what is trained.
        observed: the same with its base head, for the periodic evaluation; None where this process has no part in it.
        wrapped: the model as it is run: by Accelerate (DistributedDataParallel with several processes), or sharded.
        origin: what checkpoints say of the run.
        optimiser: over what trains.
        batches: of the whole run.
        held_out: corpora of the periodic evaluation.
        position: where the run stands.
        metrics: the log; None except on the main process.
        stepped_tokens: target tokens of the steps that this process took part in.
        stepping_s: seconds inside those steps, without evaluations and checkpoints.
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
    stepped_tokens: int = 0
    stepping_s: float = 0.0

    @property
    def folder(self) -> RunFolder:
        """Where the run lands."""
        return RunFolder(self.config.output_dir)


def run_loop(run: TrainingRun) -> None:
    """Train from the run's position to its last step.

    Raises:
        TrainingError: a loss or gradient is not finite.
        Interrupted: SIGTERM or SIGINT came; a checkpoint was written.
    """
    train = run.config.train
    before_s, started_s = run.position.elapsed_s, time.monotonic()
    run.wrapped.train()
    with _progress_bar(run) as bar, _caught_signals() as caught:
        while run.position.step < train.max_steps:
            step = run.position.step
            step_started_s = time.monotonic()
            result = train_step(run.accelerator, run.wrapped, run.optimiser, run.batches, step, train)
            run.stepping_s += time.monotonic() - step_started_s
            run.stepped_tokens += result.num_tokens
            run.position = run.position.advanced(result.num_tokens, before_s + time.monotonic() - started_s)
            _log(run, result, bar)
            if train.eval_every_steps and run.position.step % train.eval_every_steps == 0:
                _evaluate(run)
            stopping = _agreed_signal(run.accelerator, caught)
            if stopping or run.position.step % train.save_every_steps == 0 or run.position.step == train.max_steps:
                _save(run)
            if stopping and run.position.step < train.max_steps:
                raise Interrupted(_stopped_message(run, stopping), stopping)


def _progress_bar(run: TrainingRun) -> Any:
    return tqdm(
        total=run.config.train.max_steps,
        initial=run.position.step,
        desc="training",
        unit="step",
        disable=not run.accelerator.is_main_process,
    )


def _log(run: TrainingRun, result: StepResult, bar: Any) -> None:
    """Advance the bar; every `log_every_steps`, and at the last step, write a record of that step alone.

    An average over the steps since the last record would differ after a resume.
    """
    bar.update(1)
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
            }
        )


def _evaluate(run: TrainingRun) -> None:
    """Score a few documents of every held-out corpus, on the main process; the others wait.

    The parts of a sharded model are only together on all processes, so there all of them score, and the main one tells.
    """
    if run.observed is not None:
        run.model.eval()
        with gathered_roots(run.observed):
            losses = _held_out_losses(run, run.observed)
        run.model.train()
        if run.metrics is not None:
            run.metrics.append({"step": run.position.step, "evaluation_nats_per_token": losses})
    run.accelerator.wait_for_everyone()


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
        )
        heads = {
            "base": scored.base,
            "adapted": scored.adapted,
            "routed": getattr(scored, run.config.method.router.rule),
        }
        per_token = {head: float(nats.sum() / scored.num_tokens.sum()) for head, nats in heads.items()}
        losses[source.name] = {head: loss if loss < float("inf") else None for head, loss in per_token.items()}
    return losses


def _save(run: TrainingRun) -> None:
    if run.metrics is not None:
        run.metrics.sync()
    save_checkpoint(run.origin, run.accelerator, run.model, run.optimiser, run.position)


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT instead of dying of them; a second SIGINT stops at once."""
    caught: list[int] = []

    def catch(number: int, _frame: FrameType | None) -> None:
        if signal.SIGINT in caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        caught.append(number)

    previous = {number: signal.signal(number, catch) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _agreed_signal(accelerator: Accelerator, caught: list[int]) -> int:
    """Return the signal any process has caught, or 0; all processes get the same answer."""
    mine = caught[0] if caught else 0
    if accelerator.num_processes == 1:
        return mine
    signals = accelerator.gather(torch.tensor([mine], device=accelerator.device))
    return int(signals.max().item())


def _stopped_message(run: TrainingRun, number: int) -> str:
    return (
        f"stopped by {signal.Signals(number).name} after step {run.position.step}; checkpoint "
        f"{run.folder.checkpoint(run.position.step)}\ncontinue with: scale train CONFIG --resume auto"
    )
