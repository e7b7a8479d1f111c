"""A join is held to this: every head is what it is alone, and so is the written folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from scale_cli.errors import ExportParityError, PreservationError
from scale_cli.joining.members import JoinedRuns
from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.processes import move_to_device
from scale_cli.upscale.base import load_written
from scale_cli.upscale.preservation import sample_ids

_NUM_NEW_READ = 64  # of the new tokens, spread over all of them: no text covers every script


def prove(joined: JoinedRuns) -> None:
    """Check that every head of a joined model computes, bit for bit, what it does in its run alone."""
    check_head(joined.model, 0, joined.prompts, joined.base_logits)
    for head, member in enumerate(joined.members, start=1):
        check_head(joined.model, head, member.prompts, member.logits)


@torch.no_grad()
def check_head(
    model: JoinedForCausalLM,
    head: int,
    prompts: Sequence[Tensor],  # (1, T) ids of the head's own run
    alone: Sequence[Tensor],  # its logits there
) -> None:
    """Check one head; for tokens that its run does not have, `of_all_tokens` gives the logits."""
    before, _ = model.config.known_by_heads()[head]
    for ids, of_one in zip(prompts, alone, strict=True):
        ids = torch.where(ids < model.base.config.vocab_size, ids, ids + before)
        logits = model.routed_logits(model.final_states(ids, preserved=True))[head]
        if not torch.equal(logits, model.of_all_tokens(head, of_one)):
            name = model.config.head_names[head]
            raise PreservationError(
                f"the head {name} computes other logits in the joined model than alone"
            )


@torch.no_grad()
def check_written(folder: Path, joined: JoinedRuns) -> None:
    """Check that the heads of the written model equal those that were measured, bit for bit."""
    loaded = move_to_device(load_written(JoinedForCausalLM, folder)).eval()
    prompts = sample_ids(joined.tokenizer)
    vocab_size = joined.model.config.vocab_size
    if num_new := len(joined.model.config.new_tokens):
        spread = torch.linspace(vocab_size - num_new, vocab_size - 1, min(num_new, _NUM_NEW_READ))
        prompts.append(spread.round().long()[None].to(prompts[0].device))
    for ids in prompts:
        written, measured = (
            model.routed_logits(model.final_states(ids, preserved=True))
            for model in (loaded, joined.model)
        )
        if not all(map(torch.equal, written, measured)):
            raise ExportParityError(
                "the written folder computes other logits than the measured model; it was removed"
            )
