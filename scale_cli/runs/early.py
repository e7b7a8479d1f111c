"""What every verb can refuse before torch is imported: a missing base, missing weights, missing
text.

`Run.check` checks the rest, with the base's configuration and tokenizer at hand.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import TextSource
from scale_cli.errors import ConfigError, require
from scale_cli.runs.folder import RunFolder
from scale_cli.upscale.base_files import check_config_file, check_weight_files
from scale_cli.values import counted

# What each verb reads, beside the base's config.json.
_READS: dict[str, set[str]] = {
    "plan": set(),
    "upscale": {"weights", "text of new tokens"},
    "prepare": {"training text", "held-out text"},
    "train": {"upscaled", "weights", "training text"},
    "evaluate": {"final", "weights", "held-out text", "benchmarks"},
    "evaluate a checkpoint": {"weights", "held-out text", "benchmarks"},
    "export": {"final", "weights"},
    "run": {"weights", "training text", "held-out text", "benchmarks"},
}


def check_early(verb: str, config: RunConfig, fail_above: float | None = None) -> None:
    """Check what a verb reads, and that the gate `--fail-above` has something to judge.

    Local files alone are checked: a store or the hub is asked later.
    """
    run = RunFolder(config.output_dir)
    reads = _READS[verb].copy()
    if not config.method.definition.trains:
        reads.discard("upscaled")
        if verb == "evaluate":
            reads.discard("final")
    if run.final.is_dir() and verb == "train":
        return
    if run.final.is_dir() and verb == "run":
        reads.discard("training text")  # a finished run needs none any more
    if run.evaluation.is_dir() and verb == "run":
        reads.discard("benchmarks")

    if fail_above is not None:
        check_gate([source.role for source in config.evaluation.perplexity])
    if "upscaled" in reads:
        run.check_upscaled()
    if "final" in reads:
        run.check_finished()

    if "benchmarks" in reads:
        check_tasks([of.name for of in config.evaluation.benchmarks if of.path is None])
    check_config_file(config.model)
    if "weights" in reads:
        check_weight_files(config.model)

    sources: list[TextSource] = []
    learns_tokens = "text of new tokens" in reads and config.method.vocabulary is not None
    if "training text" in reads or learns_tokens:
        sources += config.corpus.sources
    if "held-out text" in reads:
        sources += config.evaluation.perplexity
    local = [source for source in sources if source.is_local]
    if local:
        # This imports pyarrow, which a bad config does not need.
        from scale_cli.data.files import check_source

        for source in local:
            check_source(source)


def check_gate(roles: Collection[str]) -> None:
    """Raise ConfigError if the gate `--fail-above` has nothing to judge."""
    if "retention" not in roles:
        raise ConfigError(
            "--fail-above: evaluation.perplexity has no corpus of role retention; add one"
        )


def check_tasks(names: Sequence[str]) -> None:
    """Raise ConfigError if no file of lm-eval's tasks has a name: to import and ask it takes a minute."""
    if not names:
        return
    require("lm_eval", "evaluation.benchmarks")
    spec = find_spec("lm_eval")
    assert spec is not None and spec.submodule_search_locations is not None, "a package"
    files = [*Path(spec.submodule_search_locations[0], "tasks").rglob("*.yaml")]
    stems = {file.stem for file in files}
    for name in names:
        named = re.compile(rb"(?<![\w-])%b(?![\w-])" % re.escape(name.encode()))
        if name not in stems and not any(named.search(file.read_bytes()) for file in files):
            meant = get_close_matches(name, stems, n=1)
            raise ConfigError(
                f"evaluation.benchmarks: lm-eval has no task {name!r}"
                f"{f' (did you mean {meant[0]}?)' if meant else ''}"
            )


def check_sizes(config: RunConfig, num_positions: int, num_processes: int) -> None:
    """Check the lengths of windows and the sizes of batches, for a base and a launch."""
    lengths = {
        "corpus.sequence_length": config.corpus.sequence_length,
        "evaluation.sequence_length": config.evaluation.sequence_length or 0,
    }
    if not config.method.definition.trains:
        del lengths["corpus.sequence_length"]  # no window is trained on
    for key, length in lengths.items():
        if length > num_positions:
            raise ConfigError(f"{key}: {length}, but the base has {num_positions} positions")

    train = config.train
    at_once = train.sequences_at_once(num_processes)
    if train.global_batch_size % (at_once * num_processes):
        raise ConfigError(
            f"train.global_batch_size {train.global_batch_size} is not a multiple of "
            f"train.micro_batch_size {at_once} x {counted(num_processes, 'process', 'processes')}"
        )
