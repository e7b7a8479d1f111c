"""What the report holds, whether read as a page, as Markdown or as JSON (report/templates/ has its captions)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from scale_cli.comparison.drawings import draw_cost, draw_curves, draw_shares, draw_tasks, draw_trade_off
from scale_cli.comparison.options import Option, front, options_of
from scale_cli.comparison.runs import ComparedRun, benchmarks_of, setup_differences
from scale_cli.comparison.stages import Stages, stages_of
from scale_cli.comparison.tables import benchmark_tables, corpus_tables, methods_table, side_titles
from scale_cli.config.display_names import language_name, method_in_words
from scale_cli.report.figures import COLOURS, FONT, MARKS, Draw, svg_for_page
from scale_cli.report.numbers import number
from scale_cli.report.pages import markdown, page

T = TypeVar("T")

# What report.json says of itself; a folder whose report says this may be replaced by another comparison.
KIND = "scale comparison"
# Of a figure, in pixels: on a wide page and as a file, and on a phone.
WIDTHS = 960.0, 358.0


@dataclass(frozen=True)
class Figure:
    """One figure of the report."""

    key: str  # names its file and its place on the page
    title: str
    draw: Draw | None  # None where there is nothing to draw, and its caption says why


@dataclass(frozen=True)
class Comparison:
    """Finished runs of one base, measured on the same corpora, and every way of serving each."""

    runs: list[ComparedRun]
    options: list[Option]
    stages: list[Stages]  # sequences of runs that began with one another

    @property
    def has_trade_off(self) -> bool:
        """Whether something was measured on both sides."""
        return self.runs[0].report.has_trade_off

    @property
    def best(self) -> list[Option]:
        """The options that no other beats, whatever they cost to serve."""
        return front(self.options, lambda _: True) if self.has_trade_off else []

    @property
    def best_in_one_model(self) -> list[Option]:
        """The options held in one model that no other such beats."""
        return front(self.options, lambda option: option.num_models == 1) if self.has_trade_off else []

    @property
    def sides(self) -> tuple[str, str]:
        """What the two sides are called: `English lost`, `Korean gained`."""
        return side_titles(self.options)

    @property
    def languages(self) -> list[str]:
        """Of the held-out corpora, by name."""
        return list(dict.fromkeys(language_name(corpus.language) for corpus in self.runs[0].report.corpora))


def comparison_of(runs: list[ComparedRun]) -> Comparison:
    """Return the comparison of some runs, in their order; the base is one that reads its own tokens, if any does."""
    untouched = next((run for run in runs if not run.new_tokens), runs[0]).report
    return Comparison(runs, [option for run in runs for option in options_of(run, untouched)], stages_of(runs))


def notes(comparison: Comparison) -> list[str]:
    """Return what a reader must know before comparing: unequal budgets and settings, figures that are not there."""
    runs, lines = comparison.runs, []
    if len({run.report.num_tokens_trained for run in runs}) > 1:
        spent = ", ".join(f"{run.name} {run.report.num_tokens_trained:,}" for run in runs)
        lines.append(f"The runs were not trained on the same number of tokens: {spent}.")
    if len({run.new_tokens for run in runs}) > 1:
        lines.append(_other_tokens(runs))
    lines += [stages.in_words() for stages in comparison.stages]
    alike: dict[str, list[str]] = {}
    for name, changed in setup_differences(runs).items():
        alike.setdefault("; ".join(changed), []).append(name)
    lines += [f"Set up otherwise than {runs[0].name}: {', '.join(names)} in {keys}." for keys, names in alike.items()]
    devices = {(run.cost.device, run.cost.num_processes) for run in runs if run.cost}
    if len(devices) > 1:
        found = ", ".join(f"{run.name} {run.cost.num_processes} x {run.cost.device}" for run in runs if run.cost)
        lines.append(f"The runs were trained on different devices, so their speed and memory do not compare: {found}.")
    if means := [f"{run.name} (of {run.num_averaged})" for run in runs if run.num_averaged]:
        lines.append(
            f"Means of weights, not trained themselves: {', '.join(means)}; what stands of their training (tokens, "
            "tokens/s, parameters, memory) is that of the last one averaged, where it is recorded."
        )
    if without := [run.name for run in runs if run.cost is None and not run.num_averaged]:
        lines.append(
            f"No record of parameters and memory: {', '.join(without)} (trained before scale train wrote "
            "final/cost.json); their tokens/s includes periodic evaluations and checkpoints."
        )
    skipped: dict[str, list[str]] = {}
    for run in runs:
        for benchmark in run.report.skipped_benchmarks:
            skipped.setdefault(f"{benchmark.name} was not measured ({benchmark.reason})", []).append(run.name)
    lines += [f"{what}: {', '.join(names)}." for what, names in skipped.items()]
    odd = [option.label for option in comparison.options if not option.is_finite]
    if comparison.has_trade_off and odd:
        lines.append(f"Left out of the trade-off picture, a loss is not finite: {', '.join(odd)}.")
    return lines


def _other_tokens(runs: list[ComparedRun]) -> str:
    """Return how much text a token is in runs of different tokens."""
    held = [
        f"{run.name} {', '.join(f'{corpus.name} {number(corpus.bytes_per_token, 2)}' for corpus in run.report.corpora)}"
        for run in runs
    ]
    return (
        "The runs have different tokens, so that what is of a token (nats, perplexity, tokens/s, tokens trained on) "
        "does not compare between them; bits/byte do. Held against is the base in its own tokens where a run has them; "
        f"a difference between other tokens stands without an interval. Bytes a token: {'; '.join(held)}."
    )


def figures(comparison: Comparison) -> list[Figure]:
    """Return the figures, in the order of the report."""
    runs, options = comparison.runs, comparison.options
    drawable = comparison.has_trade_off and any(option.is_finite for option in options)
    evaluated = [run for run in runs if run.curves]
    mixed = [option for option in options if option.base_share]
    tasks = [_figure("tasks", "Benchmarks", draw_tasks, runs)] if benchmarks_of(runs) else []
    return [
        _figure("trade-off", "Trade-off", draw_trade_off, options if drawable else []),
        _figure("learning-curves", "Learning curves", draw_curves, evaluated),
        *tasks,
        _figure("route-shares", "Who served which language", draw_shares, mixed),
        _figure("cost", "Cost of training", draw_cost, runs),
    ]


def _figure(key: str, title: str, draw: Callable[[Any, float, list[T]], None], shown: list[T]) -> Figure:
    return Figure(key, title, (lambda figure, width: draw(figure, width, shown)) if shown else None)


def in_html(comparison: Comparison) -> str:
    """Return report.html: one file, with its style and figures inside, that asks for nothing from outside."""
    drawn = {
        figure.key: [svg_for_page(figure.draw, width, figure.title) for width in WIDTHS]
        for figure in figures(comparison)
        if figure.draw is not None
    }
    signs = {variant: sign for variant, (_, sign) in MARKS.items()}
    return page("comparison.html.j2", **_values(comparison), drawn=drawn, colours=COLOURS, font=FONT, signs=signs)


def in_markdown(comparison: Comparison) -> str:
    """Return report.md, whose pictures lie beside it."""
    return markdown("comparison.md.j2", **_values(comparison))


def _values(comparison: Comparison) -> dict[str, Any]:
    options = comparison.options
    return {
        "comparison": comparison,
        "notes": notes(comparison),
        "methods": methods_table(options, comparison.best + comparison.best_in_one_model),
        "figures": figures(comparison),
        "sections": [
            ("stages", "Stage after stage", [stages.table() for stages in comparison.stages]),
            ("corpora", "Every corpus", corpus_tables(options)),
            ("benchmarks", "Every benchmark", benchmark_tables(options)),
        ],
    }


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return report.json: what was read, unchanged, and what was made of it."""
    first = comparison.runs[0]
    best, best_in_one = comparison.best, comparison.best_in_one_model
    return {
        "kind": KIND,
        "base": {"name": first.base[0], "content_sha256": first.base[1]},
        "notes": notes(comparison),
        "options": [
            {
                "run": option.run.name,
                "label": option.label,
                "head": option.head,
                "num_models": option.num_models,
                "passes": option.passes,
                "parameters": option.parameters,
                "parameters_of_base": option.parameters_of_base,
                "bits_per_byte_lost": asdict(option.lost),
                "bits_per_byte_gained": asdict(option.gained),
                "base_share_by_language": option.base_share,
                "non_dominated": option in best,
                "non_dominated_in_one_model": option in best_in_one,
            }
            for option in comparison.options
        ],
        "stages": [stages.to_json() for stages in comparison.stages],
        "runs": [_run_to_json(run) for run in comparison.runs],
    }


def _run_to_json(run: ComparedRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "folder": str(run.folder),
        "method_in_words": method_in_words(run.method),
        "method": run.method.model_dump(mode="json"),
        "tokens_per_s": run.tokens_per_s,
        "cost": None if run.cost is None else asdict(run.cost),
        "curves": {corpus: [asdict(point) for point in points] for corpus, points in run.curves.items()},
        "report": run.raw_report,
    }
