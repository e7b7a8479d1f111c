"""The verb `scale run`: the four verbs in turn, each skipped where its result is already there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager

from scale_cli.commands.evaluate import EvaluationSummary, evaluate
from scale_cli.commands.export import (
    card_is_current,
    check_format,
    export,
    export_folder,
    export_is_finished,
    one_by_one,
    renew_card,
)
from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale, upscale_is_finished
from scale_cli.config.schema import RunConfig
from scale_cli.data.corpora import every_source, open_sources
from scale_cli.errors import ConfigError
from scale_cli.evaluation.benchmark_opening import open_benchmarks_of
from scale_cli.evaluation.results import Report, finished_report
from scale_cli.processes import main_decides, on_main, share
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.lock import claimed
from scale_cli.training.beginning import check_init_from
from scale_cli.training.tracking import check_trackers
from scale_cli.upscale.session import check_before_writing
from scale_cli.upscale.tokenizer import load_run_tokenizer


def run_pipeline(config: RunConfig, log: Callable[[str], None], accepted: Collection[str] = ()) -> Report | None:
    """Upscale, train (resuming what was interrupted), evaluate and export; return, on the main process, the report."""
    with _claimed(config):
        report = _measured(config, log, accepted)
        on_main(lambda: _show(_exported(config, log), log))
    return report


def run_without_export(config: RunConfig, log: Callable[[str], None]) -> Report:
    """Upscale, train (resuming what was interrupted) and evaluate, unless done already, in one process."""
    with _claimed(config):
        report = _measured(config, log, ())
    assert report is not None, "one process is the main one"
    return report


@contextmanager
def _claimed(config: RunConfig) -> Iterator[None]:
    on_main(lambda: _check(config))
    with ExitStack() as held:
        on_main(lambda: held.enter_context(claimed(config.output_dir)))
        yield


def _show(lines: list[str], log: Callable[[str], None]) -> None:
    for line in lines:
        log(line)


def _measured(config: RunConfig, log: Callable[[str], None], accepted: Collection[str]) -> Report | None:
    on_main(lambda: _show(_upscaled(config, log), log))
    log("== train")
    _show(train(config, "auto", log, accepted).lines(), log)
    log("== evaluate")
    if main_decides(lambda: finished_report(config) is None):
        evaluate(config)
    report = on_main(lambda: finished_report(config))
    if report is not None:
        _show(EvaluationSummary(RunFolder(config.output_dir).evaluation, report).lines(), log)
    return report


def _check(config: RunConfig) -> None:
    """Refuse before the first verb what the last ones would refuse."""
    check_format(config)
    if not config.evaluation.perplexity and not config.evaluation.benchmarks:
        raise ConfigError("evaluation: names nothing to evaluate on (perplexity, benchmarks)")
    trained = RunFolder(config.output_dir).final.is_dir()  # then what was trained on need not be here any more
    sources = config.evaluation.perplexity if trained else every_source(config)
    check_before_writing(config, sources, share().num_processes)
    check_init_from(config)
    check_trackers(config.train.trackers)
    if not RunFolder(config.output_dir).evaluation.is_dir():
        open_benchmarks_of(config.evaluation)


def _upscaled(config: RunConfig, log: Callable[[str], None]) -> list[str]:
    log("== upscale")
    if upscale_is_finished(config):
        lines = [f"done already   {RunFolder(config.output_dir).upscaled}"]
    else:
        lines = upscale(config).lines()
    open_sources(config, config.evaluation.perplexity, load_run_tokenizer(config))
    return lines


def _exported(config: RunConfig, log: Callable[[str], None]) -> list[str]:
    log("== export")
    lines = []
    for one in one_by_one(config):
        if not export_is_finished(one):
            lines += export(one).lines()
        elif card_is_current(one):
            lines.append(f"done already   {export_folder(one)}")
        else:
            lines.append(f"new card       {renew_card(one)}: the report has changed, the model has not")
    return lines
