"""Whether two configs describe the same run: what may change between two verbs, and what may not."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from scale_cli.config.schema import RunConfig
from scale_cli.errors import ConfigError, RunFolderError
from scale_cli.values import Change

# Where something lies is no matter to whoever compares its content: the hashes of the base, or of every corpus.
BASE_KEYS = r"model\.(base|revision|tokenizer)"
LOCATION_KEYS = BASE_KEYS + r"|corpus\.sources\.\d+\.(path(\.\d+)?|revision)"
NO_KEYS = r"(?!)"
# What the scores of a run's periodic evaluations hang on.
_SCORED_BY = (
    r"train\.eval_max_documents|method\.router\..+"
    r"|evaluation\.(sequence_length|mixed_precision|perplexity\.\d+\.(?!path|revision).+)"
)
_MAX_LISTED = 8


def _marked(section: type[BaseModel], mark: Change, prefix: str = "") -> Iterator[str]:
    # Lists, and sections that may be null, are not entered: a mark on a key of a source (`weight`) does nothing.
    for name, field in section.model_fields.items():
        if mark in field.metadata:
            yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _marked(field.annotation, mark, f"{prefix}{name}.")


FREE, ACCEPTABLE = (frozenset(_marked(RunConfig, mark)) for mark in (Change.FREE, Change.ACCEPTED))
# The router acts in evaluation and generation only, so it may be set after training: a section of its own here.
_ROUTER = "method.router."
# Distillation acts in training only, so it may be set after upscaling.
_DISTILLATION = "method.distillation."
UPSCALE_SECTIONS = ("seed", "model", "method")
TRAIN_SECTIONS = (*UPSCALE_SECTIONS, "corpus", "train")
EVALUATE_SECTIONS = (*TRAIN_SECTIONS, "router", "evaluation")
EXPORT_SECTIONS = (*TRAIN_SECTIONS, "router", "export")


def differences(before: RunConfig, now: RunConfig, sections: tuple[str, ...], ignored_keys: str = NO_KEYS) -> list[str]:
    """Return one `key: before -> now` for every key in `sections` that would make another run.

    Keys do not count that match the pattern `ignored_keys`: whoever asks compares what they stand for.
    """
    return [str(change) for change in _changes(before, now, sections) if not re.fullmatch(ignored_keys, change.key)]


def scored_otherwise(before: RunConfig, now: RunConfig) -> list[str]:
    """Return one `key: before -> now` for every key that keeps scores of two periodic evaluations from comparing."""
    return [str(change) for change in _all_changes(before, now) if re.fullmatch(_SCORED_BY, change.key)]


def check_same_run(
    folder: Path,
    before: RunConfig,
    now: RunConfig,
    sections: tuple[str, ...],
    ignored_keys: str,
    accepted: Collection[str] | None,
) -> list[str]:
    """Refuse to go on from a folder with another config than it was made with; return a line for every other change.

    These are the `accepted` ones and those that `ignored_keys` matches, which are held by content. A verb that trains
    nothing gives None for `accepted`: no key may change.
    """
    for key in accepted or ():
        if key not in ACCEPTABLE:
            raise ConfigError(f"--accept {key}: only these may change within a run: {', '.join(sorted(ACCEPTABLE))}")
    changes = _changes(before, now, sections)
    refused = [c for c in changes if c.key not in (accepted or ()) and not re.fullmatch(ignored_keys, c.key)]
    if refused:
        remedy = _remedy(refused, trains=accepted is not None)
        raise RunFolderError(f"{folder}: was made with another config ({_listed(refused)}); {remedy}")
    return [str(change) for change in changes]


@dataclass(frozen=True)
class _Change:
    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} -> {self.now!r}"


def _changes(before: RunConfig, now: RunConfig, sections: tuple[str, ...]) -> list[_Change]:
    changes = _all_changes(before, now)
    return [c for c in changes if _section(c.key) in sections and _without_index(c.key) not in FREE]


def _all_changes(before: RunConfig, now: RunConfig) -> list[_Change]:
    old, new = (dict(leaves(config.model_dump(mode="json"))) for config in (before, now))
    return [_Change(key, old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)]


def _listed(changes: list[_Change]) -> str:
    lines = [str(change) for change in changes[:_MAX_LISTED]]
    return "; ".join([*lines, f"and {len(changes) - _MAX_LISTED} more"] if len(changes) > _MAX_LISTED else lines)


def _remedy(refused: list[_Change], *, trains: bool) -> str:
    """Return what can be done: back to the earlier values, or, where training goes on, the changes accepted."""
    earlier = " ".join(f"{change.key}={json.dumps(change.before)}" for change in refused[:_MAX_LISTED])
    ways = [f"go on with what it was ({earlier})"]
    if trains and all(change.key in ACCEPTABLE for change in refused):
        ways.append(f"say that it may change ({' '.join(f'--accept {change.key}' for change in refused)})")
    return f"{', '.join(ways)}, or start anew in another output_dir"


def _without_index(key: str) -> str:
    """Return the key that a value, or an item of a list, stands under."""
    return re.sub(r"\.\d+$", "", key)


def _section(key: str) -> str:
    if key.startswith(_DISTILLATION):
        return "train"
    return "router" if key.startswith(_ROUTER) else key.partition(".")[0]


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a tree with its key, `train.lr`, `corpus.sources.0.name`."""
    if isinstance(value, dict | list) and value:  # an empty one is a value too: layers [] is not layers null
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(child, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
