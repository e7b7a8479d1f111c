"""report.html: one file, with its style and figures inside, that asks for nothing from outside."""

from __future__ import annotations

from html import escape

from scale_cli.comparison.bars import method_swatch
from scale_cli.comparison.content import Comparison, Figure, figures, lead, notes, side_titles, table_caption
from scale_cli.comparison.options import Option
from scale_cli.comparison.palette import page_style
from scale_cli.comparison.runs import ComparedRun
from scale_cli.comparison.tables import Table, benchmark_tables, corpus_tables
from scale_cli.comparison.words import (
    digits_for,
    interval_text,
    rate,
    short_bytes,
    short_count,
    signed,
    times_base,
)
from scale_cli.config.method_names import method_in_words
from scale_cli.evaluation.statistics import Interval

WIDE, NARROW = 960.0, 358.0
# The browser itself holds the page to what it promises.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(comparison: Comparison) -> str:
    """Return the page."""
    told = "".join(f"<li>{escape(line)}</li>\n" for line in notes(comparison))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="color-scheme" content="light dark">
<title>Comparison of {escape(", ".join(run.name for run in comparison.runs))}</title>
<style>{page_style()}</style>
</head>
<body>
<main>
<h1>What each method buys, and what it costs</h1>
<p class="lead">{escape(lead(comparison))}</p>
{f"<ul>{told}</ul>" if told else ""}
<section id="methods">
<h2>Methods</h2>
<div class="scroll" tabindex="0" role="region" aria-label="Methods">
{_headline(comparison)}
</div>
<p class="caption">{escape(table_caption(comparison))}</p>
</section>
{"".join(_section(figure) for figure in figures(comparison))}
{_tables("corpora", "Every corpus", corpus_tables(comparison.options))}
{_tables("benchmarks", "Every benchmark", benchmark_tables(comparison.options))}
</main>
</body>
</html>
"""


def _section(figure: Figure) -> str:
    drawn = ""
    if figure.draw is not None:
        both = (figure.draw(width).inline(figure.title, kind) for width, kind in ((WIDE, "wide"), (NARROW, "narrow")))
        drawn = f"<figure>\n{''.join(both)}</figure>\n"
    return f"""<section id="{figure.key}">
<h2>{escape(figure.title)}</h2>
{drawn}<p class="caption">{escape(figure.caption)}</p>
</section>
"""


def _tables(key: str, title: str, tables: list[Table]) -> str:
    if not tables:
        return ""
    return f'<section id="{key}">\n<h2>{title}</h2>\n{"".join(_table(table) for table in tables)}</section>'


def _headline(comparison: Comparison) -> str:
    languages = list(dict.fromkeys(corpus.language for corpus in comparison.runs[0].report.corpora))
    lost, gained = side_titles(comparison)
    shares = " / ".join(languages)
    heads = [
        ("word", "method", ""),
        ("", lost, "bits/byte"),
        ("", gained, "bits/byte"),
        ("", "by base head", f"% of {shares}"),
        ("", "weights", "× base"),
        ("", "passes", "a token"),
        ("", "trainable", "parameters"),
        ("", "training", "tokens/s"),
        ("", "peak memory", "of training"),
    ]
    header = "".join(
        f'<th scope="col" class="{kind}">{escape(title)}{f"<small>{escape(unit)}</small>" if unit else ""}</th>'
        for kind, title, unit in heads
    )
    groups = "\n".join(_headline_group(comparison, run, languages) for run in comparison.runs)
    return f'<table class="wide">\n<thead><tr>{header}</tr></thead>\n{groups}\n</table>'


def _headline_group(comparison: Comparison, run: ComparedRun, languages: list[str]) -> str:
    options = [option for option in comparison.options if option.run is run]
    best = comparison.best + comparison.best_in_one_model
    digits = [digits_for(getattr(option, side) for option in comparison.options) for side in ("lost", "gained")]
    training = "".join(
        f'<td rowspan="{len(options)}">{text}</td>'
        for text in (
            short_count(run.trainable_parameters),
            rate(run.tokens_per_s),
            short_bytes(run.peak_memory_bytes),
        )
    )
    rows = [
        f"<tr>{_name_cell(option, _described(option))}"
        f"{_difference_cell(option.lost, digits[0], option in best)}"
        f"{_difference_cell(option.gained, digits[1], option in best)}"
        f'<td class="whole">{_share_text(option, languages)}</td>'
        f"<td>{escape(times_base(option.parameters, option.parameters_of_base))}"
        f"<small>{'two models' if option.num_models == 2 else ''}</small></td>"
        f'<td class="whole">{escape(option.passes)}</td>'
        f"{training if index == 0 else ''}</tr>"
        for index, option in enumerate(options)
    ]
    return "<tbody>\n" + "\n".join(rows) + "\n</tbody>"


def _described(option: Option) -> str:
    """Return how the model was trained, under the row of its own; under any other, how it is served."""
    if option.head == option.run.report.served:
        return f"{method_in_words(option.run.method)}; served {option.served}"
    return f"served {option.served}"


def _name_cell(option: Option, described: str) -> str:
    below = f"<small>{escape(described)}</small>" if described else ""
    return f'<td class="name">{method_swatch(option.run.method.variant)}{escape(option.label)}{below}</td>'


def _difference_cell(interval: Interval, digits: int, is_best: bool) -> str:
    return (
        f'<td class="{"best" if is_best else ""}">{signed(interval.value, digits)}'
        f"<small>{interval_text(interval, digits)}</small></td>"
    )


def _share_text(option: Option, languages: list[str]) -> str:
    if not option.base_share:
        return "—"
    return " / ".join(f"{100 * option.base_share[code]:.1f}" for code in languages)


def _table(table: Table) -> str:
    header = "".join(
        f'<th scope="col">{escape(title)}{f"<small>{escape(unit)}</small>" if unit else ""}</th>'
        for title, unit in table.columns
    )
    rows = "\n".join(
        f'<tr><td class="name">{method_swatch(row.variant)}{escape(row.label)}</td>'
        + "".join(
            f"<td>{escape(main)}{f'<small>{escape(below)}</small>' if below else ''}</td>" for main, below in row.cells
        )
        + "</tr>"
        for row in table.rows
    )
    return f"""<h3>{escape(table.title)}</h3>
<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">
<table>
<thead><tr><th scope="col">method</th>{header}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
</div>
"""
