"""Files and folders that are either whole or absent: written under another name, synced, renamed.

A killed process leaves only these names behind, never a broken NAME; the next start removes them:

    .NAME.partial    being filled, or deleted
    .NAME.previous   just replaced by the new one; put back if the new one never came
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from scale_cli.errors import RunFolderError, StorageError, one_line
from scale_cli.terminal import bytes_bar

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"
# Hash of the rest of the manifest, which has the hashes of all other files.
_SEAL = "manifest_sha256"
# Libraries that may change a folder's numbers.
_LIBRARIES = ("scale-cli", "torch", "transformers", "accelerate", "peft", "safetensors", "numpy")
_BYTES_AT_ONCE = 1 << 20  # read to be hashed
# Folders that this process has claimed: a verb that runs other verbs already holds their folders.
_claimed: set[str] = set()


def file_sha256(path: Path, moved: Callable[[int], object] | None = None) -> str:
    """Return a file's SHA-256; `moved` gets the number of bytes of every piece that is read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_BYTES_AT_ONCE):
            digest.update(piece)
            if moved is not None:
                moved(len(piece))
    return digest.hexdigest()


def json_sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


# Files


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a write error, raised by Python, safetensors or tokenizers, into a StorageError that
    names a path.
    """
    try:
        yield
    except Exception as error:
        of_tokenizers = type(error) is Exception and "(os error" in str(error)
        if isinstance(error, OSError | SafetensorError) or of_tokenizers:
            raise StorageError(f"{path}: could not be written ({one_line(error)})") from None
        raise


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn the errors of a missing, unreadable or damaged file into a StorageError that names it."""
    try:
        yield
    except FileNotFoundError:
        raise StorageError(f"{path}: missing") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, LookupError, TypeError, RecursionError, SafetensorError) as error:
        raise StorageError(f"{path}: damaged ({one_line(error)})") from None


