"""A join is held to this: every head is what it is alone, and so is the written folder."""

from __future__ import annotations

from pathlib import Path

import torch

from scale_cli.errors import ExportParityError, PreservationError
from scale_cli.joining.members import JoinedRuns
from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.processes import move_to_device
from scale_cli.upscale.base import load_written
from scale_cli.upscale.preservation import sample_ids

_NUM_NEW_READ = 64  # of the new tokens, spread over all of them: no text covers every script


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
        before, _ = model.config.known_by_heads()[head]
        for ids, of_one in zip(prompts, expected, strict=True):
            ids = torch.where(ids < num_old, ids, ids + before)
            logits = model.routed_logits(model.final_states(ids, preserved=True))[head]
            if not torch.equal(logits, model.of_all_tokens(head, of_one)):
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
