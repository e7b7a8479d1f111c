"""The model card of a joined model: its base, what each expansion was taught, what they cost, and the licence."""

from __future__ import annotations

from collections.abc import Sequence

from scale_cli.config.languages import language_name
from scale_cli.config.load import load_config
from scale_cli.config.schema import RunConfig
from scale_cli.evaluation.guarantee import NOT_COVERED
from scale_cli.export.card import base_title, loading, shared_values, tokens_by_source
from scale_cli.export.licence import Licence
from scale_cli.join.members import JoinedRuns, Member
from scale_cli.join.scoring import JoinedCorpus
from scale_cli.report.numbers import number, percent
from scale_cli.report.pages import code, markdown
from scale_cli.report.tables import Row, Table


def figures_table(corpora: Sequence[JoinedCorpus]) -> Table:
    """Return all heads and the router on every corpus, in both units."""
    titles = ["corpus", "", *corpora[0].heads, "routed", "worst document"]
    rows = []
    for corpus in corpora:
        heads = [*corpus.heads.values(), corpus.routed]
        name = f"{corpus.name} ({corpus.language})"
        worst = f"{number(corpus.worst_document_nats, 3, '+')} nats"
        rows += [
            [name, "nats/token", *(number(head.nats_per_token, 4) for head in heads), worst],
            ["", "bits/byte", *(number(head.bits_per_byte, 4) for head in heads), ""],
            ["", "served", *("" if head.share is None else percent(head.share) for head in heads), ""],
        ]
    return Table(titles, rows, "ll" + "r" * (len(titles) - 2))


def bound_in_words(max_cost_nats: float | None) -> str:
    """Return what routing costs at most over the best head."""
    if max_cost_nats is None:
        return "worst document: routed - best head; no bound holds with a switch rate"
    return f"worst document: routed - best head, in nats; {max_cost_nats:.3f} at most, whatever was trained"


def joined_card(
    joined: JoinedRuns,
    corpora: Sequence[JoinedCorpus],
    max_cost_nats: float | None,  # of routing, over the best head on a document; None where it may switch
    licence: Licence,
    switch_rate: float,
    folder_format: str,
) -> str:
    """Return the README.md of a joined model."""
    mean = joined.model.config.rule == "mean"
    runs = [load_config(member.folder / "scale.yaml") for member in joined.members]
    heads = ["base", *(member.name for member in joined.members)]
    among = "between the base and the mean of the expansions' heads, " if mean else ""
    router = (
        f"posterior rule, {among}weight of the base {joined.model.config.router_prior:g}, switch rate {switch_rate:g}"
    )
    rows = [
        row
        for member, run in zip(joined.members, runs, strict=True)
        for row in _sources(member, heads[member.parent], run)
    ]
    making: list[Row] = [
        ["base", f"{base_title(joined.record)}, {joined.record.dtype}"],
        ["base, SHA-256", code(joined.record.content_sha256)],
        ["router", router],
    ]
    titles = ["head", "upon", "method", "source", "language", "tokens trained on", "SHA-256"]
    return markdown(
        "joined_card.md.j2",
        **shared_values(joined.record, runs, licence, "joined"),
        loading=loading({"llama": "ensemble" if mean else "joined"}.get(folder_format, folder_format)),
        is_plain=folder_format == "llama",
        num_expansions=len(joined.members),
        has_new_tokens=bool(joined.model.config.new_tokens),
        making=Table(["", ""], making, "ll").markdown(),
        expansions=Table(titles, rows, "l" * 7).markdown(),
        figures=figures_table(corpora).markdown(),
        bound=bound_in_words(max_cost_nats),
        not_covered="" if max_cost_nats is None else NOT_COVERED,
    )


def _sources(member: Member, parent: str, config: RunConfig) -> list[list[str]]:
    """Return one row for every source that an expansion was trained on."""
    trained_on = tokens_by_source(member.folder)
    method = config.method.in_words
    return [
        [
            member.name,
            parent,
            method,
            source.name,
            language_name(source.language),
            f"{trained_on[source.name].num_trained:,}" if source.name in trained_on else "not known",
            code(member.sha256[:12]),
        ]
        for source in config.corpus.sources
    ]
