"""Whether two configs describe the same run: a key may change between two verbs where its field is marked so."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from scale_cli.config.schema import RunConfig
from scale_cli.errors import ConfigError, RunFolderError
from scale_cli.values import Change

# Where something lies is no matter to whoever compares its content: the hashes of the base, or of every corpus.
BASE_KEYS = r"model\.(base|revision|tokenizer)"
LOCATION_KEYS = BASE_KEYS + r"|corpus\.sources\.\d+\.(path(\.\d+)?|revision)"
# What the scores of a run's periodic evaluations hang on.
_SCORED_BY = (
    r"train\.eval_max_documents|method\.router\..+"
    r"|evaluation\.(sequence_length|mixed_precision|perplexity\.\d+\.(?!path|revision).+)"
)
# The router acts in evaluation and generation only, so it may be set after training: a section of its own here.
# Distillation acts in training only, so it may be set after upscaling.
_MOVED = {"method.router.": "router", "method.distillation.": "train"}
UPSCALE_SECTIONS = ("seed", "model", "method")
TRAIN_SECTIONS = (*UPSCALE_SECTIONS, "corpus", "train")
EVALUATE_SECTIONS = (*TRAIN_SECTIONS, "router", "evaluation")
EXPORT_SECTIONS = (*TRAIN_SECTIONS, "router", "export")


def _marked(section: type[BaseModel], mark: Change, prefix: str = "") -> Iterator[str]:
    # Lists, and sections that may be null, are not entered: a mark on a key of a source (`weight`) does nothing.
    for name, field in section.model_fields.items():
        if mark in field.metadata:
            yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _marked(field.annotation, mark, f"{prefix}{name}.")


FREE, ACCEPTABLE = (frozenset(_marked(RunConfig, mark)) for mark in (Change.FREE, Change.ACCEPTED))


def differences(before: RunConfig, now: RunConfig, sections: tuple[str, ...], ignored_keys: str = "") -> list[str]:
    """Return one `key: before -> now` for every key in `sections` that would make another run.

    Keys that match the pattern `ignored_keys` do not count: whoever asks compares what they stand for.
    """

    def counts(key: str) -> bool:
        section = next((moved for prefix, moved in _MOVED.items() if key.startswith(prefix)), key.partition(".")[0])
        is_free = re.sub(r"\.\d+$", "", key) in FREE  # of a list, by its own key
        return section in sections and not is_free and not re.fullmatch(ignored_keys, key)

    return [line for key, line in _changes(before, now).items() if counts(key)]


def scored_otherwise(before: RunConfig, now: RunConfig) -> list[str]:
    """Return one `key: before -> now` for every key that keeps scores of two periodic evaluations from comparing."""
    return [line for key, line in _changes(before, now).items() if re.fullmatch(_SCORED_BY, key)]


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
    refused = {line.partition(": ")[0]: line for line in differences(before, now, sections, ignored_keys)}
    refused = {key: line for key, line in refused.items() if key not in (accepted or ())}
    if refused:
        may_be_accepted = accepted is not None and refused.keys() <= ACCEPTABLE
        way = f", say that it may change ({' '.join(f'--accept {key}' for key in refused)})" if may_be_accepted else ""
        raise RunFolderError(
            f"{folder}: was made with another config ({'; '.join(refused.values())}); "
            f"change it back{way}, or start anew in another output_dir"
        )
    return differences(before, now, sections)


def _changes(before: RunConfig, now: RunConfig) -> dict[str, str]:
    old, new = (dict(leaves(config.model_dump(mode="json"))) for config in (before, now))
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return {key: f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in changed}


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a tree with its key, `train.lr`, `corpus.sources.0.name`."""
    if isinstance(value, dict | list) and value:  # an empty one is a value too: layers [] is not layers null
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(child, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
