"""What is joined: the expansions of finished runs on one plain base, each once, every one after its parent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from scale_cli.config.schema import RunConfig
from scale_cli.errors import ConfigError, RunFolderError
from scale_cli.join.tokens import joined_tokenizer, tokens_of
from scale_cli.model.configuration_scale import JoinedConfig
from scale_cli.model.expansion_scale import Expansion
from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.model.vocabulary_scale import composed
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.records import BaseRecord
from scale_cli.upscale.base import check_same_base, record_base, root_model, stages_below, tensor_sha256
from scale_cli.upscale.preservation import own_logits, sample_ids
from scale_cli.upscale.run import MethodFolder, open_folder
from scale_cli.upscale.tokenizer import check_tokenizer

# What a member's expansion takes of its run's configuration; the router is the joined model's own.
_SIZES = (
    "expansion_hidden_size",
    "expansion_intermediate_size",
    "expansion_num_attention_heads",
    "expansion_num_key_value_heads",
    "attention_collaboration_layers",
    "mlp_collaboration_layers",
)

# And where it brings new tokens.
_TOKENS = ("new_tokens", "own_pieces")


@dataclass(frozen=True)
class Member:
    """One expansion."""

    name: str  # of its head
    parent: int  # the head whose streams it reads: 0 for the base, k for the k-th member
    expansion: Expansion  # its blocks
    config: PreTrainedConfig  # of the run's model; its sizes are read
    folder: Path  # where it was read
    sha256: str  # of its tensors, and of those of its parents
    logits: list[Tensor]  # its head's on the sample texts, from the run alone
    prompts: list[Tensor]  # those texts, in the tokens of its run


@dataclass(frozen=True)
class JoinedRuns:
    """Several runs put together."""

    model: JoinedForCausalLM  # in evaluation mode
    members: list[Member]  # its expansions
    configs: list[RunConfig]  # of the runs, as they were given
    record: BaseRecord  # of the plain base
    tokenizer: PreTrainedTokenizerBase  # the base's, with the new tokens of all runs
    prompts: list[Tensor]  # the sample texts, in the base's own tokens
    base_logits: list[Tensor]  # the base's own on those


def join_runs(runs: Sequence[Path], prior: float | None, switch_rate: float, rule: str = "posterior") -> JoinedRuns:
    """Load finished runs, one after another, and put their expansions on the first one's base.

    Runs are named by their folder, their `final/`, or an adapter export; one upon another run brings that one along.
    The router is set as by `stack_reads`.
    """
    widened, final = _open_run(runs[0])
    base, of_runs = widened.root, [tokens_of(runs[0], final)]
    record = record_base(base, root_model(final.run.config.model), of_runs[0].base_tokenizer)
    members: list[Member] = []
    configs = []
    for run in runs:
        if run is not runs[0]:
            widened, final = _open_run(run)
            of_runs.append(tokens_of(run, final))
            check_same_base(widened.root, record, where=f"{run}: stands on another base than {runs[0]}")
            check_tokenizer(of_runs[-1].base_tokenizer, record)
        _add_stages(members, widened, final.path, final.run.config, sample_ids(final.tokenizer))
        configs.append(_where_it_lies(final))
    if rule == "mean" and len(members) == 1:
        raise ConfigError(f"--rule mean: {members[0].name} is the only expansion; give several runs")
    tokenizer = joined_tokenizer(of_runs, base.config.vocab_size)
    prompts = sample_ids(of_runs[0].base_tokenizer)
    base_logits = own_logits(base, prompts)
    model = stack_reads(base, members, prior, switch_rate, rule)
    return JoinedRuns(model, members, configs, record, tokenizer, prompts, base_logits)


def _open_run(run: Path) -> tuple[ScaleForCausalLM, MethodFolder]:
    final = open_folder(_finished_folder(run))
    widened = final.load()
    if not isinstance(widened, ScaleForCausalLM):
        raise RunFolderError(f"{run}: holds no expansion (method.variant: {final.method.variant})")
    return widened, final


def _finished_folder(run: Path) -> Path:
    layout = RunFolder(run)
    folder = layout.final if layout.final.is_dir() else run
    if layout.upscaled.is_dir() and folder is run:
        raise RunFolderError(f"{run}: is not finished: it has no final/; run `scale train` first")
    if not BaseRecord.is_in(folder):
        raise RunFolderError(f"{run}: neither a finished run, nor its final/, nor an adapter export")
    return folder


def _where_it_lies(final: MethodFolder) -> RunConfig:
    """Return a run's config with the folder that the run lies in now."""
    config = final.run.config
    root = final.path.parent if final.path.name == "final" else config.output_dir
    return config.model_copy(update={"output_dir": root})


