"""The rows of the comparison: every trained model, in every way in which it could be served.

A trained model can be served alone; or mixed with the untouched base by the posterior rule. A widened model holds that
base inside, so mixing costs it at most a second pass of the layers that collaborate; any other method needs the
base beside it, a second model in memory and a second forward for every token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scale_cli.comparison.runs import ComparedRun
from scale_cli.evaluation.results import CorpusResult, Report
from scale_cli.report.numbers import NO_INTERVAL, Interval
from scale_cli.values import language_name


@dataclass(frozen=True)
class Option:
    """One trained model, served in one way."""

    run: ComparedRun
    untouched: Report  # whose base it is held against
    head: str  # of its own report: adapted | posterior | cosine
    label: str  # distinct, for figures and tables
    served: str  # in words
    num_models: int  # held in memory: 1 or 2
    passes: str  # forward passes for every token, in words
    parameters: int | None  # held in memory; None where the run has no record of them
    parameters_of_base: int | None  # of the base alone; likewise
    lost: Interval  # bits per byte on what the base knew; the mean over the retention corpora
    gained: Interval  # bits per byte on what was taught; the mean over the acquisition corpora
    base_share: dict[str, float] | None  # of the tokens, by language; None where nothing is mixed

    @property
    def is_finite(self) -> bool:
        return self.lost.value is not None and self.gained.value is not None


def options_of(run: ComparedRun, untouched: Report) -> list[Option]:
    """Return the ways in which a trained model could be served: as configured, then mixed.

    Held against the base of another report, that of a run whose tokens are the base's own.
    """
    return [_option(run, head, untouched) for head in dict.fromkeys((run.report.served, "posterior"))]


def _option(run: ComparedRun, head: str, untouched: Report) -> Option:
    report, method, cost = run.report, run.method.definition, run.cost
    base, held = (None, None) if cost is None else method.counted(cost.total_parameters, cost.trainable_parameters)
    label, served, passes, num_models = run.name, "alone", "1", 1
    if head != "adapted" and method.widens:
        served = f"routed, {head}"
        if head != report.served:
            label = f"{run.name}, {'posterior' if method.routes else 'routed'}"
        if run.layers_run_twice:
            passes = f"1 + {run.layers_run_twice}/{run.num_layers}"
    elif head != "adapted":
        label, served, passes, num_models = f"{run.name} + base", "beside the base, mixed", "2", 2
        held = None if held is None or base is None else held + base
    return Option(
        run=run,
        untouched=untouched,
        head=head,
        label=label,
        served=served,
        num_models=num_models,
        passes=passes,
        parameters=held,
        parameters_of_base=base,
        lost=mean_interval([beside_base(untouched, corpus, head) for corpus in report.with_role("retention")]),
        gained=-mean_interval([beside_base(untouched, corpus, head) for corpus in report.with_role("acquisition")]),
        base_share=None if head == "adapted" else report.base_share_by_language(head),
    )


def beside_base(untouched: Report, corpus: CorpusResult, head: str) -> Interval:
    """Return a head's bits per byte against the base's of a report that may have other tokens.

    Of the same tokens it is the difference that was measured; of others one of means, without an interval.
    """
    base, result = untouched.corpus(corpus.name), corpus.heads[head]
    if base.num_tokens == corpus.num_tokens:
        return result.bits_per_byte_difference
    before, now = base.heads["base"].bits_per_byte, result.bits_per_byte
    return NO_INTERVAL if before is None or now is None else Interval(now - before, None, None)


def mean_interval(intervals: Sequence[Interval]) -> Interval:
    """Return the mean of differences measured on different corpora, with its interval.

    The corpora are independent samples, so the arms of their intervals add as the square root of a sum of squares.
    A part that is not finite, or has no interval, leaves the mean without one.
    """
    values = [interval.value for interval in intervals if interval.value is not None]
    if not intervals or len(values) < len(intervals):
        return NO_INTERVAL
    mean = sum(values) / len(values)
    lows, highs = ([getattr(interval, end) for interval in intervals] for end in ("low", "high"))
    if None in lows or None in highs:
        return Interval(mean, None, None)

    def arm(ends: list[float]) -> float:
        return math.hypot(*(end - value for end, value in zip(ends, values, strict=True))) / len(values)

    return Interval(mean, mean - arm(lows), mean + arm(highs))


def non_dominated(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Return which points (lost, gained) no other beats: loses no more, gains no less, and is not its equal."""
    return [
        not any(other != (lost, gained) and other[0] <= lost and other[1] >= gained for other in points)
        for lost, gained in points
    ]


def front(options: Sequence[Option], most_models: int) -> list[Option]:
    """Return the options of so many models that neither another such nor the untouched base beats, least loss first."""
    places = {
        (option.lost.value, option.gained.value, index): option
        for index, option in enumerate(options)
        if option.num_models <= most_models and option.lost.value is not None and option.gained.value is not None
    }
    _, *kept = non_dominated([(0.0, 0.0), *((lost, gained) for lost, gained, _ in places)])
    return [places[place] for place in sorted(place for place, keep in zip(places, kept, strict=True) if keep)]


def side_names(report: Report) -> tuple[str, str]:
    """Return what the two sides are called: `forgetting of English`, `gain in Korean`."""

    def languages(role: str) -> str:
        return " and ".join(dict.fromkeys(language_name(corpus.language) for corpus in report.with_role(role)))

    return f"forgetting of {languages('retention') or 'the old'}", f"gain in {languages('acquisition') or 'the new'}"