def write_text(path: Path, text: str) -> None:
    """Write a file; a reader sees the old text or the new one, never a part of it."""
    partial = partial_path(path)
    try:
        with writing(path):
            make_folder(path.parent)
            with partial.open("w", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            sync(path.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON; ValueError for NaN and infinities, which are not JSON."""
    write_text(path, _json_text(value))


def _json_text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_json(path: Path) -> Any:
    """Read a JSON file; StorageError if it is missing or not JSON."""
    with _reading(path):
        return json.loads(path.read_text(encoding="utf-8"))


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], header: dict[str, str] | None = None
) -> None:
    """Write a file of tensors and sync it, perhaps on another machine than the one that publishes
    its folder.
    """
    from safetensors.torch import save_file  # imports torch, which text folders do not need

    with writing(path):
        make_folder(path.parent)
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            path,
            metadata=header,
        )
        sync(path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    with _reading(path):
        return load_file(path)


def load_fitting(path: Path, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file; StorageError if their names or shapes are not the wanted ones."""
    tensors = load_tensors(path)
    if problem := misfit(tensors, wanted):
        raise StorageError(f"{path}: does not fit this model ({problem})")
    return tensors


def misfit(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str | None:
    """Return the first difference in names, then in shapes; None if all are the wanted ones."""
    if odd := sorted(wanted.keys() ^ tensors.keys()):
        return f"{odd[0]} is in only one of them"
    odd = sorted(name for name, tensor in tensors.items() if tensor.shape != wanted[name].shape)
    return f"{odd[0]} has another shape" if odd else None


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, and sync each new name to the disk."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Folders


def partial_path(path: Path) -> Path:
    """Return the name under which a file or folder is written, or deleted."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to fill; on leaving, add a manifest, sync, and rename it to `path`.

    A folder of ours at `path` is replaced. If the body fails, `path` is unchanged.
    """
    _put_back(path)
    if path.is_dir() and any(path.iterdir()) and not (path / MANIFEST).is_file():
        raise RunFolderError(f"{path}: exists already and was not written by scale; move it away")
    partial = partial_path(path)
    with claimed(partial):
        try:
            with writing(path):
                _empty(partial)  # a killed process may have left files
                yield partial
            publish_folder(partial, path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _empty(folder: Path) -> None:
    for inside in folder.iterdir():
        if inside.is_dir() and not inside.is_symlink():
            shutil.rmtree(inside)
        else:
            inside.unlink()


def publish_folder(partial: Path, path: Path) -> None:
    """Give a filled folder its manifest, sync it, and rename it to `path`, in the same parent
    folder.
    """
    with writing(path):
        for leftover in (partial / MANIFEST, *partial.rglob(".*.partial")):  # of a killed process
            leftover.unlink(missing_ok=True)
        files = sorted(file for file in partial.rglob("*") if file.is_file())
        num_bytes = {file: file.stat().st_size for file in files}
        with bytes_bar(f"hashing {path.name}", sum(num_bytes.values())) as moved:
            entries = {
                file.relative_to(partial).as_posix(): {
                    "bytes": num_bytes[file],
                    "sha256": file_sha256(file, moved),
                }
                for file in files
            }
        manifest = {"files": entries, "versions": _versions()}
        write_json(partial / MANIFEST, {**manifest, _SEAL: json_sha256(manifest)})
        # As the umask sets it; safetensors lets only the owner read.
        mode = (partial / MANIFEST).stat().st_mode
        for inside in [*partial.rglob("*"), partial]:
            if inside.is_file():
                inside.chmod(mode)
            sync(inside)
        _replace(partial, path)


def _replace(partial: Path, path: Path) -> None:
    """Rename a folder to `path`; an old folder there is kept as .NAME.previous until the new one is
    in place.
    """
    previous = path.with_name(f".{path.name}.previous")
    if path.exists():
        path.rename(previous)
    try:
        partial.rename(path)
    except BaseException:
        if previous.exists():
            previous.rename(path)
        raise
    sync(path.parent)
    if previous.exists():
        shutil.rmtree(previous)


def _put_back(path: Path) -> None:
    """Finish a killed replacement: put the previous folder back, or delete it if the new one is in
    place.
    """
    previous = path.with_name(f".{path.name}.previous")
    if not path.exists() and is_whole(previous):
        previous.rename(path)
    shutil.rmtree(previous, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Remove a folder; its name is gone at once, even if this process dies before the last file is
    deleted.
    """
    rubbish = partial_path(path)
    with writing(path):
        shutil.rmtree(rubbish, ignore_errors=True)
        path.rename(rubbish)
        shutil.rmtree(rubbish)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left half-written or half-deleted; call it only if no other
    process writes here.
    """
    for leftover in folder.glob(".*"):
        if leftover.suffix == ".previous":
            _put_back(folder / leftover.stem.removeprefix("."))
        elif leftover.is_dir() and leftover.suffix == ".partial":
            shutil.rmtree(leftover)
        elif leftover.suffix == ".partial":
            leftover.unlink()


# Manifests


@cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for library in _LIBRARIES:
        with suppress(PackageNotFoundError):  # PEFT is an extra
            versions[library] = version(library)
    return versions


def changed_versions(folder: Path) -> list[str]:
    """Return `library before -> now` for every library whose version has changed since a folder was
    written.
    """
    before = _read_manifest(folder)["versions"]
    return [
        f"{name} {before[name]} -> {now}"
        for name, now in _versions().items()
        if before.get(name, now) != now
    ]


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Return a folder's manifest; StorageError if it is missing, or not byte for byte as written."""
    path = folder / MANIFEST
    with _reading(path):
        text = path.read_text(encoding="utf-8")
        manifest = json.loads(text)
        described = {key: manifest[key] for key in ("files", "versions")}
        if text != _json_text({**described, _SEAL: json_sha256(described)}):
            raise ValueError("its content has changed since it was written")
    return described


def described_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return each file's `bytes` and `sha256` from a folder's manifest, by file name."""
    return _read_manifest(folder)["files"]


def is_whole(folder: Path) -> bool:
    """Return whether a folder exists and every file in it is as written."""
    try:
        verify_folder(folder)
    except StorageError:
        return False
    return True


def is_as_written(folder: Path, name: str) -> bool:
    """Return whether one small file of a folder is there, and as its manifest says."""
    try:
        content = (folder / name).read_bytes()
        recorded: str = described_files(folder)[name]["sha256"]
        return hashlib.sha256(content).hexdigest() == recorded
    except (StorageError, OSError, KeyError):
        return False


def verify_folder(folder: Path) -> None:
    """Check every file of a folder against its manifest; StorageError names the first that is not
    as written.
    """
    files = described_files(folder)
    num_bytes = sum(described["bytes"] for described in files.values())
    with bytes_bar(f"checking {folder.name}", num_bytes) as moved:
        for name, described in files.items():
            file = folder / name
            # Through a link, or through its name.
            if os.path.realpath(file) != f"{os.path.realpath(folder)}/{name}":
                raise StorageError(f"{folder}: {name} points outside the folder")
            with _reading(file):
                is_same_size = file.stat().st_size == described["bytes"]
                if not is_same_size or file_sha256(file, moved) != described["sha256"]:
                    raise ValueError("its content has changed since it was written")


# One process at a time in a folder


@contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Make a folder if needed and lock it; another process that wants it waits.

    The system releases the lock when a process ends, however it ends. If the holder renamed or
    removed the folder, the waiting process gets a new one.
    """
    descriptor = _lock(folder, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make a folder if needed and lock it; RunFolderError in another process that wants it.

    If this process already holds it, nothing changes. Folders made for it that are still empty at
    the end are removed. On a file system without locks, no process is refused.
    """
    place = os.path.realpath(folder)
    if place in _claimed:
        yield
        return
    new = [missing for missing in (folder, *folder.parents) if not missing.exists()]
    descriptor = _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _claimed.add(place)
    try:
        yield
    finally:
        _claimed.discard(place)
        with suppress(OSError):  # it is not empty
            for made in new:
                made.rmdir()
        os.close(descriptor)


def _lock(folder: Path, operation: int) -> int:
    with writing(folder):
        while True:
            make_folder(folder.parent)
            with suppress(FileExistsError):  # another process made it
                folder.mkdir()
            try:
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:  # another process removed it meanwhile
                continue
            try:
                fcntl.flock(descriptor, operation)
            except BlockingIOError:
                os.close(descriptor)
                raise RunFolderError(
                    f"{folder}: another process is at work here; wait for it, or end it"
                ) from None
            except OSError:  # a file system without locks
                if not operation & fcntl.LOCK_NB:
                    os.close(descriptor)
                    raise
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), folder.stat()):
                    return descriptor
            os.close(descriptor)  # another process has renamed or removed it
