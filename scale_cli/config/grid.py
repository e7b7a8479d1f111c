"""Several values of some keys, as the command line gives them: `key=a,b,c`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import product

from scale_cli.config.safe_yaml import parse
from scale_cli.errors import ConfigError

Values = tuple[str, ...]  # key=value, of the keys that have several
_LONGEST_NAME = 100


@dataclass(frozen=True)
class Grid:
    """The overrides of several runs of one config: those that all share, and the values of each."""

    shared: list[str]
    points: list[Values]


def parse_grid(arguments: Sequence[str], *, paired: bool) -> Grid:
    """Return the runs that some arguments stand for: `key=value` of all, and `key=a,b,c`, a value each.

    Values are YAML, and a list in brackets is one. `paired`, the keys' first values make a run, then their second ones;
    otherwise every combination does.
    """
    shared, axes = [], []
    for argument in arguments:
        key, _, written = argument.partition("=")
        values = parse(f"[{written}]", f"override {argument!r}")
        if len(values) > 1:
            axes.append([f"{key}={json.dumps(value, ensure_ascii=False)}" for value in values])
        else:
            shared.append(argument)
    if not axes:
        raise ConfigError("nothing to sweep over: give a key several values, as in train.lr=1e-3,2e-3")
    if not paired:
        return Grid(shared, list(product(*axes)))
    if len({len(values) for values in axes}) > 1:
        raise ConfigError("--paired: one key has more values than another")
    return Grid(shared, list(zip(*axes, strict=True)))


def name_of(values: Values) -> str:
    """Return a name for a run's folder: its values, and where they make no short and plain one, a hash of them."""
    parts = [value.partition("=") for value in values]
    whole = "_".join(f"{key.rpartition('.')[2]}={_bare(value)}" for key, _, value in parts)
    name = re.sub(r"[^A-Za-z0-9.=_-]", "", whole)[:_LONGEST_NAME]
    return name if name == whole else f"{name}-{sha256(json.dumps(values).encode()).hexdigest()[:8]}"


def _bare(value: str) -> str:
    """Return a value without quotation marks, unless it would be another one so: the text "1" is no number."""
    bare = value.replace('"', "")
    try:
        return value if json.loads(bare) != json.loads(value) else bare
    except ValueError:
        return bare
