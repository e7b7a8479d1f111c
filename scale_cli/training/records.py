"""What training writes beside its weights: how far it came, where it began, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from scale_cli.processes import device_name, peak_memory_bytes
from scale_cli.storage.records import RunRecord


@dataclass(frozen=True)
class Score:
    """A periodic evaluation's score of the weights at a step, in bits/byte of the served head."""

    step: int
    acquisition: float  # mean loss over the corpora with that role; lower is better
    forgetting: float  # largest loss increase over the base on any corpus with the role retention
    texts: list[str]  # names of the held-out corpora, which contain hashes of their text


@dataclass(frozen=True)
class TrainState(RunRecord):
    """How far a run has come; in checkpoints and `final/`."""

    FILE = "position.json"
    step: int = 0  # optimiser steps done
    num_tokens: int = 0  # target tokens trained on
    # seconds of training, evaluating and saving; like the next three, over all resumes
    elapsed_s: float = 0.0
    stepping_s: float = 0.0  # of those, seconds in steps
    evaluating_s: float = 0.0  # of those, seconds in periodic evaluations
    saving_s: float = 0.0  # of those, seconds that training waited for checkpoints
    skipped_steps: int = 0  # steps skipped because their loss or gradient was not finite
    # Target tokens of those steps, and of steps whose gradient overflowed float16.
    skipped_tokens: int = 0
    loss_scale: float | None = None  # factor of the next loss; None: no float16
    loss_scale_steps: int = 0  # steps since it changed
    # A signal interrupted this step's periodic evaluation; a resume begins with it.
    evaluation_due: bool = False
    # By source, (summed loss, number of targets) since the last record of the log; empty: nothing
    # yet.
    since_logged: tuple[tuple[float, int], ...] = ()
    best: Score | None = None  # its checkpoint is kept, if `train.max_forgetting` is set
    lr: float | None = None  # that `train.lr: auto` has found; None: the config's own
    windows: int = 1  # how text is cut (`WINDOWS` in data/corpora.py); earlier versions say nothing

    @property
    def tokens_per_s(self) -> float | None:
        """Target tokens per second of training, without evaluations and checkpoints; None before
        the first step.
        """
        return self.rate_since(TrainState())

    def rate_since(self, earlier: TrainState) -> float | None:
        """Return target tokens per second of training since an earlier state; None if there was no
        step between.
        """
        between_s = self.stepping_s - earlier.stepping_s
        return (self.num_tokens - earlier.num_tokens) / between_s if between_s > 0 else None

    def advanced(self, num_tokens: int, by_source: Sequence[tuple[float, int]] = ()) -> TrainState:
        """Return the state after one more step; `by_source` has each source's (summed loss, number
        of targets).
        """
        since = self.since_logged
        if by_source:
            before = since or ((0.0, 0),) * len(by_source)
            since = tuple(
                (loss + more, num + n)
                for (loss, num), (more, n) in zip(before, by_source, strict=True)
            )
        return replace(
            self, step=self.step + 1, num_tokens=self.num_tokens + num_tokens, since_logged=since
        )

    def skipped(self, num_tokens: int, *, counts: bool) -> TrainState:
        """Return the state after a step that was not finite; it does not count if it only
        overflowed float16.
        """
        tokens = self.skipped_tokens + num_tokens
        steps = self.skipped_steps + counts
        return replace(self.advanced(0), skipped_tokens=tokens, skipped_steps=steps)


@dataclass(frozen=True)
class BranchPoint(RunRecord):
    """The folder of another run that a run began with (`train.init_from`); saved beside each state."""

    FILE = "init_from.json"
    content_sha256: str  # of the manifest of the checkpoint or `final/`, which has the hash of each of its files
    step: int  # of the other run, when it wrote that folder
    num_tokens: int  # the other run had trained on

    def __str__(self) -> str:
        message = f"step {self.step:,} of a run, {self.num_tokens:,} tokens"
        return f"{message}, sha256 {self.content_sha256[:12]}"


@dataclass(frozen=True)
class Cost(RunRecord):
    """What a training run cost; in `final/`."""

    FILE = "cost.json"
    trainable_parameters: int
    total_parameters: (
        int  # of the whole model in training, frozen ones included; a tied one counts once
    )
    # target tokens of all processes per second of optimiser steps, without periodic evaluations and
    # checkpoints, over all resumes; None if no step was taken
    tokens_per_s: float | None
    # of the main process since it started: on a GPU, what PyTorch allocated there; otherwise
    # resident memory, with that of the libraries
    peak_memory_bytes: int
    device: str  # `cpu`, or the GPU's name
    num_processes: int
    saving_s: float  # seconds that training waited for checkpoints, over all resumes

    @classmethod
    def of(cls, model: Any, state: TrainState, device: Any, num_processes: int) -> Cost:
        """Return the cost of a model's training, which has come to a state."""
        parameters = list(model.parameters())
        return cls(
            trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
            total_parameters=sum(p.numel() for p in parameters),
            tokens_per_s=state.tokens_per_s,
            peak_memory_bytes=peak_memory_bytes(device),
            device=device_name(device),
            num_processes=num_processes,
            saving_s=round(state.saving_s, 4),
        )
