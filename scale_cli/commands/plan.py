"""The verb `scale plan`: what a run costs, computed from the base's config.json, texts and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch
from tokenizers import Tokenizer

from scale_cli import processes
from scale_cli.config.idle import idle_settings
from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.data.corpora import every_source
from scale_cli.data.files import check_source
from scale_cli.errors import ConfigError, CorpusError, MissingExtraError
from scale_cli.methods import METHODS
from scale_cli.methods.widened import added_sizes, far_from_asked
from scale_cli.planning.beginnings import held_out_texts, tokenizer_at_hand
from scale_cli.planning.device import Device, measure_device
from scale_cli.planning.estimate import Estimate, estimate
from scale_cli.planning.memory import Memory, cost_of_run, memory_of
from scale_cli.planning.step import StepCost
from scale_cli.report import Table, duration, quantity, render
from scale_cli.runs.early import check_sizes, check_tasks
from scale_cli.runs.precision import slow_while_training, with_precision
from scale_cli.terminal import progress_bar
from scale_cli.upscale.base import dtype_of_files, load_base_config

_WIDTH = 100  # of terminal lines
_LABEL = 15  # of what stands before them
# Read from every source, to count new tokens.
_BYTES_COUNTED = 1 << 20


@dataclass(frozen=True)
class Growth:
    """The effect of new tokens on a run."""

    num_new: int
    note: str  # on the base's tokenizer; empty if there is none
    # Of each training source: its tokens before and after; empty if no tokens are learned yet.
    sources: list[dict[str, Any]]
    # Tokens without them for each token of the run, on the same text; 1 if none are learned yet.
    tokens_without: float


@dataclass(frozen=True)
class MethodPlan:
    """The cost of one method."""

    variant: str
    num_frozen: int
    num_trainable: int
    num_served: int  # of the plain export
    num_tokens: int  # of the run's text: more without new tokens
    flops_per_token: float
    memory: Memory  # of one process
    time_s: float  # of training, on such a device


@dataclass(frozen=True)
class Plan:
    """The cost of the config's method, and of every other one if asked for."""

    config: RunConfig
    base_config: Any
    num_processes: int  # that share a step
    methods: list[MethodPlan]  # the config's first
    refused: dict[str, str]  # methods that this base does not allow, and why
    export_dtype: str
    estimate: Estimate  # of the whole run
    disk_bytes: int  # of the finished run
    warnings: list[str]  # settings and sources that are likely mistakes
    new_tokens: Growth | None

    def lines(self) -> list[str]:
        """Return lines of at most 100 columns: the run, its work and memory, and footnotes."""
        own = self.methods[0]
        real_ratio = 0.0
        if self.config.method.definition.widens:
            added = added_sizes(self.base_config, self.config.method.expansion)
            real_ratio = added.num_key_value_heads / self.base_config.num_key_value_heads
        text = render(
            "plan.txt.j2",
            **vars(self),
            own=own,
            served_bytes=own.num_served * getattr(torch, self.export_dtype).itemsize,
            real_ratio=real_ratio,
            quantity=quantity,
            tables="\n".join(self._tables()),
        )
        lines = []
        for line in text.splitlines():
            indent = " " * _LABEL if line[_LABEL - 1 : _LABEL] == " " else ""
            lines += wrap(line, _WIDTH, subsequent_indent=indent) or [""]
        return lines

    def to_json(self) -> dict[str, Any]:
        return {
            name: of for name, of in vars(self).items() if name not in ("config", "base_config")
        }

    def _tables(self) -> list[str]:
        """Return the lines of two tables, a row a method: its work, and the memory of a process."""
        work = []
        memory = []
        for method in self.methods:
            name = f"{'>' if method is self.methods[0] else ' '} {method.variant:{_LABEL - 2}}"
            counts = [
                method.num_frozen,
                method.num_trainable,
                method.flops_per_token,
                method.flops_per_token * method.num_tokens,
            ]
            work.append([name, *map(quantity, counts), duration(method.time_s)])
            held = method.memory
            parts = (*vars(held).values(), held.total, held.checkpoint)
            memory.append([name, *(quantity(part, "B") for part in parts)])
        of_work = ["", "frozen", "trainable", "FLOPs/token", "run's FLOPs", "time"]
        of_memory = ["memory", "frozen", "weights", "gradients", "moments", "saved", "head"]
        of_memory += ["process", "in all", "checkpoint"]
        return [
            *Table(of_work, work, "lrrrrr").lines(),
            "",
            *Table(of_memory, memory, "lrrrrrrrrr").lines(),
        ]


