"""The verb `scale plan`: what a run and its alternatives will cost, from the base's config.json alone."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

import torch

from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.config.sources import BenchmarkSource, TextSource
from scale_cli.data.corpora import check_sample, every_source, idle_settings
from scale_cli.data.files import check_source
from scale_cli.errors import BaseModelError, ConfigError, CorpusError, MissingExtraError
from scale_cli.evaluation.benchmarks import check_task_file
from scale_cli.methods import METHODS
from scale_cli.planning import Device, Memory, Parameters, TokenFlops, count_flops, measure_device, memory_of_run
from scale_cli.report import Table, duration, quantity
from scale_cli.upscale.base import base_without_weights, stage_folder
from scale_cli.upscale.method import NewPieces, build_model
from scale_cli.upscale.run import Run, check_context, check_processes
from scale_cli.vocabulary.tokenizer import num_added

_WIDTH, _LABEL = 100, 15  # of the lines for the terminal, and of what stands before them


@dataclass(frozen=True)
class MethodPlan:
    """What one method costs."""

    variant: str  # its name
    chosen: bool  # whether it is the config's
    parameters: Parameters
    flops: TokenFlops  # what training on a token computes
    flops_per_token: float  # all of it, in the run's windows
    memory: Memory  # of one process
    memory_bytes: int  # all of it
    checkpoint_bytes: int
    time_s: float  # the run's FLOPs at what the devices sustain


@dataclass(frozen=True)
class Plan:
    """What the config's method costs, and every other one."""

    config: RunConfig
    base_config: Any  # transformers' class
    num_tokens: int  # of the run
    num_processes: int  # that share a step
    device: Device  # what the times are computed with
    methods: list[MethodPlan]  # the config's first
    refused: dict[str, str]  # methods that cannot be had with this base, and why
    warnings: list[str]  # what is rarely meant
    num_new_tokens: int

    def lines(self) -> list[str]:
        """Return the run, a table of work and one of memory, and how to read them, at most 100 columns wide."""
        return [*_heading(self), "", *_tables(self), *_footnotes(self)]

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("config", "base_config")}


def plan(config: RunConfig, flops: float | None, num_processes: int) -> Plan:
    """Plan a run, and beside it every other method, without loading or downloading a weight."""
    if stage_folder(config.model) is not None:
        raise ConfigError(f"model.base: {config.model.base} is widened already; only plain bases are planned")
    run = Run(config)
    base_config, method = run.base_config, config.method
    check_context(config, base_config)
    check_processes(config.train, num_processes)
    device = Device("cuda", flops or 0.0, "as stated")
    if flops is None:
        device = measure_device(base_config, config.model.dtype, config.train.mixed_precision)
    num_tokens = config.train.max_steps * config.train.global_batch_size * config.corpus.sequence_length
    num_new, planned, refused = _num_new_tokens(run), list[MethodPlan](), dict[str, str]()
    for each in (method, *methods_beside(method)):
        try:
            planned.append(_plan_method(config, base_config, each, device, num_processes, num_new))
        except (ConfigError, MissingExtraError) as error:
            if each is method:
                raise
            refused[each.variant] = str(error)  # the config does not ask for it
    warnings = [*_absent(run), *idle_settings(config)]
    return Plan(config, base_config, num_tokens, num_processes, device, planned, refused, warnings, num_new)


def _num_new_tokens(run: Run) -> int:
    """Return how many tokens the run adds to the base's: those of a folder, or as many as are learned."""
    if (extension := run.extension) is None:
        return 0
    if extension.vocabulary.folder is not None:
        return len(run.tokenizer) - extension.first_id
    return num_added(extension.first_id, extension.vocabulary)


def methods_beside(method: MethodConfig) -> list[MethodConfig]:
    """Return every other variant at the config's sizes, collaborating where it does by default."""
    sections = method.model_dump()
    sections["collaboration"]["layers"] = None
    del sections["distillation"]  # most have no base to distil from
    vocabulary = sections.pop("vocabulary")
    return [
        MethodConfig.model_validate(
            {**sections, "variant": name, "vocabulary": vocabulary if other.takes_new_tokens else None}
        )
        for name, other in METHODS.items()
        if name != method.variant
    ]


