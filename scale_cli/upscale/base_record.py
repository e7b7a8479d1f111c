"""The record of a base by hashes: which model it is, and the proof that it has not changed."""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from scale_cli.config.schema import ModelConfig
from scale_cli.data.tokens import tokenizer_sha256
from scale_cli.errors import ChangedBaseError
from scale_cli.processes import ALONE, Share, gathered, share
from scale_cli.storage.atomic import json_sha256
from scale_cli.storage.records import RunRecord
from scale_cli.upscale.quantised_base import is_quantised, parts_of

# Configuration fields that do not change the computation.
_NOT_COMPUTING = re.compile(
    r"_name_or_path|architectures|attn_implementation|dtype|transformers_version|use_cache"
    r"|(bos|eos|pad)_token_id"
)

REMEDY = "restore the earlier one, or start anew in another output_dir"


@dataclass(frozen=True)
class BaseRecord(RunRecord):
    """The base model that an expansion belongs to; in every method folder."""

    FILE = "base.json"
    name: str  # hub id or folder, as the config gave it
    revision: str | None  # the hub's commit, if it came from there
    dtype: str  # of the hashed tensors
    tensors: dict[str, str]  # SHA-256 of every tensor, by name
    config_sha256: str  # of the configuration's keys that affect computing: sizes, norms, RoPE
    tokenizer_sha256: str  # of the files that the tokenizer saves; empty if not recorded

    @property
    def content_sha256(self) -> str:
        """One hash for the whole model, independent of its folder."""
        lines = "".join(f"{name} {sha256}\n" for name, sha256 in sorted(self.tensors.items()))
        return hashlib.sha256(lines.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {"content_sha256": self.content_sha256, **asdict(self)}


def tensor_sha256(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    if is_quantised(tensor):
        digest.update("".join(map(tensor_sha256, parts_of(tensor))).encode())
        return digest.hexdigest()
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.hexdigest()


def config_sha256(base: PreTrainedModel) -> str:
    """Return one hash over the configuration fields that affect the computation: no names, versions or token ids."""
    fields = base.config.to_diff_dict().items()
    return json_sha256({key: value for key, value in fields if not _NOT_COMPUTING.fullmatch(key)})


def record_base(
    base: PreTrainedModel, model: ModelConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> BaseRecord:
    """Hash every tensor of a base model (a tied one once), its configuration and its tokenizer."""
    return BaseRecord(
        name=model.base,
        revision=getattr(base.config, "_commit_hash", None),
        dtype=model.held_in,
        tensors={name: tensor_sha256(parameter) for name, parameter in base.named_parameters()},
        config_sha256=config_sha256(base),
        tokenizer_sha256="" if tokenizer is None else tokenizer_sha256(tokenizer),
    )


def changed_tensors(
    base: PreTrainedModel, record: BaseRecord, of_machine: Share | None = None
) -> list[str]:
    """Return the names of the tensors that differ from the record: changed, missing or new.

    With `of_machine`, each process hashes its share of the tensors and all get every name, so all must call this.
    """
    tensors, mine = dict(base.named_parameters()), of_machine or ALONE
    names = sorted(tensors.keys() | record.tensors.keys())[mine.index :: mine.num_processes]
    found = [
        name
        for name in names
        if name not in tensors or tensor_sha256(tensors[name]) != record.tensors.get(name)
    ]
    return (
        found
        if of_machine is None
        else sorted({name for some in gathered(found, share()) for name in some})
    )


def check_same_base(
    base: PreTrainedModel, record: BaseRecord, where: str, of_machine: Share | None = None
) -> None:
    """Check that a base model is the one that was recorded; ChangedBaseError names the first tensor that differs."""
    changed = changed_tensors(base, record, of_machine)
    if record.config_sha256 and config_sha256(base) != record.config_sha256:
        changed.append("its config.json")
    if changed:
        raise ChangedBaseError(
            f"{where}: not the base that was widened ({record.name} in {record.dtype}): {changed[0]} differs; {REMEDY}"
        )
