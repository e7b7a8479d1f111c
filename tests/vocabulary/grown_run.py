"""A run whose tokens grow, of a second."""

from pathlib import Path
from typing import Any

from scale_cli.config.schema import RunConfig
from tests.small_runs import small_run
from tests.vocabulary.tokenizers_at_hand import ENGLISH, KOREAN
from tests.widening import lower_stories


def config_of(
    shared_data: Path,
    folder: Path,
    variant: str = "route",
    base: Path | None = None,
    new_text: str = KOREAN,
    **method: Any,
) -> RunConfig:
    (folder / "ko.txt").write_text("\n\n".join([new_text] * 8))
    (folder / "en.txt").write_text(ENGLISH)
    korean = f"name: ko, path: {folder}/ko.txt, language: ko"
    english = f"name: en, path: {folder}/en.txt, language: en"
    vocabulary = {"new_tokens": 64, "min_count": 2}
    return small_run(
        folder,
        base or lower_stories(shared_data),
        "train.lr=1e-3",
        train="{max_steps: 2, global_batch_size: 2, micro_batch_size: 2, warmup_steps: 1}",
        method={"variant": variant, "vocabulary": vocabulary, **method},
        corpus=f"{{sequence_length: 32, num_workers: 1, sources: [{{{korean}}}]}}",
        evaluation=f"perplexity: [{{{english}, role: retention}}, {{{korean}, role: acquisition}}]",
    )