def _plan_method(
    config: RunConfig,
    base_config: Any,
    method: MethodConfig,
    device: Device,
    num_processes: int,
    num_new: int,
) -> MethodPlan:
    train, length = config.train, config.corpus.sequence_length
    num_tokens = train.max_steps * train.global_batch_size * length
    new = None if method.vocabulary is None else NewPieces.unknown(num_new)
    if not method.trains_base_weights:
        train = train.model_copy(update={"decay_to_base": False})  # as it would be asked to be
    with torch.device("meta"):
        base = base_without_weights(copy.deepcopy(base_config), config.model.dtype, config.model.quantisation)
        model = build_model(base, method, config.seed, new)
    parameters, flops = Parameters.of(model, train), count_flops(model, length)
    asked = config.model_copy(update={"method": method, "train": train})
    memory = memory_of_run(asked, num_processes, device.type, model)
    beside = method.definition.work_beside(
        method.settings, train.max_steps, train.global_batch_size, len(config.corpus.replay)
    )
    per_token = flops.total(length) * (1 + beside)
    return MethodPlan(
        method.variant,
        method == config.method,
        parameters,
        flops,
        per_token,
        memory,
        memory.total,
        parameters.checkpoint_bytes,
        num_tokens * per_token / (device.flops_per_s * num_processes),
    )


def _absent(run: Run) -> list[str]:
    """Return a line for every source and benchmark of which a run would refuse the files or the first text."""
    errors: list[CorpusError] = []
    sources: list[BenchmarkSource | TextSource] = [*run.config.evaluation.benchmarks, *every_source(run.config)]
    for asked in sources:
        try:
            if isinstance(asked, BenchmarkSource):
                check_task_file(asked)
            elif asked.dataset is None and not any("://" in path for path in asked.paths):  # nobody else is asked
                check_source(asked)
                with suppress(BaseModelError):  # a plan needs no tokenizer
                    check_sample(asked, run.base_tokenizer, run.config.corpus)
        except CorpusError as error:
            errors.append(error)
    return [f"{error}; the plan needs no text, but `scale run` does" for error in errors]


def _heading(plan: Plan) -> list[str]:
    base, train, model = plan.base_config, plan.config.train, plan.config.model
    lines = {
        "base": f"{model.base} ({model.held_in})",
        "sizes": f"{base.num_hidden_layers} layers, hidden {base.hidden_size:,}, MLP {base.intermediate_size:,}, "
        f"heads {base.num_attention_heads} over {base.num_key_value_heads}, vocabulary {base.vocab_size:,}",
        "run": f"{train.max_steps:,} steps x {train.global_batch_size:,} windows x "
        f"{plan.config.corpus.sequence_length:,} tokens = {plan.num_tokens:,} tokens",
        "device": f"{quantity(plan.device.flops_per_s, 'FLOP/s')} {plan.device.origin}",
    }
    if plan.num_processes > 1:
        lines["processes"] = f"{plan.num_processes:,}, each on a device of its own"
    if plan.num_new_tokens:
        lines["new tokens"] = f"{plan.num_new_tokens:,}, {base.vocab_size + plan.num_new_tokens:,} in all"
    told = [f"{label:{_LABEL}}{text}" for label, text in lines.items()]
    for warning in plan.warnings:
        told += wrap(warning, _WIDTH, initial_indent=f"{'warning':{_LABEL}}", subsequent_indent=" " * _LABEL)
    return told


def _tables(plan: Plan) -> list[str]:
    work, memory = [], []
    for method in plan.methods:
        name = f"{'>' if method.chosen else ' '} {method.variant:{_LABEL - 2}}"
        sizes, per_token, held = method.parameters, method.flops_per_token, method.memory
        counts = (sizes.num_frozen, sizes.num_trainable, per_token, per_token * plan.num_tokens)
        work.append([name, *map(quantity, counts), duration(method.time_s)])
        kinds = (held.frozen, held.trainable, held.gradients, held.moments, held.saved, held.head)
        memory.append([name, *(quantity(of, "B") for of in (*kinds, held.total, method.checkpoint_bytes))])
    work_titles = ["", "frozen", "trainable", "FLOPs/token", "run's FLOPs", "time"]
    memory_titles = ["memory", "frozen", "weights", "gradients", "moments", "saved", "head", "in all", "checkpoint"]
    return [*Table(work_titles, work, "lrrrrr").lines(), "", *Table(memory_titles, memory, "lrrrrrrrr").lines()]


def _footnotes(plan: Plan) -> list[str]:
    train = plan.config.train
    precision = f"{train.mixed_precision} autocast"
    return [
        *(f"{variant:{_LABEL}}cannot be had: {reason}" for variant, reason in plan.refused.items()),
        "",
        "> is the config's method; the others at the config's sizes. The time is the FLOPs alone, without",
        "evaluation and checkpoints. memory: of one process; saved: for the backward pass of a micro-batch of",
        f"{train.sequences_at_once(plan.num_processes):,}, {precision}; head: logits at once, on {plan.device.type}.",
    ]
