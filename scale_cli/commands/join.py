"""The verb `scale join`: put finished runs together, prove that nothing changed, measure, write."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scale_cli.errors import ConfigError
from scale_cli.export.card import base_licence
from scale_cli.export.dense import dense_model
from scale_cli.export.formats import write_self_contained
from scale_cli.export.plain_folder import router_keys, write_plain
from scale_cli.joining.checks import (
    check_one_head_holds_all,
    check_written,
    check_written_plainly,
    prove,
)
from scale_cli.joining.members import JoinedRuns, join_runs
from scale_cli.joining.report import KIND, JoinReport, joined_card, score_corpora
from scale_cli.runs.folder import check_replaceable
from scale_cli.runs.new_tokens import write_grown_tokenizer
from scale_cli.storage.atomic import new_folder, write_text
from scale_cli.upscale.preservation import sample_ids


def join(
    runs: Sequence[Path],
    output: Path,
    prior: float | None,  # weight of the base head at the first token; None: an even share
    # computes every head bit for bit; or `llama`, one plain model
    folder_format: str = "transformers",
) -> JoinReport:
    """Put the expansions of finished runs on one base, measure them, and write the joined model."""
    check_replaceable(output, KIND)
    joined, is_plain = join_runs(runs, prior), folder_format == "llama"
    if is_plain:
        check_one_head_holds_all(joined)
    configs = [member.run for member in joined.members]
    if not any(config.evaluation.perplexity for config in configs):
        raise ConfigError("evaluation.perplexity: none of the runs names a corpus to measure on")
    prove(joined)

    smallest_prior = joined.model.log_prior().exp().min().item()
    report = JoinReport(
        base=joined.record.name,
        base_sha256=joined.record.content_sha256,
        members=[
            {"name": member.name, "folder": str(member.folder), "sha256": member.sha256}
            for member in joined.members
        ],
        router_prior=joined.model.config.router_prior,
        max_cost_nats=-math.log(smallest_prior),  # ln(K + 1) if the prior is even
        corpora=score_corpora(joined.model, configs, joined.tokenizer),
        format=folder_format,
    )
    with new_folder(output) as partial:
        if is_plain:
            _write_plain(joined, partial)
        else:
            write_self_contained(joined.model, joined.tokenizer, partial)
        report.save(partial)
        licence = base_licence(configs[0].model)
        licence.copy_files(partial)
        write_text(partial / "README.md", joined_card(joined, report, licence))
        (check_written_plainly if is_plain else check_written)(partial, joined)
    return report


def _write_plain(joined: JoinedRuns, folder: Path) -> None:
    """Write one plain model of all expansions, with its router and the joined tokenizer."""
    plain = dense_model(joined.model, "float32", sample_ids(joined.tokenizer))
    base, router = joined.members[0].run.model, router_keys(joined.model)
    if not joined.model.config.new_tokens:
        write_plain(plain, joined.tokenizer, base, folder, router)
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as grown:
        write_grown_tokenizer(Path(grown), base, joined.tokenizer)
        write_plain(plain, joined.tokenizer, base, folder, router, Path(grown))
