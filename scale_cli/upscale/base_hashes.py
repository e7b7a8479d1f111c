"""The hashes of a base: what a record of it holds, and the proof that it has not changed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from scale_cli.config.schema import ModelConfig
from scale_cli.data.tokens import tokenizer_sha256
from scale_cli.errors import ChangedBaseError
from scale_cli.processes import ALONE, Share, gathered, share
from scale_cli.storage.atomic import json_sha256
from scale_cli.terminal import bytes_bar
from scale_cli.upscale.base_files import REMEDY, BaseRecord
from scale_cli.upscale.quantised_base import is_quantised, parts_of

# Configuration fields that do not change the computation.
_NOT_COMPUTING = re.compile(
    r"_name_or_path|architectures|attn_implementation|dtype|transformers_version|use_cache"
    r"|(bos|eos|pad)_token_id"
)
_THREADS = 8


def tensor_sha256(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    if is_quantised(tensor):
        digest.update("".join(map(tensor_sha256, parts_of(tensor))).encode())
        return digest.hexdigest()
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.hexdigest()


def versions(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Return how often each tensor was written to in place, which torch counts, but not by `.data`."""
    return {name: [part._version for part in parts_of(tensor)] for name, tensor in tensors.items()}


def config_sha256(base: PreTrainedModel) -> str:
    """Return one hash over the configuration fields that affect the computation: no names, versions
    or token ids.
    """
    fields = base.config.to_diff_dict().items()
    return json_sha256({key: value for key, value in fields if not _NOT_COMPUTING.fullmatch(key)})


def record_base(
    base: PreTrainedModel,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    known: dict[str, str] | None = None,  # by `load_hashed_base`
) -> BaseRecord:
    """Hash every tensor of a base model (a tied one once), its configuration and its tokenizer."""
    hashes = {} if known is None else known
    _hash(dict(base.named_parameters()), hashes)
    return BaseRecord(
        name=model.base,
        revision=getattr(base.config, "_commit_hash", None),
        dtype=model.held_in,
        tensors={name: hashes[name] for name, _ in base.named_parameters()},
        config_sha256=config_sha256(base),
        tokenizer_sha256="" if tokenizer is None else tokenizer_sha256(tokenizer),
    )


def _hash(tensors: Mapping[str, Tensor], known: dict[str, str]) -> None:
    """Hash the tensors that are not known yet; those of a CPU in threads, since hashlib releases
    the interpreter.

    Copies from a device are made one by one, in the calling thread's stream.
    """
    new = {name: tensor for name, tensor in tensors.items() if name not in known}
    on_cpu = all(tensor.device.type == "cpu" for tensor in new.values())
    num_bytes = sum(tensor.nbytes for tensor in new.values())
    with (
        bytes_bar("hashing the base", num_bytes) as moved,
        ThreadPoolExecutor(_THREADS) as threads,
    ):
        hashes = (threads.map if on_cpu else map)(tensor_sha256, new.values())
        for (name, tensor), sha256 in zip(new.items(), hashes, strict=True):
            known[name] = sha256
            moved(tensor.nbytes)


def changed_tensors(
    base: PreTrainedModel,
    record: BaseRecord,
    of_machine: Share | None = None,
    known: dict[str, str] | None = None,  # by `load_hashed_base`
) -> list[str]:
    """Return the names of the tensors that differ from the record: changed, missing or new.

    With `of_machine`, each process hashes its share of the tensors and all get every name, so all
    must call this.
    """
    hashes = {} if known is None else known
    tensors = dict(base.named_parameters())
    mine = of_machine or ALONE
    names = sorted(tensors.keys() | record.tensors.keys())[mine.index :: mine.num_processes]
    _hash({name: tensors[name] for name in names if name in tensors}, hashes)
    found = [
        name for name in names if name not in tensors or hashes[name] != record.tensors.get(name)
    ]
    if of_machine is None:
        return found
    return sorted({name for some in gathered(found, share()) for name in some})


def check_same_base(
    base: PreTrainedModel,
    record: BaseRecord,
    where: str,
    of_machine: Share | None = None,
    known: dict[str, str] | None = None,  # by `load_hashed_base`
) -> None:
    """Check that a base model is the one that was recorded.

    Raises:
        ChangedBaseError: it names the first tensor that differs.
    """
    changed = changed_tensors(base, record, of_machine, known)
    if record.config_sha256 and config_sha256(base) != record.config_sha256:
        changed.append("its config.json")
    if changed:
        raise ChangedBaseError(
            f"{where}: not the base that the run began with ({record.name} in {record.dtype}): "
            f"{changed[0]} differs; {REMEDY}"
        )
