"""The training loop: step, log, evaluate, save, until the last step or a signal.

`run_loop` opens what goes on beside the steps: batches are made ahead, signals are noted
(`interruption.py`), and a thread writes checkpoints (`training_run.py`). `_Loop.take_all_steps` is
the loop, over the steps of `step.py`.
"""

from __future__ import annotations

import math
import signal
import time
from collections import defaultdict, deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from scale_cli.data.batches import Prefetched, StepBatches, batches_ahead
from scale_cli.errors import GradientOverflow, Interrupted, NonFiniteError, TrainingError
from scale_cli.evaluation.intervals import finite
from scale_cli.heap import keep_freed_memory
from scale_cli.processes import peak_memory_bytes, shorter_timeout
from scale_cli.terminal import not_counted, progress_bar
from scale_cli.training.interruption import (
    OUT_OF_TIME,
    StopNow,
    StopRequest,
    largest_of_all,
    stop_requests,
)
from scale_cli.training.metrics_log import BITS, SAMPLES, MetricsRecord
from scale_cli.training.observing import better_of
from scale_cli.training.records import TrainState
from scale_cli.training.step import StepResult, TakenStep, train_step
from scale_cli.training.training_run import TrainingRun
from scale_cli.upscale.stream_ratios import layer_ratios, measured_stream_ratios

_WINDOWS_NAMED = 8
# A loss leaps if it is above 1.5 times the highest of up to 64 losses before it, of which there
# must be 3. A mean would warn of ordinary steps, while losses fall steeply or spread widely.
_LEAP = 1.5
_COMPARED_STEPS = 64
_FEWEST_STEPS = 3


def run_loop(run: TrainingRun) -> None:
    """Train from the run's position to its last step.

    Raises:
        TrainingError: losses or gradients were not finite more often than the config allows.
        StorageError: a checkpoint or the log could not be written.
        Interrupted: SIGTERM, SIGINT or the time limit stopped the run; a checkpoint was written.
    """
    run.wrapped.train()
    accelerator = run.accelerator
    train = run.config.train
    done = run.state.step
    rank = accelerator.process_index
    num_processes = accelerator.num_processes
    with (
        progress_bar(
            total=train.max_steps,
            initial=done,
            desc="training",
            unit="step",
            disable=not accelerator.is_main_process,
        ) as bar,
        stop_requests(train.max_hours, alone=num_processes == 1) as stop,
        batches_ahead(run.batches, done, rank, num_processes, accelerator.device) as batches,
        run.saving(),
    ):
        loop = _Loop(run, batches, stop, bar, began=run.state, logged=run.state)
        loop.take_all_steps()


