"""The verb `scale plan`: what a run costs, computed from the base's config.json in a second or two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

from tokenizers import Tokenizer

from scale_cli.config.idle import idle_settings
from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.config.sources import TextSource
from scale_cli.data.files import check_source
from scale_cli.errors import ConfigError, CorpusError
from scale_cli.methods import METHODS
from scale_cli.methods.widened import added_sizes
from scale_cli.planning.beginnings import held_out_texts, tokenizer_at_hand
from scale_cli.planning.device import Device, measure_device
from scale_cli.planning.estimate import Estimate, estimate, time_of_training
from scale_cli.planning.memory import Memory, memory_of_run, num_served, step_of
from scale_cli.planning.sizes import BaseSizes
from scale_cli.planning.walk import ITEMSIZES, PLANNED
from scale_cli.report import Table, duration, quantity
from scale_cli.runs.early import check_sizes
from scale_cli.runs.precision import with_precision
from scale_cli.upscale.base_files import read_config_file
from scale_cli.values import counted

_WIDTH = 100  # of terminal lines
_LABEL = 15  # of what stands before them
# Read from every source, to count new tokens and to learn them.
_BYTES_COUNTED = 1 << 20
_BYTES_LEARNED = 1 << 24


@dataclass(frozen=True)
class Growth:
    """The effect of new tokens on a run."""

    num_new: int
    note: str  # on the base's tokenizer; empty if there is none
    is_learned: bool  # if not, they are estimated from the beginnings of the sources
    sources: list[dict[str, Any]]  # of each training source: its tokens before and after
    tokens_without: float  # tokens without them for each token of the run, on the same text
    tokenizer: Tokenizer  # with them


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
    sizes: BaseSizes
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
        return [*_heading(self), "", *_tables(self), *_footnotes(self)]

    def to_json(self) -> dict[str, Any]:
        hidden = ("config", "sizes", "new_tokens")
        shown = {name: value for name, value in vars(self).items() if name not in hidden}
        if self.new_tokens is None:
            return shown | {"new_tokens": None}
        grown = {name: of for name, of in vars(self.new_tokens).items() if name != "tokenizer"}
        return shown | {"new_tokens": grown}


def plan(
    config: RunConfig, flops: float | None, num_processes: int, *, compared: bool = False
) -> Plan:
    """Plan a run, and with `compared` every other method beside it; no weights are read."""
    base = read_config_file(config.model)
    sizes = BaseSizes.of(base, config.model.base)
    check_sizes(config, sizes.max_position_embeddings, num_processes)
    growth = None if config.method.vocabulary is None else growth_of(config)
    warnings = [*_absent(config), *idle_settings(config)]

    of_files = base.get("dtype") or base.get("torch_dtype") or "float32"
    export_dtype = config.export.dtype or str(of_files)
    config = with_precision(config, in_bfloat16=None if flops is None else True)
    step_of(config, sizes)  # refuses before anything is measured
    device = _device(config, sizes, flops)
    own = _plan_method(config, sizes, device, num_processes, growth)
    planned = [own]
    refused = {}
    if compared and growth is not None:  # the same text in old tokens
        method = config.method.model_copy(update={"vocabulary": None})
        without = config.model_copy(update={"method": method})
        of_old = _plan_method(without, sizes, device, num_processes, growth)
        planned.append(replace(of_old, variant="no new tokens"))
    for method in _methods_beside(config.method) if compared else ():
        train = config.train
        if train.optimiser == _optimiser(config.method):  # not another that was asked for
            train = train.model_copy(update={"optimiser": _optimiser(method)})
        other = config.model_copy(update={"method": method, "train": train})
        try:
            step_of(other, sizes)
            of_other = _device(other, sizes, flops)
            planned.append(_plan_method(other, sizes, of_other, num_processes, growth))
        except ConfigError as error:
            refused[method.variant] = str(error)

    tokenizer = tokenizer_at_hand(config.model) if growth is None else growth.tokenizer
    takes = estimate(
        config,
        sizes,
        device,
        held_out_texts(config, tokenizer),
        num_processes=num_processes,
        num_new=0 if growth is None else growth.num_new,
    )
    return Plan(
        config=config,
        sizes=sizes,
        num_processes=num_processes,
        methods=planned,
        refused=refused,
        export_dtype=export_dtype,
        estimate=takes,
        disk_bytes=_disk_bytes(config, own, export_dtype),
        warnings=warnings,
        new_tokens=growth,
    )


def _device(config: RunConfig, sizes: BaseSizes, flops: float | None) -> Device:
    """Return the device at hand with the speed at which it trains a run, or a GPU of a stated speed."""
    if flops is not None:
        return Device("cuda", flops, flops, "as stated, taken for a GPU's")
    precision = config.train.mixed_precision
    return measure_device(sizes, config.method, precision, config.corpus.sequence_length)


def _optimiser(method: MethodConfig) -> object:
    """Return the optimiser that trains a method unless the config names one."""
    return method.definition.left_out.get("optimiser", "adamw")


def _methods_beside(method: MethodConfig) -> list[MethodConfig]:
    """Return every other method at the config's sizes, with its default collaboration layers."""
    sections = method.model_dump()
    sections["collaboration"]["layers"] = None
    del sections["distillation"]  # most have no base to distil from
    vocabulary = sections.pop("vocabulary")
    return [
        MethodConfig.model_validate(
            sections
            | {
                "variant": name,
                "vocabulary": vocabulary if METHODS[name].takes_new_tokens else None,
            }
        )
        for name in PLANNED
        if name != method.variant
    ]


