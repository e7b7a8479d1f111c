"""What the report says, whether it is read as a page, as Markdown or as JSON: figures, captions, notes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from scale_cli.comparison.drawings import draw_cost, draw_curves, draw_shares, draw_tasks, draw_trade_off
from scale_cli.comparison.options import Option, front, options_of
from scale_cli.comparison.runs import ComparedRun, benchmarks_of, setup_differences
from scale_cli.comparison.tables import benchmark_tables, corpus_tables, methods_caption, methods_table, side_titles
from scale_cli.config.names import language_name, method_in_words
from scale_cli.report.figures import COLOURS, FONT, MARKS, Draw, svg_for_page
from scale_cli.report.pages import markdown, page

# What report.json says of itself; a folder whose report says this may be replaced by another comparison.
KIND = "scale comparison"
# Of a figure, in pixels: on a wide page and as a file, and on a phone.
WIDTHS = 960.0, 358.0


@dataclass(frozen=True)
class Figure:
    """One figure of the report."""

    key: str  # names its file and its place on the page
    title: str
    caption: str  # what to read off it
    draw: Draw | None  # None where there is nothing to draw, and the caption says why


@dataclass(frozen=True)
class Comparison:
    """Finished runs of one base, measured on the same corpora, and every way of serving each."""

    runs: list[ComparedRun]
    options: list[Option]

    @property
    def has_trade_off(self) -> bool:
        """Whether something was measured on both sides."""
        report = self.runs[0].report
        return bool(report.with_role("retention") and report.with_role("acquisition"))

    @property
    def best(self) -> list[Option]:
        """The options that no other beats, whatever they cost to serve."""
        return front(self.options, lambda _: True) if self.has_trade_off else []

    @property
    def best_in_one_model(self) -> list[Option]:
        """The options held in one model that no other such beats."""
        return front(self.options, lambda option: option.num_models == 1) if self.has_trade_off else []


def comparison_of(runs: list[ComparedRun]) -> Comparison:
    """Return the comparison of some runs, in their order."""
    return Comparison(runs, [option for run in runs for option in options_of(run)])


def lead(comparison: Comparison) -> str:
    """Return what was compared, in a sentence or two."""
    runs = comparison.runs
    tokens = sorted({run.report.num_tokens_trained for run in runs})
    spent = f"{tokens[0]:,}" if len(tokens) == 1 else f"{tokens[0]:,} to {tokens[-1]:,}"
    names = "; ".join(
        f"{corpus.name} ({corpus.language}, {corpus.role}, {corpus.num_documents:,} documents, "
        f"{corpus.num_tokens:,} tokens)"
        for corpus in runs[0].report.corpora
    )
    which = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    return (
        f"{which} on the base {runs[0].base[0]} (SHA-256 {runs[0].base[1][:12]}), each trained on {spent} tokens. "
        f"Held out: {names}."
    )


def notes(comparison: Comparison) -> list[str]:
    """Return what a reader must know before comparing: unequal budgets and settings, figures that are not there."""
    runs, lines = comparison.runs, []
    if len({run.report.num_tokens_trained for run in runs}) > 1:
        spent = ", ".join(f"{run.name} {run.report.num_tokens_trained:,}" for run in runs)
        lines.append(f"The runs were not trained on the same number of tokens: {spent}.")
    alike: dict[str, list[str]] = {}
    for name, changed in setup_differences(runs).items():
        alike.setdefault("; ".join(changed), []).append(name)
    lines += [f"Set up otherwise than {runs[0].name}: {', '.join(names)} in {keys}." for keys, names in alike.items()]
    devices = {(run.cost.device, run.cost.num_processes) for run in runs if run.cost}
    if len(devices) > 1:
        found = ", ".join(f"{run.name} {run.cost.num_processes} x {run.cost.device}" for run in runs if run.cost)
        lines.append(f"The runs were trained on different devices, so their speed and memory do not compare: {found}.")
    if without := [run.name for run in runs if run.cost is None]:
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


def figures(comparison: Comparison) -> list[Figure]:
    """Return the figures, in the order of the report."""
    drawn = [_trade_off(comparison), _curves(comparison)]
    if benchmarks_of(comparison.runs):
        drawn.append(_tasks(comparison))
    return [*drawn, _shares(comparison), _cost(comparison)]


def in_html(comparison: Comparison) -> str:
    """Return report.html: one file, with its style and figures inside, that asks for nothing from outside."""
    drawn = [
        (figure, [] if figure.draw is None else [svg_for_page(figure.draw, width, figure.title) for width in WIDTHS])
        for figure in figures(comparison)
    ]
    signs = {variant: sign for variant, (_, sign) in MARKS.items()}
    return page("comparison.html.j2", **_values(comparison), figures=drawn, colours=COLOURS, font=FONT, signs=signs)


def in_markdown(comparison: Comparison) -> str:
    """Return report.md, whose pictures lie beside it."""
    return markdown("comparison.md.j2", **_values(comparison), figures=figures(comparison))


def _values(comparison: Comparison) -> dict[str, object]:
    options = comparison.options
    return {
        "names": [run.name for run in comparison.runs],
        "lead": lead(comparison),
        "notes": notes(comparison),
        "methods": methods_table(options, comparison.best + comparison.best_in_one_model),
        "caption": methods_caption(options),
        "sections": [
            ("corpora", "Every corpus", corpus_tables(options)),
            ("benchmarks", "Every benchmark", benchmark_tables(options)),
        ],
    }


def _trade_off(comparison: Comparison) -> Figure:
    title = "Trade-off"
    drawable = [option for option in comparison.options if option.is_finite]
    if not comparison.has_trade_off or not drawable:
        why = "no run has a finite loss on both" if comparison.has_trade_off else "one of the two was not measured"
        return Figure("trade-off", title, f"Needs a retention and an acquisition corpus: {why}.", None)
    lost, gained = side_titles(comparison.options)
    caption = (
        f"{lost} against {gained}, with 95 % intervals. Filled marks are one model, hollow ones two models served side "
        f"by side. The solid line joins what no other single model beats: {_listed(comparison.best_in_one_model)}. "
        f"{_two_models_in_words(comparison)} Where losses span orders of magnitude the horizontal axis is linear "
        "around zero and logarithmic beyond; a base far from everything is left outside."
    )
    return Figure("trade-off", title, caption, lambda figure, width: draw_trade_off(figure, width, comparison.options))


def _listed(options: list[Option]) -> str:
    return "; ".join(option.label for option in options) or "only the base itself"


def _two_models_in_words(comparison: Comparison) -> str:
    if comparison.best == comparison.best_in_one_model:
        return "Allowing two models at once adds nothing to it."
    return f"The dashed line allows two models at once: {_listed(comparison.best)}."


def _curves(comparison: Comparison) -> Figure:
    runs = [run for run in comparison.runs if run.curves]
    title = "Learning curves"
    if not runs:
        why = "No run was evaluated as it trained; set train.eval_every_steps to have learning curves."
        return Figure("learning-curves", title, why, None)
    missing = [run.name for run in comparison.runs if not run.curves]
    left_out = f" Not evaluated as they trained: {', '.join(missing)}." if missing else ""
    caption = (
        "Cross-entropy of what each run serves, on the first documents of every held-out corpus "
        "(train.eval_max_documents), against the tokens trained on; dashed: the untouched base, where every method "
        f"starts.{left_out}"
    )
    return Figure("learning-curves", title, caption, lambda figure, width: draw_curves(figure, width, runs))


def _tasks(comparison: Comparison) -> Figure:
    caption = (
        "Accuracy of what each run serves less that of the base, in points, with 95 % intervals (paired bootstrap over "
        "items). Solid bars: a difference by McNemar’s test, Holm-corrected over the run’s benchmarks, at 5 %. Hollow "
        "bars: no difference shown."
    )
    return Figure("tasks", "Benchmarks", caption, lambda figure, width: draw_tasks(figure, width, comparison.runs))


def _shares(comparison: Comparison) -> Figure:
    mixed = [option for option in comparison.options if option.base_share]
    title = "Who served which language"
    if not mixed:
        return Figure("route-shares", title, "No held-out corpus was scored, so nothing was routed.", None)
    languages = list(mixed[0].base_share or {})
    others = " and ".join(language_name(code) for code in languages[1:])
    which = f" Filled: {language_name(languages[0])}; hollow: {others}." if others else ""
    caption = (
        "Share of each language’s tokens that the base head served, for every option that mixes two heads: under "
        f"the posterior rule its mean weight, under the cosine rule the tokens it was given.{which}"
    )
    return Figure("route-shares", title, caption, lambda figure, width: draw_shares(figure, width, mixed))


def _cost(comparison: Comparison) -> Figure:
    caption = (
        "Speed is over all processes and counts optimiser steps alone; memory is the peak of the main process ("
        "on a GPU what PyTorch allocated there, on a CPU resident memory with the libraries), periodic "
        "evaluation included: for a method that widens nothing that evaluation holds the base a second time."
    )
    return Figure("cost", "Cost of training", caption, lambda figure, width: draw_cost(figure, width, comparison.runs))


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
