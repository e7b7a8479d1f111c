"""The section `train` of the config file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, create_model, model_validator

from scale_cli.methods import METHODS
from scale_cli.methods.recipes import RECIPES
from scale_cli.values import (
    Accepted,
    BatchSize,
    Fraction,
    Free,
    LearningRate,
    MixedPrecision,
    Name,
    PathText,
    Section,
    Steps,
)

# Largest default of micro_batch_size.
_MICRO_BATCH_SIZE = 8
# The order of a run's sequences is kept in memory: 18 bytes each.
_MAX_SEQUENCES = 10**9


def _defaults_by_method(key: str) -> str:
    """Return, to follow a key's description, its defaults that differ by method; "" if none do."""
    by_value: dict[float | str, list[str]] = {}
    for method in METHODS.values():
        if key in method.train_defaults:
            by_value.setdefault(method.train_defaults[key], []).append(method.name)
    defaults = [f"{value} with {' and '.join(names)}" for value, names in by_value.items()]
    return f"; if left out, {', '.join(defaults)}" if defaults else ""


# `SCHEDULES` (config/schedule.py) has the function of each.
Schedule = Literal["cosine", "constant", "wsd"]


Multiplier = Annotated[float, Field(gt=0.0, le=1e6)]


class LrMultipliers(Section):
    """Learning rates by kind of tensor, as multiples of `train.lr`; null: the method's own."""

    embedding: Multiplier | None = Field(
        default=None, description="E', or a baseline's token embedding"
    )
    head: Multiplier | None = Field(
        default=None, description="H', or a baseline's untied vocabulary head"
    )
    gains: Multiplier | None = Field(default=None, description="gains of the norms, and biases")


