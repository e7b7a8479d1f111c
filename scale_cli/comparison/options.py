"""Each way of serving a finished run.

A trained model can be served alone, or mixed with the untouched base by the posterior rule. A
widened model contains that base. LoRA's adapters lie beside it, and both are rows of one pass. Any
other method needs it as a second model, with a second pass for every token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scale_cli.comparison.runs import ComparedRun
from scale_cli.report import NO_INTERVAL, Interval


@dataclass(frozen=True)
class Option:
    """One trained model, served in one way."""

    run: ComparedRun
    head: str  # of its report: trained | posterior | cosine
    label: str  # distinct, for the figure and the tables
    served: str  # in words
    num_models: int  # held in memory: 1 or 2
    passes: str  # forward passes for every token, in words
    # Bits per byte on what the base knew, and on what was taught: means over the corpora of a role.
    bits_per_byte_lost: Interval
    bits_per_byte_gained: Interval
    base_share_by_language: dict[str, float] | None  # of the tokens; None if nothing is mixed


def options_of(run: ComparedRun) -> list[Option]:
    """Return the ways to serve a run: as it is configured to be served first; mixed; and a model that
    does not hold its base, alone.
    """
    report = run.report
    method = run.config.method.definition
    ways = (report.served, "posterior", *(() if method.widens else ("trained",)))
    options = []
    for head in dict.fromkeys(ways):
        label = run.name
        served = "alone"
        num_models = 1
        passes = "1"
        if head != "trained":
            num_models = method.streams.num_models
            passes = method.streams.passes or _routed_passes(run.model_config)
            served = f"routed, {head}" if method.widens else "beside the base, mixed"
            if not method.widens:
                label = f"{run.name} + base"
                if head != ways[0]:
                    label += f", {head}"
                served += f" by the {head} rule"
            elif head != report.served:
                label = f"{run.name}, {'posterior' if method.head == 'routed' else 'routed'}"
        by_role = {
            role: mean_interval(
                [of.heads[head].bits_per_byte_difference for of in report.with_role(role)]
            )
            for role in ("retention", "acquisition")
        }
        options.append(
            Option(
                run=run,
                head=head,
                label=label,
                served=served,
                num_models=num_models,
                passes=passes,
                bits_per_byte_lost=by_role["retention"],
                bits_per_byte_gained=-by_role["acquisition"],
                base_share_by_language=(
                    None if head == "trained" else report.base_share_by_language(head)
                ),
            )
        )
    return options


def _routed_passes(model_config: dict[str, Any]) -> str:
    """Return how often a token passes the layers of a widened model.

    Layers from the first collaborating one on run twice.
    """
    num_layers = model_config["base_config"]["num_hidden_layers"]
    collaborating = [
        *model_config["attention_collaboration_layers"],
        *model_config["mlp_collaboration_layers"],
    ]
    twice = num_layers - min(collaborating, default=num_layers)
    return f"1 + {twice}/{num_layers}" if twice else "1"


def mean_interval(intervals: Sequence[Interval]) -> Interval:
    """Return the mean of differences measured on different corpora, with its interval.

    The corpora are independent samples, so the arms of their intervals add as the square root of a
    sum of squares. The mean has no value if a part is not finite, and no interval if a part has
    none.
    """
    values = [interval.value for interval in intervals if interval.value is not None]
    if not intervals or len(values) < len(intervals):
        return NO_INTERVAL
    mean = sum(values) / len(values)
    lows, highs = ([getattr(interval, end) for interval in intervals] for end in ("low", "high"))
    if None in lows or None in highs:
        return Interval(mean, None, None)
    below, above = (math.dist(ends, values) / len(values) for ends in (lows, highs))
    return Interval(mean, mean - below, mean + above)
