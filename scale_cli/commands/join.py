"""The verb `scale join`: put finished runs together, prove that nothing changed, measure, write."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from scale_cli.errors import BaseModelError, ConfigError, ExportParityError, PreservationError
from scale_cli.evaluation.results import bound_nats
from scale_cli.export.card import base_licence
from scale_cli.export.dense import dense_model
from scale_cli.export.formats import (
    check_parity,
    measure_parity,
    served_logits,
    write_self_contained,
)
from scale_cli.export.plain_folder import routed_class, router_keys, write_plain
from scale_cli.joining import KIND, JoinedRuns, JoinReport, join_runs, joined_card, score_corpora
from scale_cli.model.family_scale import family_of
from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.processes import placed
from scale_cli.runs.folder import check_replaceable
from scale_cli.runs.new_tokens import write_grown_tokenizer
from scale_cli.storage.atomic import new_folder, write_text
from scale_cli.upscale.base import load_written
from scale_cli.upscale.preservation import sample_ids
from scale_cli.vocabulary.tokenizer import check_size

_NUM_NEW_READ = 64


def join(
    runs: Sequence[Path],
    output: Path,
    prior: float | None,  # `prior` and `switch_rate`: see `stack_reads`
    switch_rate: float,
    folder_format: str = "transformers",  # computes every head bit for bit; or `llama`, one plain model
) -> JoinReport:
    """Put the expansions of finished runs on one base, measure them, and write the joined model."""
    check_replaceable(output, KIND)
    joined, is_plain = join_runs(runs, prior, switch_rate), folder_format == "llama"
    if is_plain:
        _check_one_head_holds_all(joined)
    if not any(config.evaluation.perplexity for config in joined.configs):
        raise ConfigError("evaluation.perplexity: none of the runs names a corpus to measure on")
    prove(joined)
    report = JoinReport(
        base=joined.record.name,
        base_sha256=joined.record.content_sha256,
        members=[
            {"name": m.name, "parent": m.parent, "folder": str(m.folder), "sha256": m.sha256}
            for m in joined.members
        ],
        router_prior=joined.model.config.router_prior,
        router_switch_rate=switch_rate,
        # ln(K + 1) if the prior is even
        max_cost_nats=bound_nats(float(joined.model.log_prior().exp().min()), switch_rate),
        corpora=score_corpora(joined.model, joined.configs, joined.tokenizer),
        format=folder_format,
    )
    with new_folder(output) as partial:
        if is_plain:
            _write_plain(joined, partial)
        else:
            write_self_contained(joined.model, joined.tokenizer, partial)
        report.save(partial)
        licence = base_licence(joined.configs[0].model)
        licence.copy_files(partial)
        write_text(partial / "README.md", joined_card(joined, report, licence))
        (_check_plain if is_plain else _check_written)(partial, joined)
    return report


def _check_one_head_holds_all(joined: JoinedRuns) -> None:
    """Raise ConfigError if one plain vocabulary head cannot hold the join, or if llama.cpp would misread the model."""
    config, brought = joined.model.config, list[range]()
    if config.new_tokens:
        check_size(config.vocab_size)  # each run alone was already checked
    root, stages = config.base(), config.stages()
    channels = root.hidden_size + sum(stage.expansion_hidden_size for stage in stages)
    heads = root.num_attention_heads + sum(stage.expansion_num_attention_heads for stage in stages)
    if family_of(root).heads_divide_channels and channels % heads:
        raise ConfigError(
            f"--format llama: the runs have {channels} channels and {heads} heads in total, but a Llama's channels "
            "must be a multiple of its heads; use --format transformers"
        )
    for head, (member, branch) in enumerate(
        zip(joined.members, joined.model.branches, strict=True), start=1
    ):
        brings, known = branch.expansion.new_tokens is not None, config.known_tokens(head)
        reason = "writes into the base's stream" if branch.writes else ""
        if brings and known in brought:
            reason = "has its own rows for the same new tokens as another run"
        if reason:
            raise ConfigError(f"--format llama: {member.name} {reason}; use --format transformers")
        brought += [known] if brings else []


def _write_plain(joined: JoinedRuns, folder: Path) -> None:
    """Write one plain model of all expansions, with its router and the joined tokenizer."""
    plain = dense_model(joined.model, "float32", sample_ids(joined.tokenizer))
    base, router = joined.configs[0].model, router_keys(joined.model)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as grown:
        if has_new := bool(joined.model.config.new_tokens):
            write_grown_tokenizer(Path(grown), base, joined.tokenizer)
        write_plain(plain, joined.tokenizer, base, folder, router, Path(grown) if has_new else None)


@torch.no_grad()
def prove(joined: JoinedRuns) -> None:
    """Check that every head of a joined model computes, bit for bit, what it does in its run alone.

    For tokens that its run does not have, `JoinedForCausalLM.of_all_tokens` gives the expected logits.
    """
    model, num_old = joined.model, joined.model.base.config.vocab_size
    alone = [
        ("base", joined.prompts, joined.base_logits),
        *((m.name, m.prompts, m.logits) for m in joined.members),
    ]
    for head, (name, prompts, expected) in enumerate(alone):
        before = model.config.known_tokens(head).start
        for ids, of_one in zip(prompts, expected, strict=True):
            states = model.final_states(
                torch.where(ids < num_old, ids, ids + before), preserved=True
            )
            if not torch.equal(
                model.routed_logits(states)[head], model.of_all_tokens(head, of_one)
            ):
                raise PreservationError(
                    f"the head {name} computes other logits in the joined model than alone"
                )


def _prompts(joined: JoinedRuns) -> list[Tensor]:
    """Return ids of the sample texts, and of new tokens from the whole vocabulary: no text covers every script."""
    prompts, config = sample_ids(joined.tokenizer), joined.model.config
    if num_new := len(config.new_tokens):
        first = config.vocab_size - num_new
        spread = (
            torch.linspace(first, config.vocab_size - 1, min(num_new, _NUM_NEW_READ)).round().long()
        )
        prompts.append(spread[None].to(prompts[0].device))
    return prompts


@torch.no_grad()
def _check_written(folder: Path, joined: JoinedRuns) -> None:
    """Check that the heads of the written model equal those that were measured, bit for bit."""
    loaded = placed(load_written(JoinedForCausalLM, folder)).eval()
    for ids in _prompts(joined):
        one, other = (
            m.routed_logits(m.final_states(ids, preserved=True)) for m in (loaded, joined.model)
        )
        if not all(torch.equal(a, b) for a, b in zip(one, other, strict=True)):
            raise ExportParityError(
                "the written folder computes other logits than the measured model; it was removed"
            )


def _check_plain(folder: Path, joined: JoinedRuns) -> None:
    """Check that the written plain model, with its router, computes what was measured."""
    loaded = placed(load_written(routed_class(folder), folder)).eval()
    check_parity(measure_parity(loaded, joined.model, served_logits, _prompts(joined)), "float32")


def check_plain_join(folder: Path) -> None:
    """Compare a joined folder of the format `llama` with its runs; BaseModelError if a run is not there any more."""
    report = JoinReport.load(folder)
    runs = [Path(member["folder"]) for member in report.members]
    if gone := [run for run in runs if not run.is_dir()]:
        raise BaseModelError(f"{gone[0]}: this run no longer exists")
    _check_plain(folder, join_runs(runs, report.router_prior, report.router_switch_rate))
