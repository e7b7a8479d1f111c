"""What a run's folders say of themselves."""

from __future__ import annotations

from pathlib import Path

from scale_cli.errors import StorageError
from scale_cli.storage.atomic import MANIFEST, read_json

TRAINED = "trained.safetensors"


def trained_sha256(folder: Path) -> str:
    """Return the hash of a method folder's parameters, as its manifest has it."""
    try:
        sha256: str = read_json(folder / MANIFEST)["files"][TRAINED]["sha256"]
    except (KeyError, TypeError):
        raise StorageError(f"{folder / MANIFEST}: damaged, not a manifest") from None
    return sha256
