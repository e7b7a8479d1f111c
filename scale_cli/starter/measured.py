"""The config of an evaluation without a run: a model that others trained, its base, and texts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scale_cli.config.load import checked, checked_tree
from scale_cli.config.schema import ModelConfig, RunConfig
from scale_cli.data.encoding import Encoder
from scale_cli.errors import UsageError
from scale_cli.runs.early import check_early
from scale_cli.runs.folder import RunFolder
from scale_cli.starter.parts import measured_on_alone
from scale_cli.starter.texts import look_into
from scale_cli.terminal import log
from scale_cli.upscale.base import load_base_config
from scale_cli.upscale.base_tokenizer import load_tokenizer
from scale_cli.upscale.given_model import beside_its_base, named


def measured(
    path: Path,
    base: str | None,
    texts: Mapping[str, dict[str, Any]],  # entries of a config, named by their role, by flag
    output: Path | None,
    overrides: Sequence[str],
    fail_above: float | None,
) -> RunConfig:
    """Return a config that `scale evaluate` and `scale run` take, checked: the beginnings of the
    texts, as much of each as `scale init` holds out.
    """
    if base is None and RunFolder(path).final.is_dir():
        raise UsageError(
            f"--corpus: {path} is a run, whose config names its texts; remove --corpus, or set "
            "evaluation.perplexity"
        )
    given = beside_its_base(str(path), base)
    if given is None:
        raise UsageError(f"--base: {path} names no base; give the one that it was trained from")
    model = checked(ModelConfig, {"base": given.base.base}, "--base")
    with named("--base"):
        load_base_config(model)
        encoder = Encoder(load_tokenizer(model), conversations=False)
    names = {flag: _named(source) for flag, source in texts.items()}
    held = []
    for flag, source in texts.items():
        role = source["name"]
        name = names[flag] if [*names.values()].count(names[flag]) == 1 else role
        part = measured_on_alone(look_into(source, encoder, flag), name or role)
        log(f"{flag:14} {part.held_out['max_documents']:,} documents of {source_words(source)}")
        held.append({**part.held_out, "role": role})
    tree = {
        "output_dir": str(output or Path("runs") / path.resolve().name),
        "model": given.base.model_dump(include={"base", "revision", "dtype"}),
        "method": {"variant": "given", "model": given.name},
        "evaluation": {"perplexity": held},
    }
    config = checked_tree(RunConfig, tree, Path(), str(path), overrides)
    check_early("evaluate", config, fail_above)
    return config


def source_words(source: Mapping[str, Any]) -> str:
    return str(source.get("path") or source["dataset"])


def _named(source: Mapping[str, Any]) -> str:
    """Return a text's name, which is its file's; "" if that cannot stand in file names."""
    name = Path(source_words(source)).name.partition(".")[0]
    return name if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name) else ""
