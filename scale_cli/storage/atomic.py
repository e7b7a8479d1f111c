"""Files and folders that are either whole or absent: written beside, synced, renamed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from scale_cli.errors import RunFolderError, StorageError

MANIFEST = "manifest.json"


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.partial")
    try:
        with beside.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON; NaN and infinities are refused, they are not JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file of ours.

    Raises:
        StorageError: missing or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StorageError(f"{path}: missing") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise StorageError(f"{path}: damaged, not JSON ({error})") from None


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors as safetensors.

    Raises:
        StorageError: the file could not be written.
    """
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
        path.chmod(0o644)  # safetensors leaves a file that only its owner can read
    except SafetensorError as error:
        raise StorageError(f"{path}: could not be written ({error})") from None


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read named tensors.

    Raises:
        StorageError: missing, or not a whole safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise StorageError(f"{path}: missing") from None
    except SafetensorError as error:
        raise StorageError(f"{path}: damaged ({error})") from None


def partial_folder(path: Path) -> Path:
    """Return where `new_folder` fills what will be at `path`."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to fill; on leaving, add a manifest, sync, and rename it to `path`.

    A folder of ours already at `path` is replaced. Where the body fails, nothing at `path` has changed.
    """
    if path.is_dir() and any(path.iterdir()) and not (path / MANIFEST).is_file():
        raise RunFolderError(f"{path}: is there already and is not a folder of ours; move it away")
    beside = partial_folder(path)
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
        publish_folder(beside, path)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def publish_folder(beside: Path, path: Path) -> None:
    """Give a filled folder its manifest, sync it, and rename it to `path`, in the same parent folder."""
    (beside / MANIFEST).unlink(missing_ok=True)
    write_json(beside / MANIFEST, {"files": _describe_files(beside)})
    for file in [*beside.rglob("*"), beside]:
        _sync(file)
    _rename(beside, path)
    _sync(path.parent)


def _rename(beside: Path, path: Path) -> None:
    if not path.exists():
        beside.rename(path)
        return
    previous = path.with_name(f".{path.name}.previous")
    shutil.rmtree(previous, ignore_errors=True)
    path.rename(previous)
    try:
        beside.rename(path)
    except BaseException:
        previous.rename(path)
        raise
    shutil.rmtree(previous)


def _describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
        for file in files
    }


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_whole(folder: Path) -> bool:
    """Return whether a folder is there and every file in it is what was written."""
    try:
        verify_folder(folder)
    except StorageError:
        return False
    return True


def verify_folder(folder: Path) -> None:
    """Check every file of a folder against its manifest.

    Raises:
        StorageError: naming the first file that is missing or is not what was written.
    """
    manifest = read_json(folder / MANIFEST)
    try:
        files = {str(name): (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (KeyError, TypeError, AttributeError):
        raise StorageError(f"{folder / MANIFEST}: damaged, not a manifest") from None
    for name, (num_bytes, sha256) in files.items():
        file = folder / name
        if not file.is_file():
            raise StorageError(f"{file}: missing")
        if os.path.realpath(file) != f"{os.path.realpath(folder)}/{name}":  # by a link, or by its name
            raise StorageError(f"{folder}: {name} leads out of the folder")
        if file.stat().st_size != num_bytes or file_sha256(file) != sha256:
            raise StorageError(f"{file}: damaged, its content is not what was written")
