"""Whether two configs describe the same run: what may change between two verbs, and what may not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scale_cli.config.schema import RunConfig

# Cadences and places, and how the work is cut up: they change what is written, when and by whom, not what is computed.
_FREE = {
    "output_dir",
    "corpus.cache_dir",
    "corpus.max_bad_fraction",
    "corpus.num_workers",
    "train.micro_batch_size",
    "train.sharding",
    "train.max_hours",
    "train.log_every_steps",
    "train.save_every_steps",
    "train.keep_checkpoints",
    "train.eval_every_steps",
    "train.eval_max_documents",
}
# The router acts in evaluation and generation only, so it may be set after training: a section of its own here.
_ROUTER = "method.router."
UPSCALE_SECTIONS = ("seed", "model", "method")
TRAIN_SECTIONS = (*UPSCALE_SECTIONS, "corpus", "train")
EVALUATE_SECTIONS = (*TRAIN_SECTIONS, "router", "evaluation")
EXPORT_SECTIONS = (*TRAIN_SECTIONS, "router", "export")


def differences(before: RunConfig, now: RunConfig, sections: tuple[str, ...]) -> list[str]:
    """Return one `key: before -> now` for every key in `sections` that would make another run."""
    old, new = (dict(_leaves(config.model_dump(mode="json"))) for config in (before, now))
    keys = [key for key in {**old, **new} if _section(key) in sections and key not in _FREE]
    keys = [key for key in keys if old.get(key) != new.get(key)]
    return [f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in keys]


def _section(key: str) -> str:
    return "router" if key.startswith(_ROUTER) else key.partition(".")[0]


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list) and value:  # an empty one is a value too: layers [] is not layers null
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(child, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