def plan(
    config: RunConfig, flops: float | None, num_processes: int, *, compared: bool = False
) -> Plan:
    """Plan a run, and with `compared` every other method beside it; no weights are read.

    `flops` is the speed of a device, taken for a GPU; None: that of the device at hand is measured.
    """
    base_config = load_base_config(config.model)
    num_positions = base_config.max_position_embeddings
    check_sizes(config, num_positions, num_processes)
    growth = None
    tokenizer = None
    if config.method.vocabulary is not None:
        growth, tokenizer = growth_of(config)
    else:
        tokenizer = tokenizer_at_hand(config.model)
    warnings = [*_absent(config), *idle_settings(config)]
    if config.method.definition.widens:
        warnings += far_from_asked(base_config, config.method.expansion)

    export_dtype = config.export.dtype or dtype_of_files(config.model)
    config = with_precision(config, in_bfloat16=None if flops is None else True)
    device_type = "cuda" if flops is not None else processes.device().type
    warnings += slow_while_training(config, device_type)
    devices: dict[str, Device] = {}  # by method
    steps = []
    planned = []
    refused = {}
    for label, one in _rows(config) if compared else [(config.method.variant, config)]:
        num_new = 0 if growth is None or one.method.vocabulary is None else growth.num_new
        doing = f"counting a training step of {label}"
        try:
            with progress_bar(desc=doing, bar_format="{desc}", leave=False):
                step = cost_of_run(one, base_config, device_type, num_new)
        except (ConfigError, MissingExtraError) as error:
            if one is config:
                raise
            refused[label] = str(error)
            continue
        method = one.method.variant
        if flops is not None:
            devices[method] = Device("cuda", flops, "as stated, taken for a GPU's")
        elif method not in devices:
            devices[method] = measure_device(
                base_config, one.method, one.train.mixed_precision, one.corpus.sequence_length
            )
        steps.append(step)
        planned.append(_plan_method(label, one, step, devices[method], num_processes, growth))

    takes = estimate(
        config,
        steps[0],
        devices[config.method.variant],
        held_out_texts(config, tokenizer, num_positions),
        num_processes,
    )
    return Plan(
        config=config,
        base_config=base_config,
        num_processes=num_processes,
        methods=planned,
        refused=refused,
        export_dtype=export_dtype,
        estimate=takes,
        disk_bytes=_disk_bytes(config, planned[0], export_dtype),
        warnings=warnings,
        new_tokens=growth,
    )


def _rows(config: RunConfig) -> list[tuple[str, RunConfig]]:
    """Return a run, the same without its new tokens, and by every other method, with their names.

    Every method has the config's sizes, its own collaboration layers, and its own optimiser, unless
    the config asks for another than its method's own.
    """
    own = config.method
    rows = [(own.variant, config)]
    if own.vocabulary is not None:
        method = own.model_copy(update={"vocabulary": None})
        rows.append(("no new tokens", config.model_copy(update={"method": method})))
    sections = own.model_dump()
    sections["collaboration"]["layers"] = None
    del sections["distillation"]  # most have no base to distil from
    usual = own.definition.train_defaults.get("optimiser", "adamw")
    for other in METHODS.values():
        if other.name == own.variant or not other.trains:
            continue
        differs: dict[str, Any] = {"variant": other.name}
        if not other.takes_new_tokens:
            differs["vocabulary"] = None
        train = config.train
        if train.optimiser == usual:
            optimiser = other.train_defaults.get("optimiser", "adamw")
            train = train.model_copy(update={"optimiser": optimiser})
        method = MethodConfig.model_validate(sections | differs)
        rows.append((other.name, config.model_copy(update={"method": method, "train": train})))
    return rows