def _plan_method(
    config: RunConfig, sizes: BaseSizes, device: Device, num_processes: int, growth: Growth | None
) -> MethodPlan:
    length = config.corpus.sequence_length
    num_tokens = of_run = config.train.max_steps * config.train.global_batch_size * length
    num_new = 0
    if growth is not None and config.method.vocabulary is not None:
        num_new = growth.num_new
    elif growth is not None:
        num_tokens = round(num_tokens * growth.tokens_without)
    step = step_of(config, sizes, device.type, num_new)
    per_token = step.flops(length)
    return MethodPlan(
        variant=config.method.variant,
        num_frozen=step.num_frozen,
        num_trainable=step.num_trainable,
        num_served=num_served(sizes, config.method, num_new),
        num_tokens=num_tokens,
        flops_per_token=per_token,
        memory=memory_of_run(config, sizes, num_processes, device.type, num_new),
        time_s=num_tokens / of_run * time_of_training(config, step, device, num_processes)[0],
    )


def growth_of(config: RunConfig) -> Growth:
    """Return how new tokens change the token counts, measured on the beginnings of the sources."""
    from scale_cli.runs.opened import Run  # needs transformers, for the base's tokenizer
    from scale_cli.vocabulary.tokenizer import read_texts

    run = Run(config)
    added_tokens = run.added_tokens
    assert added_tokens is not None
    known: Any = run.known_tokenizer()
    grown: Any = added_tokens.sketched(_BYTES_LEARNED) if known is None else known.backend_tokenizer
    sources = []
    tokens_without = 0.0
    for source, share in zip(config.corpus.sources, config.corpus.shares, strict=True):
        texts = list(read_texts([source], config.corpus, _BYTES_COUNTED))
        counted: dict[str, Any] = {
            "name": source.name,
            "num_bytes": sum(len(text.encode()) for text in texts),
        }
        for when, tokenizer in (("before", run.base_tokenizer.backend_tokenizer), ("after", grown)):
            encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
            counted[f"num_tokens_{when}"] = sum(len(encoding.ids) for encoding in encodings)
        sources.append(counted)
        tokens_without += share * counted["num_tokens_before"] / max(counted["num_tokens_after"], 1)
    num_new = added_tokens.num_new if known is None else len(known) - added_tokens.first_id
    return Growth(num_new, added_tokens.note, known is not None, sources, tokens_without, grown)


def _absent(config: RunConfig) -> list[str]:
    """Return a warning for each local source and task file that is not there."""
    errors = []
    sources: list[TextSource] = [*config.corpus.sources, *config.evaluation.perplexity]
    for source in sources:
        if source.is_local:
            try:
                check_source(source)
            except CorpusError as error:
                errors.append(str(error))
    for task in config.evaluation.benchmarks:
        if task.path is not None and not Path(task.path).is_file():
            errors.append(f"{task.name}: no such file: {task.path}")
    return [f"{error}; the plan needs no text, but `scale run` does" for error in errors]


