"""The verb `scale plan`: what a run and its alternatives will cost, from the base's config.json alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from textwrap import wrap
from typing import Any

import torch

from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.config.sources import TextSource
from scale_cli.data.corpora import cache_dir, every_source, idle_settings, num_readings, reading_warnings
from scale_cli.data.files import check_source
from scale_cli.data.tokens import already_tokenised, check_sample
from scale_cli.errors import BaseModelError, ConfigError, CorpusError, MissingExtraError
from scale_cli.evaluation.benchmarks import check_task_file
from scale_cli.methods import METHODS
from scale_cli.planning.counting import TokenFlops, count_flops, count_saved_tensors
from scale_cli.planning.memory import Memory, Parameters, training_memory
from scale_cli.planning.speed import Device, measured_device
from scale_cli.planning.vocabulary import Growth, growth_of
from scale_cli.report.numbers import quantity
from scale_cli.report.tables import Table
from scale_cli.upscale.base import base_without_weights, stage_folder
from scale_cli.upscale.method import NewPieces, build_model
from scale_cli.upscale.objective import attends_by_mask
from scale_cli.upscale.run import Run, check_context, check_processes

_WITHOUT = "no new tokens"  # the config's method on the same text
_WIDTH, _LABEL = 100, 15  # of the lines for the terminal, and of what stands before them


@dataclass(frozen=True)
class MethodPlan:
    """What one method costs."""

    variant: str  # its name
    chosen: bool  # whether it is the config's
    parameters: Parameters  # frozen and trainable
    flops: TokenFlops  # what training on a token computes
    num_tokens: int  # that the run's text is: more without new tokens
    flops_per_token: float  # all of it, in the run's windows
    memory: Memory  # of one process
    time_s: float  # the run's FLOPs at what the devices sustain

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` prints of it."""
        totals = {"memory_bytes": self.memory.total, "checkpoint_bytes": self.parameters.checkpoint_bytes}
        return asdict(self) | totals


@dataclass(frozen=True)
class Corpus:
    """A training source, where the cache holds it tokenised already."""

    name: str  # of the source
    num_tokens: int  # in it
    num_epochs: float  # how often the run reads each of them


@dataclass(frozen=True)
class Plan:
    """The whole of it."""

    config: RunConfig  # the resolved config
    base_config: Any  # the base's, transformers' class
    num_processes: int  # that share a step
    device: Device  # what the times are computed with
    methods: list[MethodPlan]  # the config's first
    refused: dict[str, str]  # methods that cannot be had with this base, and why
    corpora: list[Corpus | None]  # one for every source; None where it is not tokenised yet
    warnings: list[str]  # what is rarely meant
    growth: Growth | None = None  # what new tokens do; None where there are none

    @property
    def num_tokens(self) -> int:
        """Of the run."""
        return _num_tokens(self.config)

    def lines(self) -> list[str]:
        """Return the run, a table of work and one of memory, and how to read them, at most 100 columns wide."""
        return [*_heading(self), "", *_work_table(self), "", *_memory_table(self), *_footnotes(self)]

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "base": self.config.model.base,
            "max_steps": self.config.train.max_steps,
            "num_tokens": self.num_tokens,
            "num_processes": self.num_processes,
            "device": asdict(self.device),
            "corpora": [None if corpus is None else asdict(corpus) for corpus in self.corpora],
            "methods": [method.to_json() for method in self.methods],
            "new_tokens": None if self.growth is None else asdict(self.growth),
            "refused": self.refused,
            "warnings": self.warnings,
        }