def _plan_method(
    label: str,
    config: RunConfig,
    step: StepCost,
    device: Device,
    num_processes: int,
    growth: Growth | None,
) -> MethodPlan:
    train = config.train
    length = config.corpus.sequence_length
    times = 1.0  # as many tokens of the same text
    if growth is not None and config.method.vocabulary is None:
        times = growth.tokens_without
    return MethodPlan(
        variant=label,
        num_frozen=step.num_frozen,
        num_trainable=step.num_trainable,
        num_served=step.num_served,
        num_tokens=round(times * train.max_steps * train.global_batch_size * length),
        flops_per_token=step.flops(length),
        memory=memory_of(
            step,
            config.method,
            train,
            length,
            num_processes=num_processes,
            device_type=device.type,
        ),
        time_s=times * train.max_steps * device.step_s(step, train, length, num_processes),
    )


def growth_of(config: RunConfig) -> tuple[Growth, Tokenizer]:
    """Return how new tokens change the token counts of the sources' beginnings, and the tokenizer
    that counts: the base's until they are learned.
    """
    from scale_cli.runs.opened import Run  # needs transformers, for the base's tokenizer
    from scale_cli.vocabulary.tokenizer import read_texts

    run = Run(config)
    grown = run.grown_vocabulary
    assert grown is not None
    base: Any = run.base_tokenizer.backend_tokenizer
    known: Any = run.known_tokenizer()
    if known is None:
        return Growth(grown.num_new, grown.note, [], 1.0), base
    sources = []
    tokens_without = 0.0
    for source, share in zip(config.corpus.sources, config.corpus.shares, strict=True):
        texts = list(read_texts([source], config.corpus, _BYTES_COUNTED))
        counted: dict[str, Any] = {
            "name": source.name,
            "num_bytes": sum(len(text.encode()) for text in texts),
        }
        for when, tokenizer in (("before", base), ("after", known.backend_tokenizer)):
            encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
            counted[f"num_tokens_{when}"] = sum(len(encoding.ids) for encoding in encodings)
        sources.append(counted)
        tokens_without += share * counted["num_tokens_before"] / max(counted["num_tokens_after"], 1)
    num_new = len(known) - grown.first_id
    return Growth(num_new, grown.note, sources, tokens_without), known.backend_tokenizer


def _absent(config: RunConfig) -> list[str]:
    """Return a warning for each local source and each task that is not there."""
    errors = []
    for source in every_source(config):
        if source.is_local:
            try:
                check_source(source)
            except CorpusError as error:
                errors.append(str(error))
    named = []
    for task in config.evaluation.benchmarks:
        if task.path is None:
            named.append(task.name)
        elif not Path(task.path).is_file():
            errors.append(f"{task.name}: no such file: {task.path}")
    try:
        check_tasks(named)
    except (ConfigError, MissingExtraError) as error:
        errors.append(str(error))
    return [f"{error}; the plan does without, `scale run` does not" for error in errors]


def _disk_bytes(config: RunConfig, own: MethodPlan, export_dtype: str) -> int:
    """Return the size of a finished run: its start, checkpoints, final weights and exports."""
    train = config.train
    memory = own.memory
    num_kept = 1
    if train.save_every_steps is not None:
        num_kept = min(
            train.keep_checkpoints or train.max_steps, -(-train.max_steps // train.save_every_steps)
        )
    method = config.method
    has_start = method.definition.widens or method.vocabulary is not None  # weights in `upscaled/`
    num_bytes = (1 + has_start) * memory.trainable + num_kept * memory.checkpoint
    itemsize = getattr(torch, export_dtype).itemsize
    in_two_streams = own.num_frozen + own.num_trainable
    sizes = {"plain": own.num_served * itemsize, "transformers": in_two_streams * itemsize}
    return num_bytes + sum(sizes.get(name, memory.trainable) for name in config.export.format)
