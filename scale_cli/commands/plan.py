"""The verb `scale plan`: the cost of a run and its alternatives, from the base's config.json alone."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
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
from scale_cli.planning import (
    Device,
    Memory,
    Parameters,
    TokenFlops,
    count_flops,
    measure_device,
    memory_of_run,
)
from scale_cli.report import Table, duration, quantity
from scale_cli.runs.opened import Run, check_context, check_processes
from scale_cli.upscale.base import base_without_weights
from scale_cli.upscale.building import NewPieces, build_model
from scale_cli.vocabulary.tokenizer import read_texts

_WITHOUT = "no new tokens"  # the row of the config's method on the same text
_WIDTH, _LABEL = 100, 15  # of terminal lines, and of the labels before them
_BYTES_COUNTED, _BYTES_LEARNED = (
    1 << 20,
    1 << 24,
)  # read from every source, to count and to learn new tokens


@dataclass(frozen=True)
class SourceGrowth:
    """The size of a training source's beginning, in old and in new tokens."""

    name: str
    num_bytes: int
    num_tokens_before: int
    num_tokens_after: int


@dataclass(frozen=True)
class Growth:
    """The effect of new tokens on a run."""

    num_new: int
    is_learned: bool  # if not, they are estimated from the beginnings of the sources
    sources: list[SourceGrowth]
    tokens_without: float  # tokens without them for each token of the run, on the same text


@dataclass(frozen=True)
class MethodPlan:
    """The cost of one method."""

    variant: str  # its name
    parameters: Parameters
    flops: TokenFlops  # of training on a token
    num_tokens: int  # of the run's text: more without new tokens
    flops_per_token: float  # in all, in the run's windows
    memory: Memory  # of one process
    time_s: float  # the run's FLOPs at the speed that the devices sustain


@dataclass(frozen=True)
class Plan:
    """The cost of the config's method, and of every other one."""

    config: RunConfig
    base_config: Any  # transformers' class
    num_processes: int  # that share a step
    device: Device  # the times are for its speed
    methods: list[MethodPlan]  # the config's first
    refused: dict[str, str]  # methods that this base does not allow, and why
    warnings: list[str]  # settings and sources that are likely mistakes
    new_tokens: Growth | None  # None if there are none

    def lines(self) -> list[str]:
        """Return lines of at most 100 columns: the run, tables of work and of memory, and footnotes."""
        return [*_heading(self), "", *_tables(self), *_footnotes(self)]

    def to_json(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("config", "base_config")
        }


def plan(config: RunConfig, flops: float | None, num_processes: int) -> Plan:
    """Plan a run and every other method, without loading or downloading weights."""
    run = Run(config)
    base_config, method = run.base_config, config.method
    check_context(config, base_config)
    check_processes(config.train, num_processes)
    device = Device("cuda", flops or 0.0, "as stated")
    if flops is None:
        device = measure_device(base_config, config.model.dtype, config.train.mixed_precision)
    growth = None if method.vocabulary is None else growth_of(run)
    plan_of = partial(_plan_method, config, base_config, device, num_processes, growth)
    planned, refused = [plan_of(method)], dict[str, str]()
    if growth is not None:
        planned.append(
            replace(plan_of(method.model_copy(update={"vocabulary": None})), variant=_WITHOUT)
        )
    for other in methods_beside(method):
        try:
            planned.append(plan_of(other))
        except (ConfigError, MissingExtraError) as error:  # the config does not ask for it
            refused[other.variant] = str(error)
    warnings = [*_absent(run), *idle_settings(config)]
    return Plan(config, base_config, num_processes, device, planned, refused, warnings, growth)


def methods_beside(method: MethodConfig) -> list[MethodConfig]:
    """Return every other method at the config's sizes, with its default collaboration layers."""
    sections = method.model_dump()
    sections["collaboration"]["layers"] = None
    del sections["distillation"]  # most have no base to distil from
    vocabulary = sections.pop("vocabulary")
    return [
        MethodConfig.model_validate(
            {
                **sections,
                "variant": name,
                "vocabulary": vocabulary if other.takes_new_tokens else None,
            }
        )
        for name, other in METHODS.items()
        if name != method.variant
    ]


def _plan_method(
    config: RunConfig,
    base_config: Any,
    device: Device,
    num_processes: int,
    growth: Growth | None,
    method: MethodConfig,
) -> MethodPlan:
    train, length, new = config.train, config.corpus.sequence_length, None
    num_tokens = train.max_steps * train.global_batch_size * length
    if growth is not None and method.vocabulary is not None:
        new = NewPieces.unknown(growth.num_new)
    elif growth is not None:
        num_tokens = round(num_tokens * growth.tokens_without)
    with torch.device("meta"):
        base = base_without_weights(
            copy.deepcopy(base_config), config.model.dtype, config.model.quantisation
        )
        model = build_model(base, method, config.seed, new)
    parameters, flops = Parameters.of(model, train), count_flops(model, length)
    asked = config.model_copy(update={"method": method, "train": train})
    memory = memory_of_run(asked, num_processes, device.type, model)
    per_token = flops.total(length)
    time_s = num_tokens * per_token / (device.flops_per_s * num_processes)
    return MethodPlan(method.variant, parameters, flops, num_tokens, per_token, memory, time_s)


