"""A run whose tokens grow, of a second."""

from pathlib import Path
from typing import Any

from scale_cli.commands.join import join
from scale_cli.config.schema import RunConfig
from scale_cli.joining.members import join_runs
from scale_cli.model.joined_scale import JoinedForCausalLM
from tests.small_runs import small_run, train_run
from tests.vocabulary.tokenizers_at_hand import ENGLISH, KOREAN, RUSSIAN
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


def two_scripts_in_one(
    shared_data: Path, folder: Path, base: Path
) -> tuple[Path, JoinedForCausalLM]:
    """Join two runs with tokens of their own; return a plain folder of both, and the model that it
    was made of.
    """
    runs = []
    for script, text in (("hangul", KOREAN), ("cyrillic", RUSSIAN)):
        (of_run := folder / script).mkdir()
        vocabulary = {"new_tokens": 64, "min_count": 2, "script": script}
        config = config_of(shared_data, of_run, base=base, new_text=text, vocabulary=vocabulary)
        runs.append(train_run(config).output_dir)
    join(runs, folder / "joined", None, "llama")
    return folder / "joined", join_runs(runs, None).model
