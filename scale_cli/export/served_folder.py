"""What servers ask of the folder of an export, from its small files: what vLLM installs suffices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scale_cli.methods.given import ADAPTER_CONFIG
from scale_cli.methods.stream_kinds import ROUTER


def exports(run: Path) -> list[Path]:
    """Return the folders of a run's exports that servers read: plain ones, and PEFT's adapters."""
    written = [*run.glob("export/plain*/config.json"), *run.glob(f"export/*/{ADAPTER_CONFIG}")]
    return sorted(file.parent for file in written)


def holds_base(config: dict[str, Any]) -> bool:
    """Return whether a plain export's config.json says that both heads lie in its one row."""
    return "stream_sizes" in (config.get(ROUTER) or {})


def routed_name(architecture: str) -> str:
    """Return the name of the routed class of a plain architecture, in transformers and in vLLM."""
    return f"ScaleRouted{architecture}"
