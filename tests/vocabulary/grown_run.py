"""A run whose tokens grow, of a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scale_cli.config.schema import RunConfig
from tests.vocabulary.tokenizers_at_hand import ENGLISH, KOREAN
from tests.widening import lower_stories


def config_of(
    shared_data: Path, folder: Path, variant: str = "route", base: Path | None = None, **method: Any
) -> RunConfig:
    for name, text in (("ko", "\n\n".join([KOREAN] * 8)), ("en", ENGLISH)):
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return RunConfig.model_validate(
        {
            "output_dir": str(folder / "run"),
            "model": {"base": str(base or lower_stories(shared_data))},
            "method": {"variant": variant, "vocabulary": {"new_tokens": 64, "min_count": 2}, **method},
            "corpus": {
                "sequence_length": 32,
                "num_workers": 1,
                "sources": [{"name": "ko", "path": str(folder / "ko.txt"), "language": "ko"}],
            },
            "train": {"max_steps": 2, "global_batch_size": 2, "micro_batch_size": 2, "warmup_steps": 1, "lr": 1e-3},
            "evaluation": {
                "perplexity": [
                    {"name": "en", "path": str(folder / "en.txt"), "language": "en", "role": "retention"},
                    {"name": "ko", "path": str(folder / "ko.txt"), "language": "ko", "role": "acquisition"},
                ]
            },
        }
    )
