"""What a join is held to: every head is what it is alone, and the written folder computes what was
measured.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from scale_cli.errors import BaseModelError, ConfigError, ExportParityError, PreservationError
from scale_cli.export.formats import check_parity, measure_parity, served_logits
from scale_cli.export.plain_folder import routed_class
from scale_cli.joining.members import JoinedRuns, join_runs
from scale_cli.joining.report import JoinReport
from scale_cli.model.family_scale import family_of
from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.processes import move_to_device
from scale_cli.upscale.base import load_written
from scale_cli.upscale.preservation import sample_ids
from scale_cli.vocabulary.tokenizer import check_size

_NUM_NEW_READ = 64


def check_one_head_holds_all(joined: JoinedRuns) -> None:
    """Raise ConfigError if one plain vocabulary head cannot hold the join, or if llama.cpp would
    misread the model.
    """
    config = joined.model.config
    if config.new_tokens:
        check_size(config.vocab_size)  # each run alone was already checked
    base, added = config.base(), config.expansions()
    channels = base.hidden_size + sum(each.expansion_hidden_size for each in added)
    heads = base.num_attention_heads + sum(each.expansion_num_attention_heads for each in added)
    if family_of(base).heads_divide_channels and channels % heads:
        raise ConfigError(
            f"--format llama: the runs have {channels} channels and {heads} heads in total, but a Llama's channels "
            "must be a multiple of its heads; use --format transformers"
        )
    brought = list[list[str]]()
    for member in joined.members:
        reason = "writes into the base's stream" if member.expansion.writes else ""
        if member.sizes.new_tokens and member.sizes.new_tokens in brought:
            reason = "has its own rows for the same new tokens as another run"
        if reason:
            raise ConfigError(f"--format llama: {member.name} {reason}; use --format transformers")
        brought.append(member.sizes.new_tokens)


@torch.no_grad()
def prove(joined: JoinedRuns) -> None:
    """Check that every head of a joined model computes, bit for bit, what it does in its run alone.

    For tokens that its run does not have, `JoinedForCausalLM.of_all_tokens` gives the expected
    logits.
    """
    model = joined.model
    num_old = model.base.config.vocab_size
    alone = [("base", joined.prompts, joined.base_logits)]
    alone += [(member.name, member.prompts, member.logits) for member in joined.members]
    for head, (name, prompts, expected) in enumerate(alone):
        before = model.config.known_tokens(head).start
        for ids, of_one in zip(prompts, expected, strict=True):
            ids = torch.where(ids < num_old, ids, ids + before)
            logits = model.routed_logits(model.final_states(ids, preserved=True))[head]
            if not torch.equal(logits, model.of_all_tokens(head, of_one)):
                raise PreservationError(
                    f"the head {name} computes other logits in the joined model than alone"
                )


def _prompts(joined: JoinedRuns) -> list[Tensor]:
    """Return ids of the sample texts, and of new tokens from the whole vocabulary: no text covers
    every script.
    """
    prompts, config = sample_ids(joined.tokenizer), joined.model.config
    if num_new := len(config.new_tokens):
        first, last = config.vocab_size - num_new, config.vocab_size - 1
        spread = torch.linspace(first, last, min(num_new, _NUM_NEW_READ)).round().long()
        prompts.append(spread[None].to(prompts[0].device))
    return prompts


@torch.no_grad()
def check_written(folder: Path, joined: JoinedRuns) -> None:
    """Check that the heads of the written model equal those that were measured, bit for bit."""
    loaded = move_to_device(load_written(JoinedForCausalLM, folder)).eval()
    for ids in _prompts(joined):
        written, measured = (
            model.routed_logits(model.final_states(ids, preserved=True))
            for model in (loaded, joined.model)
        )
        if not all(map(torch.equal, written, measured)):
            raise ExportParityError(
                "the written folder computes other logits than the measured model; it was removed"
            )


def check_written_plainly(folder: Path, joined: JoinedRuns) -> None:
    """Check that the written plain model, with its router, computes what was measured."""
    loaded = move_to_device(load_written(routed_class(folder), folder)).eval()
    check_parity(measure_parity(loaded, joined.model, served_logits, _prompts(joined)), "float32")


def check_plain_join(folder: Path) -> None:
    """Compare a joined folder of the format `llama` with its runs; BaseModelError if a run is not
    there any more.
    """
    report = JoinReport.load(folder)
    runs = [Path(member["folder"]) for member in report.members]
    if gone := [run for run in runs if not run.is_dir()]:
        raise BaseModelError(f"{gone[0]}: this run no longer exists")
    check_written_plainly(folder, join_runs(runs, report.router_prior))
