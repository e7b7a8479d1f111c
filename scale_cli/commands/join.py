"""The verb `scale join`: put finished runs together, prove that nothing changed, measure, write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from scale_cli.errors import ConfigError
from scale_cli.export.card import base_licence
from scale_cli.export.formats import write_self_contained
from scale_cli.joining.checks import check_written, prove
from scale_cli.joining.members import join_runs
from scale_cli.joining.report import KIND, JoinReport, joined_card, score_corpora
from scale_cli.model.routing import log_prior
from scale_cli.runs.folder import check_replaceable
from scale_cli.storage.atomic import new_folder, write_text


def join(
    runs: Sequence[Path],
    output: Path,
    prior: float | None,  # weight of the base head at the first token; None: an even share
) -> JoinReport:
    """Put the expansions of finished runs on one base, measure them, and write the joined model."""
    check_replaceable(output, KIND)
    joined = join_runs(runs, prior)
    configs = [member.run for member in joined.members]
    if not any(config.evaluation.perplexity for config in configs):
        raise ConfigError("evaluation.perplexity: none of the runs names a corpus to measure on")
    prove(joined)

    base_prior, num_heads = joined.model.config.router_prior, len(joined.members) + 1
    smallest_prior = log_prior(base_prior, num_heads).exp().min().item()
    report = JoinReport(
        base=joined.record.name,
        base_sha256=joined.record.content_sha256,
        members=[
            {"name": member.name, "folder": str(member.folder), "sha256": member.sha256}
            for member in joined.members
        ],
        router_prior=joined.model.config.router_prior,
        max_cost_nats=-math.log(smallest_prior),  # ln(K + 1) if the prior is even
        corpora=score_corpora(joined, configs),
    )
    with new_folder(output) as partial:
        write_self_contained(joined.model, joined.tokenizer, partial)
        report.save(partial)
        licence = base_licence(configs[0].model)
        licence.copy_files(partial)
        write_text(partial / "README.md", joined_card(joined, report, licence))
        check_written(partial, joined)
    return report