def plan(config: RunConfig, flops: float | None, num_processes: int) -> Plan:
    """Plan a run, and beside it every other method, without loading or downloading a weight."""
    if stage_folder(config.model) is not None:
        raise ConfigError(f"model.base: {config.model.base} is widened already; only plain bases are planned")
    run = Run(config)
    base_config = run.base_config
    check_context(config, base_config)
    check_processes(config.train, num_processes)
    if flops is None:
        device = measured_device(base_config, config.train.mixed_precision)
    else:
        device = Device("cuda", flops, "as stated")
    refused: dict[str, str] = {}
    growth = None if config.method.vocabulary is None else growth_of(run)
    planned = [_plan_method(config, base_config, config.method, device, num_processes, growth)]
    if growth is not None:
        without = config.method.model_copy(update={"vocabulary": None})
        of_same_text = _plan_method(config, base_config, without, device, num_processes, growth)
        planned.append(replace(of_same_text, variant=_WITHOUT))
    for method in methods_beside(config.method):
        try:
            planned.append(_plan_method(config, base_config, method, device, num_processes, growth))
        except (ConfigError, MissingExtraError) as error:
            # The config does not ask for it: the others are planned all the same.
            refused[method.variant] = str(error)
    corpora = tokenised_corpora(run)
    warnings = [*_absent(run), *idle_settings(config)]
    for source, corpus in zip(config.corpus.sources, corpora, strict=True):
        warnings += [] if corpus is None else reading_warnings(config, source, corpus.num_tokens)
    return Plan(config, base_config, num_processes, device, planned, refused, corpora, warnings, growth)


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
    growth: Growth | None,
) -> MethodPlan:
    length, num_tokens, train = config.corpus.sequence_length, _num_tokens(config), config.train
    if not method.trains_base_weights:
        train = train.model_copy(update={"decay_to_base": False})  # as it would be asked to be
    vocab_size, new = base_config.vocab_size, None
    if growth is not None and method.vocabulary is not None:
        vocab_size, new = growth.vocab_size, NewPieces.unknown(growth.num_new)
    elif growth is not None:
        num_tokens = round(num_tokens * growth.tokens_without)
    with torch.device("meta"):
        model = build_model(
            base_without_weights(copy.deepcopy(base_config), config.model.dtype), method, config.seed, new
        )
    parameters = Parameters.of(model, train)
    flops = count_flops(model, length)
    memory = training_memory(
        parameters,
        count_saved_tensors(model, train.mixed_precision, masked=attends_by_mask(config, device.type)),
        train,
        sequence_length=length,
        vocab_size=vocab_size,
        num_processes=num_processes,
        device_type=device.type,
        distils=method.distils,
    )
    beside = method.definition.work_beside(
        method.settings, train.max_steps, train.global_batch_size, len(config.corpus.replay)
    )
    per_token = flops.total(length) * (1 + beside)
    time_s = num_tokens * per_token / (device.flops_per_s * num_processes)
    return MethodPlan(method.variant, method == config.method, parameters, flops, num_tokens, per_token, memory, time_s)


def _num_tokens(config: RunConfig) -> int:
    return config.train.max_steps * config.train.global_batch_size * config.corpus.sequence_length


def tokenised_corpora(run: Run) -> list[Corpus | None]:
    """Return how often the run reads each training source; None for those that the cache does not hold yet."""
    config = run.config
    folder, sources = cache_dir(config), config.corpus.sources
    if not any(any(folder.glob(f"{source.name}-*")) for source in sources):
        return [None] * len(sources)  # then neither a tokenizer nor a look at the texts is needed
    try:
        tokenizer = run.known_tokenizer()
        if tokenizer is None:
            return [None] * len(sources)
        opened = [already_tokenised(source, tokenizer, folder, config.corpus) for source in sources]
    except (BaseModelError, CorpusError):
        return [None] * len(sources)
    return [
        None if corpus is None else Corpus(source.name, len(corpus.ids), num_readings(config, source, len(corpus.ids)))
        for source, corpus in zip(sources, opened, strict=True)
    ]


def _absent(run: Run) -> list[str]:
    """Return a line for every source and benchmark of which a run would refuse the files or the first text."""
    config = run.config
    checks: list[Callable[[], object]] = [
        partial(check_task_file, benchmark) for benchmark in config.evaluation.benchmarks
    ]
    for source in every_source(config):
        if source.dataset is None and not any("://" in path for path in source.paths):  # nobody else is asked
            checks.append(partial(_check_text, source, run))
    lines = []
    for check in checks:
        try:
            check()
        except CorpusError as error:
            lines.append(f"{error}; the plan needs no text, but `scale run` does")
    return lines


def _check_text(source: TextSource, run: Run) -> None:
    check_source(source)
    with suppress(BaseModelError):  # a plan needs no tokenizer
        check_sample(source, run.base_tokenizer, run.config.corpus)


