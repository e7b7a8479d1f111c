"""The section `train` of the config file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from scale_cli.config.schedule import SCHEDULES
from scale_cli.methods import METHODS
from scale_cli.methods.recipes import AverageConfig, LookaheadConfig, recipes_of
from scale_cli.values import (
    Accepted,
    BatchSize,
    Documents,
    Fraction,
    Free,
    LearningRate,
    MixedPrecision,
    Name,
    PathText,
    Section,
    Steps,
    gone,
)

# Sequences that a process holds at once, where a config leaves it open and its share is a multiple of them.
_MICRO_BATCH_SIZE = 8
# Of max_steps: what is averaged, where a config leaves it open.
_SHARE_AVERAGED = 0.1
# Keys that mean nothing with other schedules.
KEYS_OF_SCHEDULES = {"decay_steps": ("wsd",)}
# The order of a run's sequences is kept in memory: 18 bytes each.
_MAX_SEQUENCES = 10**9


def _left_out(key: str) -> str:
    """Return what a key of `train` is where a config leaves it out, with methods that have a value of their own."""
    by_value: dict[float, list[str]] = {}
    for method in METHODS.values():
        if key in method.left_out:
            by_value.setdefault(method.left_out[key], []).append(method.name)
    return ", ".join(f"{value:g} with {' and '.join(names)}" for value, names in by_value.items())


if TYPE_CHECKING:  # a checker knows no Literal that is computed; pydantic reads the names off the table
    _Schedule = str
else:
    _Schedule = Annotated[
        Literal[tuple(SCHEDULES)],
        gone(infinite="use wsd; with decay_steps: 0 its rate stays constant, and other runs can branch off it"),
    ]


class LrMultipliers(Section):
    """Learning rates by kind of tensor, relative to `train.lr`, which is that of the matrices; null: by the start."""

    embedding: float | None = Field(default=None, gt=0.0, le=1e6, description="E', or a baseline's token embedding")
    head: float | None = Field(default=None, gt=0.0, le=1e6, description="H', or a baseline's untied vocabulary head")
    gains: float | None = Field(default=None, gt=0.0, le=1e6, description="gains of the norms, and biases")


class TrainConfig(Section):
    """How it is trained."""

    REMOVED: ClassVar[Mapping[str, Any]] = {"cooldown_steps": None, "constant_lr_ratio": 0.5, "decay_shape": None}

    max_steps: Accepted[Steps] = Field(description="optimiser steps, one global batch each")
    global_batch_size: BatchSize = Field(default=32, description="sequences an optimiser step")
    micro_batch_size: Free[BatchSize | None] = Field(
        default=None, description="sequences a process holds at once; null: as many as divide its share, at most 8"
    )
    sharding: Free[Literal["none", "expansion", "all"]] = Field(
        default="none",
        description="what is split over the processes: nothing, what trains, or the frozen base too: docs/processes.md",
    )
    sharded_within: Free[Literal["launch", "node"]] = Field(
        default="launch",
        description="what is split is split over all processes, or over those of each machine, which then exchange no "
        "weights, gradients only",
    )
    context_parallel: Free[int] = Field(
        default=1,
        ge=1,
        le=1024,
        description="processes that share every window, each with some of its positions: docs/processes.md",
    )
    init_from: PathText | None = Field(
        default=None,
        description="a checkpoint, or the final/, of a run of the same base and method: begin with that; several "
        "branches off one trunk take seeds of their own, or the trunk's first batches come again",
    )
    init_moments: Literal["fresh", "kept"] = Field(
        default="fresh", description="of the optimiser, with init_from a checkpoint: new ones, or those in it"
    )
    optimiser: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="muon: on the matrices, each block by itself, updates of AdamW's size; AdamW on the rest",
    )
    lr: Accepted[LearningRate] = Field(
        default=1.0e-3,
        description=f"of a matrix; left out, {_left_out('lr')}",
    )
    lr_multipliers: LrMultipliers = LrMultipliers()
    average: AverageConfig | None = Field(
        default=None, description="final/ holds the mean of the weights over several steps; null: the last ones"
    )
    lookahead: LookaheadConfig | None = Field(
        default=None, description="what trains goes back part of its way every few steps; null: never"
    )
    min_lr_ratio: Accepted[Fraction] = Field(default=0.1, description="the last rate, relative to lr")
    schedule: Accepted[_Schedule] = Field(
        default="cosine", description="after the warm-up; wsd: constant, then a decay over the last steps"
    )
    warmup_steps: Accepted[int] = Field(default=0, ge=0, description="the first steps, up to lr in a line")
    decay_steps: Accepted[int | None] = Field(
        default=None,
        ge=0,
        description="the last steps, of wsd, down to min_lr_ratio; null: a fifth of max_steps; 0: none, for a trunk "
        "that others branch off",
    )
    weight_decay: Accepted[float] = Field(
        default=0.1, ge=0.0, le=100.0, description=f"by either optimiser; left out, {_left_out('weight_decay')}"
    )
    embedding_norm: Accepted[Literal["free", "bounded"]] = Field(
        default="free",
        description="rms of E' of every token; bounded: at most what it starts with, which long runs learn more by",
    )
    decay_to_base: Accepted[bool] = Field(
        default=False,
        description="weight_decay draws what trains to the base's weights instead of 0, embeddings and gains too",
    )
    adam_beta1: Accepted[float] = Field(default=0.9, ge=0.0, lt=1.0, description="of the gradient's average")
    adam_beta2: Accepted[float] = Field(default=0.95, ge=0.0, lt=1.0, description="of its square's")
    adam_epsilon: Accepted[float] = Field(default=1.0e-8, gt=0.0, le=1.0, description="beside the root of that")
    max_grad_norm: Accepted[float] = Field(default=1.0, gt=0.0, description="a larger gradient is scaled down to it")
    mixed_precision: Accepted[MixedPrecision] = Field(
        default="no", description="autocast; fp16, for GPUs without bfloat16, scales the loss"
    )
    on_nonfinite: Accepted[Literal["stop", "skip"]] = Field(
        default="stop",
        description="a loss or gradient that is not finite, which never reaches the weights: stop, or leave it out",
    )
    max_skipped_steps: Accepted[int] = Field(
        default=10, ge=0, le=10_000_000, description="steps that `skip` may leave out in the whole run"
    )
    max_hours: Free[float | None] = Field(
        default=None,
        gt=0.0,
        le=1e6,
        description="of one invocation: when they are over, a checkpoint is written and it ends",
    )
    attention: Accepted[Literal["sdpa", "eager", "flex_attention", "flash_attention_2"] | None] = Field(
        default=None,
        description="kernels by transformers' name, null: its choice, on a GPU flex_attention for isolated documents",
    )
    compile: Accepted[bool] = Field(
        default=False, description="every layer of the decoder, by torch.compile; needs a C++ compiler on a CPU"
    )
    activation_checkpointing: Accepted[bool] = Field(default=False, description="less memory for more time")
    log_every_steps: Free[Steps] = Field(default=10, description="a record in metrics.jsonl")
    save_every_steps: Free[Steps] = Field(default=500, description="a checkpoint")
    keep_checkpoints: Free[int] = Field(default=2, ge=1, le=1_000_000, description="the newest; older ones are deleted")
    profile_steps: Free[list[Steps] | None] = Field(
        default=None,
        min_length=2,
        max_length=2,
        description="first and last: their trace by torch.profiler, of every process, into profile/",
    )
    max_forgetting: Accepted[float | None] = Field(
        default=None,
        ge=0.0,
        le=100.0,
        description="final/ holds the weights of the periodic evaluation that is best on what is to be learned, among "
        "those that lost at most so many bits/byte on any corpus to be kept; null: the last ones",
    )
    trackers: Free[list[Literal["tensorboard", "wandb", "mlflow", "trackio"]]] = Field(
        default=[], description="that get what metrics.jsonl gets; none unless named, each set up as its own docs say"
    )
    project: Free[Name] = Field(default="scale", description="in a tracker (MLflow calls it an experiment)")
    run_name: Free[Name | None] = Field(default=None, description="in a tracker; null: the name of output_dir")
    eval_every_steps: Free[Steps | None] = Field(
        default=None, description="held-out losses into metrics.jsonl; null: only `scale evaluate` evaluates"
    )
    eval_max_documents: Free[Documents] = Field(default=32, description="per corpus, at each periodic evaluation")
    eval_benchmarks_every_steps: Free[Steps | None] = Field(
        default=None, description="accuracy on evaluation.benchmarks into metrics.jsonl; null: only `scale evaluate`"
    )
    eval_max_items: Free[Documents] = Field(default=32, description="per task, each time")

    @model_validator(mode="after")
    def _keys_go_together(self) -> TrainConfig:
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        if self.global_batch_size % self.sequences_at_once(1):
            yield f"micro_batch_size {self.micro_batch_size} does not divide global_batch_size {self.global_batch_size}"
        unsharded = [recipe.key for recipe in recipes_of(self) if not recipe.is_sharded]
        if self.optimiser == "muon":  # it needs whole matrices
            unsharded.append("optimiser: muon")
        for key in unsharded if self.sharding != "none" else ():
            yield f"{key} needs sharding: none, not {self.sharding}"
        if self.profile_steps is not None and self.profile_steps[0] > self.profile_steps[1]:
            yield "profile_steps: the first step comes after the last"
        if self.lookahead is not None and self.lookahead.every_steps > self.max_steps:
            yield f"lookahead.every_steps {self.lookahead.every_steps:,} is beyond max_steps {self.max_steps:,}"
        if self.max_steps * self.global_batch_size > _MAX_SEQUENCES:
            yield f"max_steps x global_batch_size is more than {_MAX_SEQUENCES:,} sequences"
        warmup_steps, decay_steps = self.warmup_steps, self.decay_steps or 0
        # The warm-up alone may be longer, as with every schedule: a short trial of a long config.
        if self.schedule == "wsd" and warmup_steps + decay_steps > max(self.max_steps, warmup_steps):
            given = f"warmup_steps {warmup_steps:,} and decay_steps {decay_steps:,}"
            yield f"{given} are together more than max_steps {self.max_steps:,}"

    @property
    def observes(self) -> bool:
        """Whether anything is measured on the way."""
        return self.eval_every_steps is not None or self.eval_benchmarks_every_steps is not None

    @property
    def averaged_steps(self) -> int:
        """What `average.steps` is or, left out, stands for."""
        given = None if self.average is None else self.average.steps
        return given or math.ceil(_SHARE_AVERAGED * self.max_steps)

    def sharing_windows(self, num_processes: int) -> int:
        """Return how many of some processes share a window; one alone has nobody to share it with."""
        return min(self.context_parallel, num_processes)

    def sequences_at_once(self, num_processes: int) -> int:
        """Return what `micro_batch_size` is or, left out, stands for among some processes that share a step."""
        share = self.global_batch_size // (num_processes // self.sharing_windows(num_processes))
        return self.micro_batch_size or max(size for size in range(1, _MICRO_BATCH_SIZE + 1) if share % size == 0)
