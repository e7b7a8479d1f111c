"""Local paths of a config, so that a run's own config holds from any folder."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

# Keys that name something to read: a path, or often a hub id.
_READ = {"base", "tokenizer", "path", "folder", "init_from", "model", "dataset"}
_MADE = "cache_dir"
_OF_A_RUN = "manifest.json"  # of a folder that holds a run's config (storage/atomic.py)


def with_absolute_paths(tree: Any, beside: Path) -> Any:
    """Return a config's plain data with absolute paths for all that it reads.

    A relative path is looked for in the working folder, then in `beside`, the config file's folder.
    What is in neither stays as it is: it may be a hub id, and if not, the verb that reads it names
    it.
    """
    if isinstance(tree, list):
        return [with_absolute_paths(value, beside) for value in tree]
    if not isinstance(tree, dict):
        return tree
    found = {
        key: _absolute(value, beside) if key in _READ else with_absolute_paths(value, beside)
        for key, value in tree.items()
    }
    if isinstance(cache := tree.get(_MADE), str) and (beside / _OF_A_RUN).is_file():
        found[_MADE] = _above(cache, beside)
    return found


def _above(cache: str, beside: Path) -> str:
    """Return where a run's cache lies, which its config may name as seen from a folder above the run."""
    above = (folder / cache for folder in beside.absolute().parents)
    return next((str(place) for place in above if place.is_dir()), cache)


def _absolute(written: Any, beside: Path) -> Any:
    if isinstance(written, list):
        return [_absolute(one, beside) for one in written]
    if isinstance(written, dict):  # the section `model`
        return with_absolute_paths(written, beside)
    # What is no path, or an impossible one, is refused by the schema.
    if not isinstance(written, str) or not written or "://" in written or "\0" in written:
        return written
    path = os.path.expanduser(written)  # noqa: PTH111 (a pattern is no Path)
    for folder in (Path.cwd(), beside.absolute()):
        if os.path.lexists(folder / path):
            return os.path.normpath(folder / path)
        if glob.has_magic(path) and any(glob.iglob(path, root_dir=folder, recursive=True)):
            return os.path.join(glob.escape(str(folder)), path)  # noqa: PTH118 (a pattern is no Path)
    return written