def _add_stages(
    members: list[Member], widened: ScaleForCausalLM, folder: Path, config: RunConfig, prompts: list[Tensor]
) -> int:
    """Add what a model widens its base by, after what that base itself is widened by; return its head."""
    parent, below = 0, next(stages_below(config.model), None)
    if isinstance(widened.base, ScaleForCausalLM) and below is not None:
        parent = _add_stages(members, widened.base, *below, prompts)
    sha256 = _expansion_sha256(widened, members[parent - 1].sha256 if parent else "")
    known = [member.sha256 for member in members]
    if sha256 in known:
        return known.index(sha256) + 1
    name = _free_name(config.output_dir.name, [member.name for member in members])
    logits = own_logits(widened, prompts)
    members.append(Member(name, parent, widened.expansion, widened.config, folder, sha256, logits, prompts))
    return len(members)


def _expansion_sha256(widened: ScaleForCausalLM, parent_sha256: str) -> str:
    lines = [f"{name} {tensor_sha256(tensor)}\n" for name, tensor in sorted(widened.expansion.named_parameters())]
    return hashlib.sha256("".join([parent_sha256, "\n", *lines]).encode()).hexdigest()


def _free_name(name: str, taken: list[str]) -> str:
    """Return a name that no head has yet."""
    numbered = (f"{name}-{number}" for number in count(2))
    return next(free for free in chain([name], numbered) if free not in ["base", *taken])


def stack_reads(
    base: Any,  # becomes a part of it
    members: Sequence[Member],  # each after its parent
    prior: float | None = None,  # weight of the base head at the first token; None for an even share of every head
    switch_rate: float = 0.0,  # of the posterior rule
    rule: str = "posterior",  # or `mean` of all heads but the base's
) -> JoinedForCausalLM:
    """Return one model of a plain base and copies of some expansions, in evaluation mode."""
    described = [
        {
            "name": member.name,
            "parent": member.parent,
            "expansion": {
                name: value for name in (*_SIZES, *_TOKENS) if (value := getattr(member.config, name)) or name in _SIZES
            },
        }
        for member in members
    ]
    config = JoinedConfig(base.config.to_diff_dict(), described, prior, switch_rate, rule)
    model = JoinedForCausalLM(config, base)
    for head, (place, member) in enumerate(zip(model.members, members, strict=True), start=1):
        tensors = member.expansion.state_dict()
        tensors["embed_tokens.weight"] = _rows_of_all_tokens(tensors["embed_tokens.weight"], config, head)
        place.load_state_dict(tensors, strict=True)
    model.to(base.device)
    return model.eval()


def _rows_of_all_tokens(rows_VE: Tensor, config: JoinedConfig, head: int) -> Tensor:
    """Return an expansion's embedding with rows for the others' tokens, made as those of x are."""
    unknown, pieces = config.unknown_tokens(head), config.pieces()
    if not unknown:
        return rows_VE
    added = composed(rows_VE, [pieces[at] for at in unknown]).to(rows_VE)
    return torch.cat([rows_VE, added])[torch.tensor(config.token_ids(head)).argsort()]
