"""A plan as lines for the terminal, at most 100 columns wide."""

from __future__ import annotations

from textwrap import wrap

from scale_cli.planning.device import Device
from scale_cli.planning.run import MethodPlan, Plan
from scale_cli.report.numbers import quantity
from scale_cli.report.tables import Table

_WIDTH, _LABEL = 100, 15


def plan_lines(plan: Plan) -> list[str]:
    """Return the run, a table of work and one of memory, and how to read them."""
    return [*_heading(plan), "", *_work_table(plan), "", *_memory_table(plan), *_footnotes(plan)]


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
    lines.append(("device", _device_line(plan.device)))
    if processes > 1:
        lines.append(("processes", f"{processes:,}, each on a device of its own"))
    for warning in plan.warnings:
        first, *rest = wrap(warning, _WIDTH - _LABEL)
        lines += [("warning", first), *(("", line) for line in rest)]
    return [f"{label:{_LABEL}}{text}" for label, text in lines]


def _device_line(device: Device) -> str:
    rate = f"{quantity(device.flops_per_s, 'FLOP/s')} {device.origin}"
    return rate if device.utilisation == 1.0 else f"{rate}; {device.utilisation:.0%} of it assumed"


def _work_table(plan: Plan) -> list[str]:
    titles = ["", "frozen", "trainable", "FLOPs/token", "counted", "run's FLOPs", "time"]
    rows = []
    for method in plan.methods:
        ideal, sizes = method.ideal_flops.total, method.parameters
        counts = (sizes.num_frozen, sizes.num_trainable, ideal, method.counted_flops_per_token, ideal * plan.num_tokens)
        rows.append([_name(method), *map(quantity, counts), _duration(method.time_s)])
    return Table(titles, rows, "lrrrrrr").lines()


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
    precision = "bf16 autocast" if train.mixed_precision == "bf16" else "no autocast"
    lines += [
        "",
        "> is the config's method; the others at the config's sizes, collaborating where they do by default.",
        "FLOPs/token: every product that training needs, once, attention causal; counted: those of the real",
        "model on tensors without numbers, attention over every key. The time is that of the former, without",
        "evaluation and checkpoints.",
        f"memory: of one process; saved: for the backward pass of a micro-batch of {at_once:,}, {precision};",
        f"head: logits at once, on {plan.device.type}; checkpoint: what trains and its moments.",
    ]
    return lines


def _name(method: MethodPlan) -> str:
    return f"{'>' if method.chosen else ' '} {method.variant:{_LABEL - 2}}"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:,.1f} s"