class _AnyTraining(Section):
    """How the model is trained."""

    max_steps: Accepted[Steps] = Field(description="optimiser steps, one global batch each")
    global_batch_size: BatchSize = Field(default=32, description="sequences per optimiser step")
    micro_batch_size: Free[BatchSize | None] = Field(
        default=None,
        description="sequences a process holds at once; null: the most that divide its share, up to 8",
    )
    sharding: Free[Literal["none", "expansion", "all"]] = Field(
        default="none",
        description="split over the processes: nothing, what trains, or the frozen base too (docs/processes.md)",
    )
    sharded_within: Free[Literal["launch", "node"]] = Field(
        default="launch",
        description="split over all processes, or over those of each machine; machines then exchange only gradients, "
        "no weights",
    )
    init_from: PathText | None = Field(
        default=None,
        description="start from a checkpoint or the final/ of another run with the same base and method; give each "
        "branch off one trunk its own seed, or it repeats the trunk's first batches",
    )
    optimiser: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="muon: Muon on each block of the matrices, with updates of AdamW's size, and AdamW on the rest"
        + _defaults_by_method("optimiser"),
    )
    lr: Accepted[LearningRate] = Field(
        default="auto",
        description="learning rate, which every kind of tensor has a multiple of; auto: found on the run's own model "
        "and text before the first step, by at most 5 % of its work, four windows, or a small model's seconds; of an "
        "expansion's codes 1e-3 (docs/training.md)",
    )
    lr_multipliers: LrMultipliers = LrMultipliers()
    min_lr_ratio: Accepted[Fraction] = Field(
        default=0.1, description="rate of the last step, relative to lr"
    )
    schedule: Accepted[Schedule] = Field(
        default="cosine",
        description="rate after the warm-up; wsd: constant, then a decay over the last steps",
    )
    warmup_steps: Accepted[int] = Field(
        default=0, ge=0, description="first steps, with a linear rise to lr"
    )
    decay_steps: Accepted[int | None] = Field(
        default=None,
        ge=0,
        description="last steps of wsd, which decay to min_lr_ratio; null: a fifth of max_steps; 0: none, for a trunk "
        "that other runs branch off",
    )
    weight_decay: Accepted[float] = Field(
        default=0.1,
        ge=0.0,
        le=100.0,
        description=f"of either optimiser{_defaults_by_method('weight_decay')}",
    )
    adam_beta1: Accepted[float] = Field(
        default=0.9, ge=0.0, lt=1.0, description="decay of the gradient's average"
    )
    adam_beta2: Accepted[float] = Field(
        default=0.95, ge=0.0, lt=1.0, description="decay of its square's average"
    )
    adam_epsilon: Accepted[float] = Field(
        default=1.0e-8, gt=0.0, le=1.0, description="added to that average's root"
    )
    max_grad_norm: Accepted[float] = Field(
        default=1.0, gt=0.0, description="a larger gradient is scaled down to it"
    )
    mixed_precision: Accepted[MixedPrecision] = Field(
        default="auto",
        description="autocast; auto: bf16 on a GPU that computes in bfloat16, else no; fp16, for GPUs without it, "
        "scales the loss",
    )
    on_nonfinite: Accepted[Literal["stop", "skip"]] = Field(
        default="stop",
        description="if a loss or gradient is not finite: stop, or skip the step; it never reaches the weights",
    )
    max_skipped_steps: Accepted[int] = Field(
        default=10,
        ge=0,
        le=10_000_000,
        description="most steps that `skip` may skip in the whole run",
    )
    max_hours: Free[float | None] = Field(
        default=None,
        gt=0.0,
        le=1e6,
        description="time limit of one invocation; it then writes a checkpoint and ends",
    )
    attention: Accepted[Literal["sdpa", "eager", "flex_attention"] | None] = Field(
        default=None,
        description="kernel, by transformers' name; null: its choice; for isolated documents on a GPU, flex_attention",
    )
    compile: Accepted[bool] = Field(
        default=False,
        description="compile every decoder layer with torch.compile; on a CPU it needs a C++ compiler",
    )
    activation_checkpointing: Accepted[bool] = Field(
        default=False, description="less memory, more time"
    )
    log_every_steps: Free[Steps] = Field(
        default=10, description="steps between records in metrics.jsonl"
    )
    save_every_steps: Free[Steps] = Field(default=500, description="steps between checkpoints")
    keep_checkpoints: Free[int] = Field(
        default=2, ge=1, le=1_000_000, description="newest to keep; older are deleted"
    )
    max_forgetting: Accepted[float | None] = Field(
        default=None,
        ge=0.0,
        le=100.0,
        description="final/ holds the weights of the periodic evaluation that is best on acquisition corpora, among "
        "those that lost at most this many bits/byte on any retention corpus; null: the last weights",
    )
    trackers: Free[list[Literal["tensorboard", "wandb", "mlflow", "trackio"]]] = Field(
        default=[],
        description="trackers that also get the records of metrics.jsonl; set each up as its own docs say",
    )
    project: Free[Name] = Field(
        default="scale", description="project in a tracker (in MLflow, the experiment)"
    )
    eval_every_steps: Free[Steps | None] = Field(
        default=None,
        description="steps between held-out losses in metrics.jsonl; null: only `scale evaluate`",
    )
    eval_max_tokens: Free[int | None] = Field(
        default=None,
        ge=1,
        le=10**15,
        description="tokens each time, of all held-out corpora together; of each document one window is read; "
        "null: a tenth of those trained on since the last time, and a window of each corpus at least",
    )

    @model_validator(mode="after")
    def _keys_go_together(self) -> _AnyTraining:
        if self.global_batch_size % self.sequences_at_once(1):
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size} does not divide global_batch_size "
                f"{self.global_batch_size}"
            )
        if self.max_steps * self.global_batch_size > _MAX_SEQUENCES:
            raise ValueError(
                f"max_steps x global_batch_size is more than {_MAX_SEQUENCES:,} sequences"
            )
        # The warm-up alone may be longer, as with every schedule, for a short trial of a long
        # config.
        planned_steps = self.warmup_steps + (self.decay_steps or 0)
        if self.schedule == "wsd" and planned_steps > max(self.max_steps, self.warmup_steps):
            raise ValueError(
                f"warmup_steps {self.warmup_steps:,} and decay_steps {self.decay_steps or 0:,} are "
                f"together more than max_steps {self.max_steps:,}"
            )
        return self

    @property
    def peak_lr(self) -> float:
        """The rate after the warm-up."""
        assert self.lr != "auto", "the rate is found before the first step"
        return self.lr

    def sequences_at_once(self, num_processes: int) -> int:
        """Return `micro_batch_size`, or its default if this many processes share a step."""
        share = self.global_batch_size // num_processes
        return self.micro_batch_size or max(
            size for size in range(1, _MICRO_BATCH_SIZE + 1) if share % size == 0
        )


# At run time it has the key of every recipe; a type checker knows only what all runs share.
if TYPE_CHECKING:
    TrainConfig = _AnyTraining
else:
    TrainConfig = create_model(
        "TrainConfig",
        __base__=_AnyTraining,
        __doc__=_AnyTraining.__doc__,
        __module__=__name__,
        **{recipe.key: recipe.field for recipe in RECIPES},
    )
