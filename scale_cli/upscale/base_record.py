"""The record of a base by hashes: which model it is."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from scale_cli.storage.records import RunRecord

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
