"""Files and folders that are either whole or absent: written beside, synced, renamed.

What a kill leaves behind has a name of its own, which nobody takes for the folder NAME, and goes at the next start:

    .NAME.partial    being filled, or just replaced by the new one
    .NAME.removed    being deleted
    .NAME.previous   only where a file system cannot swap two names: the old one, put back if the new one never came
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError

from scale_cli.errors import RunFolderError, StorageError
from scale_cli.storage.lock import claimed, make_folder, sync

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"
_SEAL = "manifest_sha256"  # of the rest of it: what it says of a file is held by that file, what it says beside by this
# What a folder's numbers may hang on.
_LIBRARIES = ("scale-cli", "torch", "transformers", "accelerate", "peft", "safetensors", "numpy")
# Only a write can fail so.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# renameat2(2): relative to the working directory; swap the two names.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_sha256(value: Any) -> str:
    """Return the SHA-256 of a value as JSON, keys in order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


@contextmanager
def writing(path: Path, beside: Path | None = None) -> Iterator[None]:
    """Turn what the system says of a write that failed into a StorageError of one line that names the file.

    A body that reads elsewhere too gives `beside`, the folder that it fills; without, it does nothing but write.
    """
    try:
        yield
    except Exception as error:
        if (reason := _system_reason(error)) is None:
            raise
        if beside is None or _is_of_writing(error, beside):
            raise StorageError(f"{_written_place(error, path)}: could not be written ({reason})") from None
        if isinstance(error, OSError) and error.filename is not None:
            raise StorageError(f"{os.fsdecode(error.filename)}: cannot be read ({reason})") from None
        raise StorageError(f"{path}: could not be made ({reason})") from None