def growth_of(run: Run) -> Growth:
    """Return how new tokens change the token counts, measured on the beginnings of the sources."""
    config, added_tokens = run.config, run.added_tokens
    assert added_tokens is not None
    known: Any = run.known_tokenizer()
    grown: Any = added_tokens.sketched(_BYTES_LEARNED) if known is None else known.backend_tokenizer
    sources, tokens_without = [], 0.0
    for source, share in zip(config.corpus.sources, config.corpus.shares, strict=True):
        texts = list(read_texts([source], config.corpus, _BYTES_COUNTED))
        before, after = (
            sum(
                len(encoded.ids)
                for encoded in tokenizer.encode_batch(texts, add_special_tokens=False)
            )
            for tokenizer in (run.base_tokenizer.backend_tokenizer, grown)
        )
        sources.append(
            SourceGrowth(source.name, sum(len(text.encode()) for text in texts), before, after)
        )
        tokens_without += share * before / max(after, 1)
    num_new = added_tokens.num_new if known is None else len(known) - added_tokens.first_id
    return Growth(num_new, known is not None, sources, tokens_without)


def _absent(run: Run) -> list[str]:
    """Return a warning for each source and benchmark whose files or first text a run would reject."""
    errors: list[CorpusError] = []
    sources: list[BenchmarkSource | TextSource] = [
        *run.config.evaluation.benchmarks,
        *every_source(run.config),
    ]
    for asked in sources:
        try:
            if isinstance(asked, BenchmarkSource):
                check_task_file(asked)
            elif asked.dataset is None and not any(
                "://" in path for path in asked.paths
            ):  # no request is sent
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
        f"{plan.config.corpus.sequence_length:,} tokens = {plan.methods[0].num_tokens:,} tokens",
        "device": f"{quantity(plan.device.flops_per_s, 'FLOP/s')} {plan.device.origin}",
    }
    if plan.num_processes > 1:
        lines["processes"] = f"{plan.num_processes:,}, each on a device of its own"
    growth = plan.new_tokens
    if growth is not None:
        origin = "" if growth.is_learned else "; estimated from the beginnings of the sources:"
        lines["new tokens"] = (
            f"{growth.num_new:,}, {base.vocab_size + growth.num_new:,} in all{origin}"
        )
    told = [f"{label:{_LABEL}}{text}" for label, text in lines.items()]
    for of in [] if growth is None else growth.sources:
        counts = of.num_tokens_before, of.num_tokens_after
        tokens = " -> ".join(f"{count:,}" for count in counts)
        each = " -> ".join(f"{of.num_bytes / max(count, 1):.2f}" for count in counts)
        told.append(
            f"{'':{_LABEL}}{of.name}: {of.num_bytes:,} bytes are {tokens} tokens, {each} bytes each"
        )
    chosen, definition = plan.methods[0], plan.config.method.definition
    notes = [("warning", warning) for warning in plan.warnings]
    if advice := definition.advice(chosen.num_tokens / max(chosen.parameters.num_frozen, 1)):
        notes.insert(0, ("budget", advice))
    for label, text in notes:
        told += wrap(
            text, _WIDTH, initial_indent=f"{label:{_LABEL}}", subsequent_indent=" " * _LABEL
        )
    return told


def _tables(plan: Plan) -> list[str]:
    work, memory = [], []
    for method in plan.methods:
        name = f"{'>' if method is plan.methods[0] else ' '} {method.variant:{_LABEL - 2}}"
        sizes, per_token, held = method.parameters, method.flops_per_token, method.memory
        counts = (sizes.num_frozen, sizes.num_trainable, per_token, per_token * method.num_tokens)
        work.append([name, *map(quantity, counts), duration(method.time_s)])
        memory.append(
            [
                name,
                *(
                    quantity(of, "B")
                    for of in (*vars(held).values(), held.total, sizes.checkpoint_bytes)
                ),
            ]
        )
    work_titles = ["", "frozen", "trainable", "FLOPs/token", "run's FLOPs", "time"]
    memory_titles = [
        "memory",
        "frozen",
        "weights",
        "gradients",
        "moments",
        "saved",
        "head",
        "in all",
        "checkpoint",
    ]
    return [
        *Table(work_titles, work, "lrrrrr").lines(),
        "",
        *Table(memory_titles, memory, "lrrrrrrrr").lines(),
    ]


def _footnotes(plan: Plan) -> list[str]:
    train = plan.config.train
    lines = [
        f"{variant:{_LABEL}}not possible: {reason}" for variant, reason in plan.refused.items()
    ]
    if plan.new_tokens is not None:
        tokens = f"the same text is {plan.new_tokens.tokens_without:.2f} times as many tokens."
        lines += ["", f"{_WITHOUT}, and methods that cannot add them: {tokens}"]
    return [
        *lines,
        "",
        "> marks the config's method; the others have the config's sizes. The time is that of the FLOPs only,",
        "without evaluation and checkpoints. memory: of one process; saved: for the backward pass of a",
        f"micro-batch of {train.sequences_at_once(plan.num_processes):,}, {train.mixed_precision} autocast; "
        f"head: logits held at once, on {plan.device.type}.",
    ]
