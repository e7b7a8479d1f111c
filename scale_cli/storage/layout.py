"""Where a run's results land, under one output_dir."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunFolder:
    """The folders and files of one run."""

    root: Path

    @property
    def upscaled(self) -> Path:
        """The expansion as `scale upscale` made it."""
        return self.root / "upscaled"

    @property
    def checkpoints(self) -> Path:
        """Where `scale train` saves what it needs to go on."""
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint after an optimiser step."""
        return self.checkpoints / f"step-{step:08d}"

    @property
    def final(self) -> Path:
        """The trained expansion."""
        return self.root / "final"

    @property
    def metrics(self) -> Path:
        """One JSON object a line, for every logged step and every periodic evaluation."""
        return self.root / "metrics.jsonl"

    @property
    def tokens(self) -> Path:
        """Tokenised corpora, unless corpus.cache_dir says otherwise."""
        return self.root / "tokens"

    @property
    def evaluation(self) -> Path:
        """The forgetting report."""
        return self.root / "evaluation"

    def export(self, export_format: str) -> Path:
        """The exported model."""
        return self.root / "export" / export_format