def _disk_bytes(config: RunConfig, own: MethodPlan, export_dtype: str) -> int:
    """Return the size of a finished run: its start, checkpoints, final weights and exports."""
    train = config.train
    memory = own.memory
    num_kept = 1
    if train.save_every_steps is not None:
        num_kept = min(
            train.keep_checkpoints or train.max_steps, -(-train.max_steps // train.save_every_steps)
        )
    num_bytes = 2 * memory.trainable + num_kept * memory.checkpoint
    itemsize = ITEMSIZES.get(export_dtype, 4)
    sizes = {"llama": own.num_served * itemsize, "transformers": memory.frozen + memory.trainable}
    return num_bytes + sum(sizes.get(name, memory.trainable) for name in config.export.format)


def _heading(plan: Plan) -> list[str]:
    config = plan.config
    train = config.train
    sizes = plan.sizes
    own = plan.methods[0]
    num_bytes = own.num_served * ITEMSIZES.get(plan.export_dtype, 4)
    ratio = ""
    if config.method.definition.widens:
        asked = config.method.expansion
        real = added_sizes(sizes, asked).num_key_value_heads / sizes.num_key_value_heads
        ratio = f"; ratio {asked.ratio:g} is {real:.3g} in whole heads"
    rows = [
        ("base", f"{config.model.base} ({config.model.held_in})"),
        (
            "sizes",
            f"{counted(sizes.num_hidden_layers, 'layer')}, hidden {sizes.hidden_size:,}, MLP "
            f"{sizes.intermediate_size:,}, heads {sizes.num_attention_heads} over "
            f"{sizes.num_key_value_heads}, vocabulary {sizes.vocab_size:,}",
        ),
        (
            "run",
            f"{counted(train.max_steps, 'step')} x {counted(train.global_batch_size, 'window')} x "
            f"{config.corpus.sequence_length:,} tokens = {own.num_tokens:,} tokens",
        ),
        (
            "served",
            f"{quantity(own.num_served)} parameters as a plain model, {quantity(num_bytes, 'B')} "
            f"in {plan.export_dtype}{ratio}",
        ),
        ("time", plan.estimate.in_words()),
        (
            "disk",
            f"{quantity(plan.disk_bytes, 'B')} when it is finished: checkpoints, weights, exports",
        ),
    ]
    if plan.num_processes > 1:
        rows.append(("processes", f"{plan.num_processes:,}, each on a device of its own"))
    if (growth := plan.new_tokens) is not None:
        origin = "" if growth.is_learned else "; estimated from the beginnings of the sources:"
        in_all = sizes.vocab_size + growth.num_new
        rows.append(("new tokens", f"{growth.num_new:,}, {in_all:,} in all{origin}"))
        for of in growth.sources:
            before, after = of["num_tokens_before"], of["num_tokens_after"]
            each = [f"{of['num_bytes'] / max(number, 1):.2f}" for number in (before, after)]
            text = f"{of['num_bytes']:,} bytes are {before:,} -> {after:,} tokens"
            rows.append(("", f"{of['name']}: {text}, {' -> '.join(each)} bytes each"))
        rows.append(("note", growth.note))
    advice = config.method.definition.advice
    rows.append(("budget", advice.format(own.num_tokens / max(own.num_frozen, 1))))
    rows += [("warning", warning) for warning in plan.warnings]
    lines = []
    for label, text in rows:  # of no text there is no line
        first = f"{label:{_LABEL}}"
        lines += wrap(text, _WIDTH, initial_indent=first, subsequent_indent=" " * _LABEL)
    return lines


def _tables(plan: Plan) -> list[str]:
    work = []
    memory = []
    for method in plan.methods:
        name = f"{'>' if method is plan.methods[0] else ' '} {method.variant:{_LABEL - 2}}"
        held = method.memory
        counts = [method.num_frozen, method.num_trainable, method.flops_per_token]
        counts.append(method.flops_per_token * method.num_tokens)
        work.append([name, *map(quantity, counts), duration(method.time_s)])
        parts = (*vars(held).values(), held.total, held.checkpoint)
        memory.append([name, *(quantity(part, "B") for part in parts)])
    work_titles = ["", "frozen", "trainable", "FLOPs/token", "run's FLOPs", "time"]
    of_parts = ["frozen", "weights", "gradients", "moments", "saved", "head", "process"]
    memory_titles = ["memory", *of_parts, "in all", "checkpoint"]
    return [
        *Table(work_titles, work, "lrrrrr").lines(),
        "",
        *Table(memory_titles, memory, "lrrrrrrrrr").lines(),
    ]


def _footnotes(plan: Plan) -> list[str]:
    train = plan.config.train
    lines = [f"{variant:{_LABEL}}not possible: {why}" for variant, why in plan.refused.items()]
    if plan.new_tokens is not None and len(plan.methods) > 1:
        times = plan.new_tokens.tokens_without
        lines += [
            "",
            f"methods that cannot add tokens: the same text is {times:.2f} times as many.",
        ]
    note = (
        "Parameters, FLOPs and memory are computed from config.json; only the device's speed is "
        "measured. The table's time is that of training alone. memory: of one process; saved: for the "
        f"backward pass of a micro-batch of {train.sequences_at_once(plan.num_processes):,}, "
        f"{train.mixed_precision} autocast; head: logits held at once, on {plan.estimate.device.type}; "
        "process: on a CPU libraries, texts and the allocator's gaps."
    )
    if len(plan.methods) == 1:
        note += " --all shows every method beside this one."
    return [*lines, "", *wrap(note, _WIDTH)]