def _heading(plan: Plan) -> list[str]:
    base, train = plan.base_config, plan.config.train
    length, processes = plan.config.corpus.sequence_length, plan.num_processes
    named = plan.config.model
    lines = [
        ("base", f"{named.base} ({named.dtype})"),
        (
            "sizes",
            f"{base.num_hidden_layers} layers, hidden {base.hidden_size:,}, MLP {base.intermediate_size:,}, "
            f"heads {base.num_attention_heads} over {base.num_key_value_heads}, vocabulary {base.vocab_size:,}",
        ),
        (
            "run",
            f"{train.max_steps:,} steps x {train.global_batch_size:,} windows x {length:,} tokens "
            f"= {plan.num_tokens:,} tokens",
        ),
    ]
    for source, corpus in zip(plan.config.corpus.sources, plan.corpora, strict=True):
        size = "not tokenised yet, so its epochs are not known"
        if corpus is not None:
            size = f"{corpus.num_tokens:,} tokens, read {corpus.num_epochs:,.2f} times"
        role = " (replay)" if source.role == "replay" else ""
        lines.append(("corpus", f"{source.name}{role}: {size}"))
    lines += [] if plan.growth is None else _growth_lines(plan.growth)
    lines.append(("device", f"{quantity(plan.device.flops_per_s, 'FLOP/s')} {plan.device.origin}"))
    if processes > 1:
        lines.append(("processes", f"{processes:,}, each on a device of its own"))
    for warning in plan.warnings:
        first, *rest = wrap(warning, _WIDTH - _LABEL)
        lines += [("warning", first), *(("", line) for line in rest)]
    return [f"{label:{_LABEL}}{text}" for label, text in lines]


def _growth_lines(growth: Growth) -> list[tuple[str, str]]:
    """Return of every source its tokens before and after, and of the run's text how many it would be without."""
    origin = "" if growth.is_learned else "; here from the beginnings of the sources, so about:"
    lines = [("new tokens", f"{growth.num_new:,}, {growth.vocab_size:,} in all{origin}")]
    for source in growth.sources:
        before, after = source.num_tokens_before, source.num_tokens_after
        per_token = " -> ".join(f"{source.num_bytes / max(count, 1):.2f}" for count in (before, after))
        of_text = f"{source.name}: {source.num_bytes:,} bytes are {before:,} -> {after:,} tokens"
        lines.append(("", f"{of_text}, {per_token} bytes each"))
    return lines


def _work_table(plan: Plan) -> list[str]:
    titles = ["", "frozen", "trainable", "FLOPs/token", "run's FLOPs", "time"]
    rows = []
    for method in plan.methods:
        sizes, flops = method.parameters, method.flops_per_token
        counts = (sizes.num_frozen, sizes.num_trainable, flops, flops * method.num_tokens)
        rows.append([_name(method), *map(quantity, counts), _duration(method.time_s)])
    return Table(titles, rows, "lrrrrr").lines()


def _memory_table(plan: Plan) -> list[str]:
    titles = ["memory", "frozen", "weights", "gradients", "moments", "saved", "head", "in all", "checkpoint"]
    rows = []
    for method in plan.methods:
        held = method.memory
        kinds = (held.frozen, held.trainable, held.gradients, held.moments, held.saved, held.head, held.total)
        sizes = (*kinds, method.parameters.checkpoint_bytes)
        rows.append([_name(method), *(quantity(size, "B") for size in sizes)])
    return Table(titles, rows, "lrrrrrrrr").lines()


def _footnotes(plan: Plan) -> list[str]:
    train = plan.config.train
    at_once = train.sequences_at_once(plan.num_processes)
    lines = [f"{variant:{_LABEL}}cannot be had: {reason}" for variant, reason in plan.refused.items()]
    if plan.growth is not None:
        lines += [
            "",
            f"{_WITHOUT}, and baselines that take none: the same text in {plan.growth.tokens_without:.2f} times the "
            "tokens.",
        ]
    precision = "bf16 autocast" if train.mixed_precision == "bf16" else "no autocast"
    lines += [
        "",
        "> is the config's method; the others at the config's sizes, collaborating where they do by default.",
        "FLOPs/token: the products of the real model, counted on tensors without numbers, attention causal.",
        "The time is theirs, without evaluation and checkpoints.",
        f"memory: of one process; saved: for the backward pass of a micro-batch of {at_once:,}, {precision};",
        f"head: logits at once, on {plan.device.type}; checkpoint: what trains and its moments, of which host memory",
        "holds a copy while one is written.",
    ]
    return lines


def _name(method: MethodPlan) -> str:
    return f"{'>' if method.chosen else ' '} {method.variant:{_LABEL - 2}}"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:,.1f} s"
