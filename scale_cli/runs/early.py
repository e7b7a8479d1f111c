"""What every verb can refuse before torch is imported: a missing base, missing weights, missing
text.

`Run.check` checks the rest, with the base's configuration and tokenizer at hand.
"""

from __future__ import annotations

from collections.abc import Sequence

from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import TextSource
from scale_cli.errors import ConfigError, RunFolderError
from scale_cli.runs.folder import RunFolder
from scale_cli.upscale.base_files import check_config_file, check_weight_files
from scale_cli.values import counted


def check_start(config: RunConfig) -> None:
    """Check what `scale upscale` reads."""
    _check_base(config)
    if config.method.vocabulary is not None:
        _check_sources(config.corpus.sources)


def check_text(config: RunConfig) -> None:
    """Check what `scale prepare` reads."""
    check_config_file(config.model)
    _check_sources([*config.corpus.sources, *config.evaluation.perplexity])


def check_training(config: RunConfig) -> None:
    """Check what `scale train` reads; a finished run needs no text any more."""
    run = RunFolder(config.output_dir)
    if run.final.is_dir():
        return
    if not run.upscaled.is_dir():
        raise RunFolderError(f"{run.upscaled}: does not exist; run `scale upscale` first")
    _check_base(config)
    _check_sources(config.corpus.sources)


def check_finished(config: RunConfig) -> None:
    """Check what `scale export` reads."""
    RunFolder(config.output_dir).check_finished()
    _check_base(config)


def check_measured(config: RunConfig, fail_above: float | None = None) -> None:
    """Check what `scale evaluate` reads, and that its gate has something to judge."""
    _check_gate(config, fail_above)
    check_finished(config)
    _check_sources(config.evaluation.perplexity)


def check_all(config: RunConfig, fail_above: float | None = None) -> None:
    """Check what `scale run` reads; a finished run does not need its training text any more."""
    _check_gate(config, fail_above)
    _check_base(config)
    is_finished = RunFolder(config.output_dir).final.is_dir()
    trained_on = [] if is_finished else config.corpus.sources
    _check_sources([*trained_on, *config.evaluation.perplexity])


def _check_gate(config: RunConfig, fail_above: float | None) -> None:
    """Raise ConfigError if --fail-above is given but no corpus has the role retention."""
    roles = {source.role for source in config.evaluation.perplexity}
    if fail_above is not None and "retention" not in roles:
        raise ConfigError(
            "--fail-above: evaluation.perplexity has no corpus of role retention; add one"
        )


def _check_base(config: RunConfig) -> None:
    check_config_file(config.model)
    check_weight_files(config.model)


def _check_sources(sources: Sequence[TextSource]) -> None:
    """Check local files alone: a store or the hub is asked later."""
    # This imports pyarrow, which a bad config does not need.
    from scale_cli.data.files import check_source

    for source in sources:
        if source.is_local:
            check_source(source)


def check_sizes(config: RunConfig, num_positions: int, num_processes: int) -> None:
    """Check the lengths of windows and the sizes of batches, for a base and a launch."""
    lengths = {
        "corpus.sequence_length": config.corpus.sequence_length,
        "evaluation.sequence_length": config.evaluation.sequence_length or 0,
    }
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