@dataclass
class _Loop:
    """The steps of a run in this process, and the work between them.

    Steps are taken, and later settled. To take a step is to give it to the device, without a wait.
    To settle it is to read its loss, and to count it in the run's state. The loop settles only for
    a record, an evaluation, a checkpoint or the end. A step that is not finite needs no check
    before then: the device does not apply its update.
    """

    run: TrainingRun  # its state is that after the last step whose loss is known
    batches: Prefetched[StepBatches]  # of this process, from that state on
    stop: StopRequest
    bar: Any  # the progress bar
    began: TrainState  # state at the start of this process
    logged: TrainState  # state at the last record
    taken: list[TakenStep] = field(default_factory=list)  # steps after that state, not settled yet
    taken_since_s: float = 0.0  # when the first of them began
    logged_wait_s: float = 0.0  # total wait for batches by then
    # of the last steps
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_COMPARED_STEPS))
    # names of the held-out texts that an evaluation has warned of
    warned: set[str] = field(default_factory=set)

    def take_all_steps(self) -> None:
        """Train from the run's position to its last step."""
        run = self.run
        train = run.config.train
        done = self.began.step
        if run.state.evaluation_due:
            run.state = replace(run.state, evaluation_due=False)
            with not_counted(self.bar):
                self._evaluate_what_is_due(done)
        while done < train.max_steps:
            run.finish_saving(wait=False)
            try:
                summed = self._take_step(done)
            except StopNow:
                self._save_and_leave(self.stop.mine())
            if done == self.began.step and (device := run.accelerator.device).type == "cpu":
                keep_freed_memory(peak_memory_bytes(device) * run.accelerator.num_processes)
            done += 1
            last = done == train.max_steps
            is_due = self._is_evaluated(done)
            is_saved = last or done % train.save_every_steps == 0
            if self._is_logged(done) or is_due or is_saved:
                self._settle_steps()
            self.bar.update(1)  # with this step's record
            if self._is_logged(done) and train.trackers:
                # Sending to trackers may take longer than a step's timeout.
                run.accelerator.wait_for_everyone()
            if not last and (asked := self.stop.agreed(run.accelerator, summed)):
                run.state = replace(run.state, evaluation_due=is_due)  # a resume begins with it
                self._save_and_leave(asked)
            with not_counted(self.bar):
                self._evaluate_what_is_due(done)
                if is_saved:
                    run.save()
        run.finish_saving()
        since_then = self.stop.signals[0] if self.stop.signals else 0
        if asked := largest_of_all(run.accelerator, since_then):
            self._save_and_leave(asked)

    def _take_step(self, step: int) -> Tensor:
        """Take a step; return the sum of all processes' requests to stop, which the device may
        still be computing.
        """
        run = self.run
        started_s = time.monotonic()
        look = partial(self.stop.between_micro_batches, clock_too=step > self.began.step)
        measured: AbstractContextManager[dict[str, Tensor]] = nullcontext({})
        # Compiled layers cannot be measured.
        if self._is_logged(step + 1) and not run.config.train.compile:
            measured = measured_stream_ratios(run.model)
        with shorter_timeout(), measured as ratios:
            taken = train_step(
                run.accelerator,
                run.wrapped,
                run.optimiser,
                next(self.batches),
                run.train,
                between_micro_batches=look,
                asked=self.stop.mine,
                hooks=run.hooks,
                scaler=run.scaler,
            )
        if ratios:
            taken = replace(taken, stream_ratios=layer_ratios(run.model, ratios))
        if not self.taken:
            self.taken_since_s = started_s
        self.taken.append(taken)
        return taken.asked

    def _is_logged(self, done: int) -> bool:
        train = self.run.config.train
        return done % train.log_every_steps == 0 or done == train.max_steps

    def _settle_steps(self) -> None:
        """Wait for the steps taken, count them in the run's state, and write the record that is
        due.
        """
        run = self.run
        if not self.taken:
            return
        steps = self.taken
        self.taken = []
        # In one transfer from the device.
        figures = torch.stack([step.figures for step in steps]).tolist()
        run.count_time("stepping_s", self.taken_since_s)
        for step, of_step in zip(steps, figures, strict=True):
            try:
                result = step.result(of_step)
            except NonFiniteError as error:
                self._skip(step, error)
            else:
                run.state = run.state.advanced(step.num_tokens, result.by_source)
                self._warn_of_leap(result.loss)
                if self._is_logged(run.state.step):
                    self._log(result, step)

    def _skip(self, taken: TakenStep, error: NonFiniteError) -> None:
        """Count a step that was not finite.

        Raises:
            TrainingError: it is no overflow, and the config does not allow skipping it.
        """
        run = self.run
        train = run.config.train
        overflowed = isinstance(error, GradientOverflow)
        if not overflowed:
            message = f"{error}; its batch: {self._sources(taken.step)}"
            if train.on_nonfinite == "stop":
                ways = "Lower train.lr, raise train.warmup_steps, or set train.on_nonfinite=skip"
                raise TrainingError(f"{message}; nothing was updated. {ways}")
            if run.state.skipped_steps >= train.max_skipped_steps:
                raise TrainingError(
                    f"{message}; the limit train.max_skipped_steps {train.max_skipped_steps} is reached"
                )
            run.say(f"warning: {message}; the step is skipped")
        run.log({"step": taken.step + 1, "skipped": str(error)})
        run.state = run.state.skipped(taken.num_tokens, counts=not overflowed)

    def _warn_of_leap(self, loss: float) -> None:
        """Warn of a loss far above the last ones, and name its batch; the run itself is unaffected."""
        highest = max(self.losses, default=math.inf)
        step = self.run.state.step
        train = self.run.train
        if len(self.losses) >= _FEWEST_STEPS and loss > _LEAP * highest:
            advice = f"raise train.warmup_steps (now {train.warmup_steps:,}) or lower train.lr (now {train.lr:g})"
            batch = (
                f"its batch: {self._sources(step - 1)}; if this happens again and again, {advice}"
            )
            self.run.say(
                f"warning: step {step}: loss {loss:.4f}, but the highest of the last steps was {highest:.4f}; {batch}"
            )
        self.losses.append(loss)

    def _sources(self, step: int) -> str:
        """Say in words how many sequences of a step, counted from 0, came from each source, and
        name their windows.
        """
        windows = defaultdict(list)
        for source, window in self.run.batches.windows_of(step):
            windows[self.run.config.corpus.sources[source].name].append(str(window))
        named = []
        for name, of_source in windows.items():
            more = ", ..." if len(of_source) > _WINDOWS_NAMED else ""
            named.append(
                f"{len(of_source)} of {name} (windows {', '.join(of_source[:_WINDOWS_NAMED])}{more})"
            )
        return ", ".join(named)

    def _log(self, result: StepResult, taken: TakenStep) -> None:
        """Show the loss, and write a record of this step.

        The bar shows the loss of new text alone. The speed and the losses by source cover all
        steps since the last record, since a source may have no sequence in a single step. The run's
        state holds the sums of the losses, so that they are the same after a resume.
        """
        run = self.run
        state = run.state
        tokens_per_s = state.rate_since(self.logged) or 0.0
        # Empty if the model gives no loss for each token.
        sums = state.since_logged
        sources = run.config.corpus.sources if sums else []
        seen = [
            (source, loss, num) for source, (loss, num) in zip(sources, sums, strict=True) if num
        ]
        new = [(loss, num) for source, loss, num in seen if source.role == "new"]
        shown = result.loss
        if new:
            shown = sum(loss for loss, _ in new) / sum(num for _, num in new)
        self.bar.set_postfix_str(f"loss {shown:.4f}, {tokens_per_s:,.0f} tokens/s", refresh=False)
        waited_s = self.batches.waited_s - self.logged_wait_s
        self.logged = state
        self.logged_wait_s = self.batches.waited_s
        run.state = replace(state, since_logged=())
        record: MetricsRecord = {"step": state.step}
        if state.since_logged:
            record["loss_by_source"] = {source.name: loss / num for source, loss, num in seen}
        if taken.stream_ratios is not None:
            ratios = map(finite, taken.stream_ratios.tolist())
            record["stream_ratios"] = [ratio and float(f"{ratio:.4g}") for ratio in ratios]
        run.log(
            {
                **record,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "lr": taken.lr,
                "num_tokens": state.num_tokens,
                "tokens_per_s": round(tokens_per_s, 1),
                "data_wait_s": round(waited_s, 3),
                "peak_memory_bytes": peak_memory_bytes(run.accelerator.device),
                "elapsed_s": round(state.elapsed_s, 3),
                "evaluating_s": round(state.evaluating_s, 3),
                "saving_s": round(state.saving_s, 3),
            }
        )

    def _is_evaluated(self, done: int) -> bool:
        """Return whether the held-out text is to be measured after a step."""
        train = self.run.config.train
        if train.eval_every_steps is None:
            return False
        at_the_end = train.max_forgetting is not None and done == train.max_steps
        return done % train.eval_every_steps == 0 or at_the_end

    def _evaluate_what_is_due(self, done: int) -> None:
        """If an evaluation is due, evaluate the weights that `final/` would hold; save them if they
        are the best yet.

        In a process that is alone, a signal ends the evaluation at once; the resumed run then
        begins with it.
        """
        run = self.run
        bound = self.run.config.train.max_forgetting
        if run.observer is None or not self._is_evaluated(done):
            return
        started_s = time.monotonic()
        best = run.state.best
        try:
            with self.stop.at_once():
                record = run.observer.evaluate(done)
        except StopNow:
            run.state = replace(run.state, evaluation_due=True)
            run.count_time("evaluating_s", started_s)
            self._save_and_leave(self.stop.mine())
        if bound is not None:
            best = better_of(best, run.observer.score(done, record[BITS]), bound)
        if best is not None:
            record["best_step"] = best.step
        is_new = best != run.state.best
        run.state = replace(run.state, best=best)
        run.count_time("evaluating_s", started_s)
        run.log(record)
        failures = run.observer.failures(record[BITS])
        for name, failure in failures.items():
            if name not in self.warned:
                run.say(f"warning: step {done:,}, {name}: {failure}")
        self.warned |= failures.keys()
        for name, said in record.get(SAMPLES, {}).items():
            # Without incomplete characters.
            text = f"{said['prompt']} ... {said['continuation']}".replace("\ufffd", "")
            run.say(f"step {done:,}, {name}: {' '.join(text.split())}")
        run.accelerator.wait_for_everyone()  # the main process's samples may take longer than a step's timeout
        if is_new:
            run.save()

    def _save_and_leave(self, asked: int) -> NoReturn:
        """Save a checkpoint, wait until it is on the disk, and raise Interrupted; every process
        must call this.
        """
        self._settle_steps()
        run = self.run
        run.optimiser.zero_grad(set_to_none=True)
        run.save()
        run.finish_saving()
        run.accelerator.wait_for_everyone()  # a launcher ends all processes when one has ended
        reason, exit_code = "train.max_hours", 0
        if asked != OUT_OF_TIME:
            reason, exit_code = signal.Signals(asked).name, 128 + asked
        raise Interrupted(
            f"stopped by {reason} after step {run.state.step}; "
            f"checkpoint {run.folder.checkpoint(run.state.step)}",
            exit_code,
        )
