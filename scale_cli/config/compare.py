"""Whether two configs describe the same run: what may change between two verbs, and what may not."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scale_cli.config.schema import RunConfig
from scale_cli.errors import ConfigError, RunFolderError

# Cadences and places, and how the work is cut up: they change what is written, when and by whom, not what is computed.
_FREE = {
    "output_dir",
    "corpus.cache_dir",
    "corpus.max_bad_fraction",
    "corpus.max_unknown_fraction",
    "corpus.num_workers",
    "train.micro_batch_size",
    "train.sharding",
    "train.max_hours",
    "train.log_every_steps",
    "train.save_every_steps",
    "train.keep_checkpoints",
    "train.trackers",
    "train.project",
    "train.run_name",
    "train.eval_every_steps",
    "train.eval_max_documents",
}
# How it is trained from here on: a run that goes on may change these where it is told to, and only then.
ACCEPTABLE = {
    "method.distillation.weight",
    "train.max_steps",
    "train.lr",
    "train.min_lr_ratio",
    "train.schedule",
    "train.warmup_steps",
    "train.decay_steps",
    "train.decay_shape",
    "train.cooldown_steps",
    "train.constant_lr_ratio",
    "train.weight_decay",
    "train.adam_beta1",
    "train.adam_beta2",
    "train.adam_epsilon",
    "train.max_grad_norm",
    "train.mixed_precision",
    "train.on_nonfinite",
    "train.max_skipped_steps",
    "train.attention",
    "train.compile",
    "train.activation_checkpointing",
}
# Where something lies is no matter to whoever compares its content: the hashes of the base, or of every corpus.
BASE_KEYS = r"model\.(base|revision|tokenizer)"
LOCATION_KEYS = BASE_KEYS + r"|corpus\.sources\.\d+\.(path|revision)"
NO_KEYS = r"(?!)"
_MAX_LISTED = 8
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

    Args:
        before: an earlier config.
        now: this one.
        sections: that count.
        ignored_keys: a pattern of keys that do not count, since whoever asks compares what they stand for.
    """
    return [str(change) for change in _changes(before, now, sections) if not re.fullmatch(ignored_keys, change.key)]


def check_same_run(
    where: Path,
    before: RunConfig,
    now: RunConfig,
    sections: tuple[str, ...],
    ignored_keys: str = NO_KEYS,
    accepted: Collection[str] | None = None,
) -> list[str]:
    """Hold whoever goes on from a folder to the config that it was made with.

    Args:
        where: the folder.
        before: the config in it.
        now: this one.
        sections: that count.
        ignored_keys: a pattern of keys that do not count, as in `differences`.
        accepted: keys that may have changed; None where the verb trains nothing, so that none may.

    Returns:
        A line for every key that has changed all the same: those accepted, and those to be held by content.

    Raises:
        ConfigError: a key is accepted that makes another run.
        RunFolderError: naming the keys that have changed, and what can be done.
    """
    for key in accepted or ():
        if key not in ACCEPTABLE:
            raise ConfigError(f"--accept {key}: only these may change within a run: {', '.join(sorted(ACCEPTABLE))}")
    changes = _changes(before, now, sections)
    refused = [c for c in changes if c.key not in (accepted or ()) and not re.fullmatch(ignored_keys, c.key)]
    if refused:
        remedy = _remedy(refused, trains=accepted is not None)
        raise RunFolderError(f"{where}: was made with another config ({_listed(refused)}); {remedy}")
    return [str(change) for change in changes]


@dataclass(frozen=True)
class _Change:
    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} -> {self.now!r}"


def _changes(before: RunConfig, now: RunConfig, sections: tuple[str, ...]) -> list[_Change]:
    old, new = (dict(leaves(config.model_dump(mode="json"))) for config in (before, now))
    keys = [key for key in {**old, **new} if _section(key) in sections and key not in _FREE]
    return [_Change(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


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