def _system_reason(error: Exception) -> str | None:
    """Return what the system said of a file, as Python, safetensors or tokenizers tell it; None of any other error."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, SafetensorError) or (type(error) is Exception and "(os error" in str(error)):
        return str(error)
    return None


def _written_place(error: Exception, path: Path) -> Path:
    if not isinstance(error, OSError):
        return path
    # Of a copy that failed the first name is what was read.
    named = Path(os.fsdecode(error.filename2 or error.filename or path))
    # What is deleted with its folder is named by its last name alone.
    return path if named == Path(named.name) else named


def _is_of_writing(error: Exception, folder: Path) -> bool:
    """Return whether an error can only be one of writing, or is one of a file in a folder that is being filled."""
    if not isinstance(error, OSError):
        return "while serializing" in str(error) or any(f"(os error {number})" in str(error) for number in _NO_ROOM)
    names = [Path(os.fsdecode(name)) for name in (error.filename, error.filename2) if name is not None]
    return error.errno in _NO_ROOM or any(name.is_relative_to(folder) for name in names)


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new, never a part of it."""
    beside = partial_folder(path)
    try:
        with writing(path):
            make_folder(path.parent)
            with beside.open("w", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
            sync(path.parent)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON; NaN and infinities are refused, they are not JSON."""
    write_text(path, _json_text(value))


def _json_text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what the system says of a read that failed into one line that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise StorageError(f"{path}: missing") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror or error})") from None


def read_json(path: Path) -> Any:
    """Read a JSON file of ours; StorageError where it is missing or not JSON."""
    try:
        with _reading(path):
            return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise StorageError(f"{path}: damaged, not JSON ({error})") from None


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors as safetensors."""
    from safetensors.torch import save_file  # imports torch, which folders of text do without

    with writing(path):
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read named tensors."""
    from safetensors.torch import load_file

    try:
        with _reading(path):
            return load_file(path)
    except SafetensorError as error:
        raise StorageError(f"{path}: damaged ({error})") from None


def partial_folder(path: Path) -> Path:
    """Return where a file or folder is filled that will be at `path`."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to fill; on leaving, add a manifest, sync, and rename it to `path`.

    A folder of ours already at `path` is replaced. Where the body fails, nothing at `path` has changed.
    """
    _settle(path)
    if path.is_dir() and any(path.iterdir()) and not (path / MANIFEST).is_file():
        raise RunFolderError(f"{path}: is there already and is not a folder of ours; move it away")
    beside = partial_folder(path)
    with _claimed(beside, path):
        try:
            with writing(path):
                _empty(beside)  # of one killed here before
            with writing(path, beside):
                yield beside
            publish_folder(beside, path)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise


@contextmanager
def _claimed(beside: Path, path: Path) -> Iterator[None]:
    with ExitStack() as held:
        with writing(path):
            held.enter_context(claimed(beside))
        yield


def _empty(folder: Path) -> None:
    for inside in folder.iterdir():
        if inside.is_dir() and not inside.is_symlink():
            shutil.rmtree(inside)
        else:
            inside.unlink()


def publish_folder(beside: Path, path: Path) -> None:
    """Give a filled folder its manifest, sync it, and rename it to `path`, in the same parent folder."""
    with writing(path):
        for leftover in (beside / MANIFEST, *beside.rglob(".*.partial")):  # of one killed here before
            leftover.unlink(missing_ok=True)
        described = {"files": _describe_files(beside), "versions": _versions()}
        write_json(beside / MANIFEST, {**described, _SEAL: json_sha256(described)})
        mode = (beside / MANIFEST).stat().st_mode  # as the umask has it; safetensors lets only the owner read
        for path_in_it in [*beside.rglob("*"), beside]:
            if path_in_it.is_file():
                path_in_it.chmod(mode)
            sync(path_in_it)
        _rename(beside, path)


def _rename(beside: Path, path: Path) -> None:
    """Rename a folder to `path`, where a folder may be; at every instant the old one or the new one is there whole."""
    if not path.exists():
        beside.rename(path)
        sync(path.parent)
        return
    if _swap(beside, path):
        sync(path.parent)
        shutil.rmtree(beside)
        return
    previous = path.with_name(f".{path.name}.previous")
    shutil.rmtree(previous, ignore_errors=True)
    path.rename(previous)
    try:
        beside.rename(path)
    except BaseException:
        previous.rename(path)
        raise
    sync(path.parent)
    shutil.rmtree(previous)


def _swap(one: Path, other: Path) -> bool:
    """Swap two names in one step; return False where the system or the file system cannot: Linux mostly can."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _settle(path: Path) -> None:
    """End a replacement that was killed between or after its two renames, where two were needed."""
    previous = path.with_name(f".{path.name}.previous")
    if not path.exists() and is_whole(previous):
        previous.rename(path)
    shutil.rmtree(previous, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Remove a folder: it is gone at once, even where this process dies before its last file is."""
    removed = path.with_name(f".{path.name}.removed")
    with writing(path):
        shutil.rmtree(removed, ignore_errors=True)
        path.rename(removed)
        shutil.rmtree(removed)


def remove_leftovers(folder: Path) -> None:
    """Remove the folders that killed processes left half-written or half-deleted where nobody else writes now."""
    for leftover in folder.glob(".*"):
        if leftover.suffix == ".previous":
            _settle(folder / leftover.stem.removeprefix("."))
        elif leftover.suffix in (".partial", ".removed"):
            shutil.rmtree(leftover)


def _describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
        for file in files
    }


@cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for library in _LIBRARIES:
        with suppress(PackageNotFoundError):  # PEFT is an extra
            versions[library] = version(library)
    return versions


def changed_versions(folder: Path) -> list[str]:
    """Return one `library before -> now` for every library that was another version when a folder was written."""
    before = read_json(folder / MANIFEST)["versions"]
    return [f"{name} {before[name]} -> {now}" for name, now in _versions().items() if before.get(name, now) != now]


class DescribedFile(NamedTuple):
    """A file as a manifest has it."""

    num_bytes: int
    sha256: str


def described_files(folder: Path) -> dict[str, DescribedFile]:
    """Return what a folder's manifest says of each file, by its name; StorageError where there is none that is good."""
    manifest = read_json(folder / MANIFEST)
    try:
        files = manifest["files"].items()
        return {str(name): DescribedFile(entry["bytes"], entry["sha256"]) for name, entry in files}
    except (KeyError, TypeError, AttributeError):
        raise StorageError(f"{folder / MANIFEST}: damaged, not a manifest") from None


def is_whole(folder: Path) -> bool:
    """Return whether a folder is there and every file in it is what was written."""
    try:
        verify_folder(folder)
    except StorageError:
        return False
    return True


def verify_folder(folder: Path) -> None:
    """Check every file of a folder against its manifest; StorageError names the first that is not what was written."""
    manifest, files = read_json(folder / MANIFEST), described_files(folder)
    described = {key: value for key, value in manifest.items() if key != _SEAL}
    try:
        as_written = (folder / MANIFEST).read_text(encoding="utf-8") == _json_text(manifest)
    except ValueError:  # a NaN
        as_written = False
    if not as_written or manifest.get(_SEAL) != json_sha256(described):
        raise StorageError(f"{folder / MANIFEST}: damaged, its content is not what was written")
    for name, (num_bytes, sha256) in files.items():
        if os.path.realpath(folder / name) != f"{os.path.realpath(folder)}/{name}":  # by a link, or by its name
            raise StorageError(f"{folder}: {name} leads out of the folder")
        _verify_file(folder / name, num_bytes, sha256)


def _verify_file(file: Path, num_bytes: int, sha256: str) -> None:
    if not file.is_file():
        raise StorageError(f"{file}: missing")
    with _reading(file):
        good = file.stat().st_size == num_bytes and file_sha256(file) == sha256
    if not good:
        raise StorageError(f"{file}: damaged, its content is not what was written")
