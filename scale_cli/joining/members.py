"""Load finished runs, and put their expansions on one base."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from scale_cli.config.schema import RunConfig
from scale_cli.errors import RunFolderError
from scale_cli.evaluation.results import HEADS
from scale_cli.joining.tokenizer import RunTokens, joined_tokenizer
from scale_cli.model.configuration_scale import JoinedConfig
from scale_cli.model.expansion_scale import Expansion
from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.model.vocabulary_scale import composed, pieces_of
from scale_cli.runs.folder import RunFolder
from scale_cli.runs.opened import open_folder
from scale_cli.upscale.base_files import BaseRecord
from scale_cli.upscale.base_hashes import check_same_base, record_base, tensor_sha256
from scale_cli.upscale.base_tokenizer import check_tokenizer
from scale_cli.upscale.preservation import own_logits, sample_ids

# Configuration fields that a member keeps from its run; the joined model has its own router.
_SIZES = (
    "expansion_hidden_size",
    "expansion_intermediate_size",
    "expansion_num_attention_heads",
    "expansion_num_key_value_heads",
    "attention_collaboration_layers",
    "mlp_collaboration_layers",
)
_TOKENS = ("new_tokens", "own_pieces")  # kept too, if the run has new tokens


@dataclass(frozen=True)
class Member:
    """One run: its expansion, and what its head computes in the run alone."""

    name: str  # of its head
    expansion: Expansion
    sizes: Any  # the ScaleConfig of the run's model
    folder: Path  # where it was read
    run: RunConfig
    sha256: str  # of its tensors
    prompts: list[Tensor]  # the sample texts, in the tokens of the run
    logits: list[Tensor]  # of its head on them


@dataclass(frozen=True)
class JoinedRuns:
    """Several joined runs."""

    model: JoinedForCausalLM  # in evaluation mode
    members: list[Member]
    record: BaseRecord  # of the base
    base_tokenizer: PreTrainedTokenizerBase
    tokenizer: PreTrainedTokenizerBase  # the base's, with the new tokens of all runs
    prompts: list[Tensor]  # the sample texts, in the base's own tokens
    base_logits: list[Tensor]  # the base's own on them


def join_runs(runs: Sequence[Path], prior: float | None) -> JoinedRuns:
    """Load finished runs, one after another, and put their expansions on the first one's base.

    A run is given by its folder, its `final/`, or an adapter export.
    """
    base: Any = None
    members: list[Member] = []
    tokens: list[RunTokens] = []
    for run in runs:
        final = open_folder(_finished_folder(run))
        widened = final.load_to_export()
        if not isinstance(widened, ScaleForCausalLM):
            raise RunFolderError(
                f"{run}: has no expansion (method.variant: {final.method.variant}); "
                "only widened runs can be joined"
            )
        of_base = final.run.base_tokenizer
        if base is None:
            base = widened.base
            record = record_base(base, final.run.config.model, of_base)
        else:
            where = f"{run}: stands on another base than {runs[0]}"
            check_same_base(widened.base, record, where=where)
            check_tokenizer(of_base, record)
        tokens.append(RunTokens(run, final.run.config, of_base, final.tokenizer))

        hashes = hashlib.sha256()
        for parameter, tensor in sorted(widened.expansion.named_parameters()):
            hashes.update(f"{parameter} {tensor_sha256(tensor)}\n".encode())
        if any(hashes.hexdigest() == other.sha256 for other in members):
            raise RunFolderError(f"{run}: given twice; name each run once")
        config = final.run.config
        if final.path.name == "final":  # the run may have been moved
            config = config.model_copy(update={"output_dir": final.path.parent})
        prompts = sample_ids(final.tokenizer)
        members.append(
            Member(
                name=free_name(
                    final.run.config.output_dir.name, [*HEADS, *(other.name for other in members)]
                ),
                expansion=widened.expansion,
                sizes=widened.config,
                folder=final.path,
                run=config,
                sha256=hashes.hexdigest(),
                prompts=prompts,
                logits=own_logits(widened, prompts),
            )
        )

    base_tokenizer = tokens[0].base_tokenizer
    prompts = sample_ids(base_tokenizer)
    return JoinedRuns(
        base_logits=own_logits(base, prompts),
        prompts=prompts,
        tokenizer=joined_tokenizer(tokens, base.config.vocab_size),
        base_tokenizer=base_tokenizer,
        record=record,
        members=members,
        model=put_together(base, members, prior),
    )


def _finished_folder(run: Path) -> Path:
    layout = RunFolder(run)
    if layout.final.is_dir():
        return layout.final
    if layout.upscaled.is_dir():
        raise RunFolderError(f"{run}: not finished, as it has no final/; run `scale train` first")
    if not BaseRecord.is_in(run):
        raise RunFolderError(
            f"{run}: not a finished run, its final/ or an adapter export; give one of these"
        )
    return run


def free_name(name: str, taken: Collection[str]) -> str:
    """Return a name, with a number after it if it is taken."""
    numbered = (f"{name}-{number}" for number in count(2))
    return next(free for free in chain([name], numbered) if free not in taken)


def put_together(
    base: Any,  # becomes a part of it
    members: Sequence[Member],
    prior: float | None = None,  # of the base head at the first token; None: an even share of all
) -> JoinedForCausalLM:
    """Return one model of a base and copies of some expansions, in evaluation mode."""
    described = []
    for member in members:
        kept = {name: getattr(member.sizes, name) for name in (*_SIZES, *_TOKENS)}
        expansion = {name: value for name, value in kept.items() if value or name in _SIZES}
        described.append({"name": member.name, "expansion": expansion})
    config = JoinedConfig(
        base_config=base.config.to_diff_dict(), members=described, router_prior=prior
    )
    model = JoinedForCausalLM(config, base)
    for head, (place, member) in enumerate(zip(model.members, members, strict=True), start=1):
        tensors = member.expansion.state_dict()
        rows_VE = tensors["embed_tokens.weight"]
        tensors["embed_tokens.weight"] = _rows_of_all_tokens(rows_VE, config, head)
        place.load_state_dict(tensors, strict=True)
    model.to(base.device)
    return model.eval()


def _rows_of_all_tokens(rows_VE: Tensor, config: JoinedConfig, head: int) -> Tensor:
    """Return an expansion's embedding with rows for the other members' tokens, composed like the
    rows of x.
    """
    ids = config.token_ids(head)
    pieces = pieces_of(config.new_tokens)
    num_old = len(ids) - len(pieces)
    if not (unknown := ids[len(rows_VE) :]):
        return rows_VE
    added = composed(rows_VE, [pieces[index - num_old] for index in unknown]).to(rows_VE)
    return torch.cat([rows_VE, added])[torch.tensor(ids).argsort()]
