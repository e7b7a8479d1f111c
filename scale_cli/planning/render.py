"""A plan as lines for the terminal, at most 100 columns wide."""

from __future__ import annotations

from textwrap import wrap

from scale_cli.planning.device import Device
from scale_cli.planning.run import MethodPlan, Plan

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
        told = "not tokenised yet, so its epochs are not known"
        if corpus is not None:
            told = f"{corpus.num_tokens:,} tokens, read {corpus.num_epochs:,.2f} times"
        role = " (replay)" if source.role == "replay" else ""
        lines.append(("corpus", f"{source.name}{role}: {told}"))
    lines.append(("device", _device_line(plan.device)))
    if processes > 1:
        lines.append(("processes", f"{processes:,}, each on a device of its own"))
    for warning in plan.warnings:
        first, *rest = wrap(warning, _WIDTH - _LABEL)
        lines += [("warning", first), *(("", line) for line in rest)]
    return [f"{label:{_LABEL}}{text}" for label, text in lines]


def _device_line(device: Device) -> str:
    rate = f"{_quantity(device.flops_per_s)}FLOP/s {device.origin}"
    return rate if device.utilisation == 1.0 else f"{rate}; {device.utilisation:.0%} of it assumed"


def _work_table(plan: Plan) -> list[str]:
    head = ("frozen", "trainable", "FLOPs/token", "counted", "run's FLOPs", "time")
    lines = [f"{'':{_LABEL}}{head[0]:>10}{head[1]:>11}{head[2]:>13}{head[3]:>11}{head[4]:>13}{head[5]:>11}"]
    for method in plan.methods:
        ideal = method.ideal_flops.total
        lines.append(
            f"{_name(method):{_LABEL}}{_quantity(method.parameters.num_frozen):>10}"
            f"{_quantity(method.parameters.num_trainable):>11}{_quantity(ideal):>13}"
            f"{_quantity(method.counted_flops_per_token):>11}{_quantity(ideal * plan.num_tokens):>13}"
            f"{_duration(method.time_s):>11}"
        )
    return lines


def _memory_table(plan: Plan) -> list[str]:
    head = ("frozen", "weights", "gradients", "moments", "saved", "head", "in all", "checkpoint")
    widths = (9, 10, 11, 9, 10, 10, 10, 12)
    lines = [f"{'memory':{_LABEL}}" + "".join(f"{name:>{width}}" for name, width in zip(head, widths, strict=True))]
    for method in plan.methods:
        held = method.memory
        kinds = (held.frozen, held.trainable, held.gradients, held.moments, held.saved, held.head, held.total)
        sizes = (*kinds, method.parameters.checkpoint_bytes)
        cells = "".join(f"{_quantity(size)}B".rjust(width) for size, width in zip(sizes, widths, strict=True))
        lines.append(f"{_name(method):{_LABEL}}{cells}")
    return lines


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
    return f"{'>' if method.chosen else ' '} {method.variant}"


def _quantity(number: float) -> str:
    """Return a number to four digits with its SI prefix: 9.025 G."""
    for prefix in ("", "k", "M", "G", "T", "P", "E", "Z"):
        if abs(number) < 999.95 or prefix == "Z":
            break
        number /= 1000
    digits = (
        0 if number == 0 or (not prefix and number == int(number)) else 2 if number < 10 else 1 if number < 100 else 0
    )
    return f"{number:.{digits}f} {prefix}"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:,.1f} s"
