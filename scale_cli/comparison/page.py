"""report.html: one file, with its style and figures inside, that asks for nothing from outside."""

from __future__ import annotations

from html import escape

from scale_cli.comparison.bars import method_swatch
from scale_cli.comparison.content import Comparison, Figure, figures, lead, notes, side_titles, table_caption
from scale_cli.comparison.options import Option, method_in_words
from scale_cli.comparison.palette import page_style
from scale_cli.comparison.runs import ComparedRun
from scale_cli.comparison.words import (
    interval_text,
    percent,
    rate,
    short_bytes,
    short_count,
    signed,
    times_base,
)
from scale_cli.evaluation.render import language_name, number
from scale_cli.evaluation.results import CorpusResult
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
<section id="corpora">
<h2>Every corpus</h2>
{"".join(_corpus(comparison, index) for index in range(len(comparison.runs[0].report.corpora)))}
</section>
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


def _headline(comparison: Comparison) -> str:
    languages = list(dict.fromkeys(corpus.language for corpus in comparison.runs[0].report.corpora))
    lost, gained = side_titles(comparison)
    shares = " / ".join(languages)
    heads = [
        ("word", "method", ""),
        ("word", "served", ""),
        ("", lost, "bits/byte"),
        ("", gained, "bits/byte"),
        ("", "by base head", shares),
        ("", "weights held", ""),
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
    cost = run.cost
    training = "".join(
        f'<td rowspan="{len(options)}">{text}</td>'
        for text in (
            short_count(cost and cost.trainable_parameters),
            rate(run.tokens_per_s),
            short_bytes(cost and cost.peak_memory_bytes),
        )
    )
    rows = [
        f"<tr>{_name_cell(option, method_in_words(run) if index == 0 else '')}"
        f'<td class="word">{escape(option.served)}</td>'
        f"{_difference_cell(option.lost, option in best)}{_difference_cell(option.gained, option in best)}"
        f"<td>{_share_text(option, languages)}</td>"
        f"<td>{escape(times_base(option.parameters, option.parameters_of_base))}"
        f"<small>{'two models' if option.num_models == 2 else ''}</small></td>"
        f"<td>{escape(option.passes)}</td>{training if index == 0 else ''}</tr>"
        for index, option in enumerate(options)
    ]
    return "<tbody>\n" + "\n".join(rows) + "\n</tbody>"


def _name_cell(option: Option, described: str) -> str:
    below = f"<small>{escape(described)}</small>" if described else ""
    return f'<td class="name">{method_swatch(option.run.method.variant)}{escape(option.label)}{below}</td>'


def _difference_cell(interval: Interval, is_best: bool) -> str:
    shown = signed(interval.value) if interval.value is not None else "—"
    return f'<td class="{"best" if is_best else ""}">{shown}<small>{interval_text(interval)}</small></td>'


def _share_text(option: Option, languages: list[str]) -> str:
    if not option.base_share:
        return "—"
    return " / ".join(f"{100 * option.base_share[code]:.1f}" for code in languages) + " %"


def _corpus(comparison: Comparison, index: int) -> str:
    corpus = comparison.runs[0].report.corpora[index]
    base = corpus.heads["base"]
    rows = "\n".join(_corpus_row(option, option.run.report.corpora[index]) for option in comparison.options)
    role = "what the base knew" if corpus.role == "retention" else "what it was taught"
    return f"""<h3>{escape(corpus.name)}: {escape(language_name(corpus.language))}, {corpus.role} ({role})</h3>
<div class="scroll" tabindex="0" role="region" aria-label="{escape(corpus.name)}">
<table>
<thead><tr><th scope="col" class="word">method</th><th scope="col">bits/byte</th>
<th scope="col">bits/byte − base<small>95 % interval</small></th><th scope="col">perplexity</th>
<th scope="col">worst document<small>nats lost</small></th><th scope="col">by base head</th></tr></thead>
<tbody><tr><td class="name">{method_swatch("base")}base</td><td>{number(base.bits_per_byte)}</td><td>—</td>
<td>{number(base.perplexity, 2)}</td><td>—</td><td>—</td></tr></tbody>
<tbody>
{rows}
</tbody>
</table>
</div>
"""


def _corpus_row(option: Option, corpus: CorpusResult) -> str:
    head = corpus.heads[option.head]
    share = "—" if head.base_share is None else percent(head.base_share)
    return (
        f"<tr>{_name_cell(option, '')}<td>{number(head.bits_per_byte)}</td>"
        f"{_difference_cell(head.bits_per_byte_difference, False)}"
        f"<td>{number(head.perplexity, 2)}</td><td>{number(head.worst_document_nats)}</td><td>{share}</td></tr>"
    )
