"""The verb `scale run`: the four verbs in turn, each skipped where its result is already there."""

from __future__ import annotations

from collections.abc import Callable, Collection

from scale_cli.config.schema import RunConfig
from scale_cli.data.corpora import every_source, open_held_out_corpora
from scale_cli.errors import ConfigError
from scale_cli.evaluation.results import Report
from scale_cli.evaluation.run import EvaluationSummary, evaluate, finished_report, open_benchmarks_of
from scale_cli.export.run import check_format, export, export_is_finished
from scale_cli.storage.layout import RunFolder
from scale_cli.training.run import train
from scale_cli.upscale.base import load_tokenizer
from scale_cli.upscale.before_writing import check_before_writing
from scale_cli.upscale.run import upscale, upscale_is_finished


def run_pipeline(config: RunConfig, say: Callable[[str], None], accepted: Collection[str] = ()) -> Report:
    """Upscale, train (resuming what was interrupted), evaluate and export.

    Args:
        config: the resolved config.
        say: prints a line for the user.
        accepted: keys that may have changed since the run was begun.

    Raises:
        ScaleError: whatever a verb raises; results of the verbs before it stay, and the next run skips them.
    """
    run = RunFolder(config.output_dir)

    def show(lines: list[str]) -> None:
        for line in lines:
            say(line)

    check_format(config)  # what the last verbs would refuse is refused before the first
    if not config.evaluation.perplexity and not config.evaluation.benchmarks:
        raise ConfigError("evaluation: names nothing to evaluate on (perplexity, benchmarks)")
    trained = run.final.is_dir()  # then what was trained on need not be here any more
    check_before_writing(config, config.evaluation.perplexity if trained else every_source(config))
    if not run.evaluation.is_dir():
        open_benchmarks_of(config)
    say("== upscale")
    show([f"done already   {run.upscaled}"] if upscale_is_finished(config) else upscale(config).lines())
    open_held_out_corpora(config, load_tokenizer(config.model), show_progress=True)
    say("== train")
    show(train(config, "auto", say, accepted).lines())
    say("== evaluate")
    report = finished_report(config)
    summary = evaluate(config) if report is None else EvaluationSummary(run.evaluation, report)
    show(summary.lines())
    say("== export")
    done = export_is_finished(config)
    show([f"done already   {run.export(config.export.format)}"] if done else export(config).lines())
    return summary.report
