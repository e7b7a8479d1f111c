"""The verb `scale run`: run the four verbs in turn; skip each whose result is already there."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from contextlib import ExitStack

from scale_cli.commands.evaluate import check_measures_something, evaluate, log_report
from scale_cli.commands.export import export_each, export_is_finished
from scale_cli.commands.train import train
from scale_cli.commands.upscale import nothing_to_prepare, upscale, upscale_is_finished
from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import TextSource
from scale_cli.data.corpora import every_source, open_sources
from scale_cli.evaluation.benchmarks import open_benchmarks_of
from scale_cli.evaluation.results import Report, finished_report
from scale_cli.export.formats import formats_of
from scale_cli.export.records import ExportRecord
from scale_cli.export.served_folder import exports
from scale_cli.heap import hand_back_large_tensors, keep_freed_memory
from scale_cli.processes import main_decides, on_main, share
from scale_cli.report import quantity
from scale_cli.runs.folder import RunFolder, folder_bytes
from scale_cli.runs.opened import Run
from scale_cli.storage.atomic import claimed
from scale_cli.terminal import log
from scale_cli.training.checkpoint import check_init_from, check_to_go_on
from scale_cli.training.tracking import check_trackers


def run_pipeline(
    config: RunConfig, accepted: Collection[str] = (), *, trust_tasks: bool = False
) -> Report | None:
    """Upscale, train or resume, evaluate and export; return the report, on the main process."""
    hand_back_large_tensors()  # those of the first verb too, whose gaps training would not fit
    given = config
    config = Run(given).config
    folder = RunFolder(config.output_dir)
    # A run keeps its tokenizer, which of 262,144 tokens is a third of a gigabyte. So each step opens
    # its own.
    on_main(lambda: _check(Run(given), accepted, trust_tasks=trust_tasks))
    with ExitStack() as held:
        on_main(lambda: held.enter_context(claimed(folder.root)))
        on_main(lambda: _upscale(Run(given)))
        log("== train")
        train(config, "auto", log, accepted)
        keep_freed_memory()
        log("== evaluate")
        report = on_main(lambda: _report_of_same_text(Run(given)))
        if main_decides(lambda: report is None):
            report = evaluate(config, trust_tasks=trust_tasks)
        elif report is not None:
            log(f"done already   {folder.evaluation}")
            log_report(report, folder.evaluation)
        on_main(lambda: _export(Run(given)))
    return report


def _check(run: Run, accepted: Collection[str], *, trust_tasks: bool) -> None:
    """Check before the first verb what the last ones would reject."""
    config = run.config
    check_to_go_on(run, "auto", accepted)
    formats_of(config)
    check_measures_something(config)
    run.check(_sources(run), share().num_processes)
    check_init_from(run)
    check_trackers(config.train.trackers)
    if not run.folder.evaluation.is_dir():
        open_benchmarks_of(config.evaluation, trust_tasks=trust_tasks)


def _sources(run: Run) -> Sequence[TextSource]:
    """Return the sources that must exist.

    A finished run does not need its training text any more.
    """
    if run.folder.final.is_dir():
        return run.config.evaluation.perplexity
    return every_source(run.config)


def _upscale(run: Run) -> None:
    log("== upscale")
    if not run.config.method.definition.trains:
        log(nothing_to_prepare(run.config))
        return
    open_sources(run.config, _sources(run), run.tokenizer)
    if upscale_is_finished(run):
        log(f"done already   {run.folder.upscaled}")
    else:
        upscale(run.config)


def _report_of_same_text(run: Run) -> Report | None:
    """Return the report that is already there, unless the held-out text has changed since."""
    corpora = open_sources(run.config, run.config.evaluation.perplexity, run.tokenizer)
    report = finished_report(run.config)
    if report is None or report.texts != [corpus.name for corpus in corpora]:
        return None
    return report


def _export(run: Run) -> None:
    """Write the exports that are missing, and log what can be done with a finished run."""
    config = run.config
    log("== export")
    formats = formats_of(config)
    missing = []
    for one in formats:
        if export_is_finished(one):
            log(f"done already   {one.folder}")
        else:
            missing.append(one)
    export_each(missing)
    for one in formats:
        if (size := ExportRecord.load(one.folder).size) is not None:
            log(f"served         {one.name}: {size}")
    removable = []
    for place, needed in (
        (run.folder.checkpoints, "only to train further"),
        (run.folder.tokens, "made again when text is read"),
    ):
        if num_bytes := folder_bytes(place):
            removable.append(f"{place} ({quantity(num_bytes, 'B')}: {needed})")
    may_go = f"; may be deleted: {'; '.join(removable)}" if removable else ""
    held = quantity(folder_bytes(run.folder.root), "B")
    log(f"on disk        {held} in {run.folder.root}{may_go}")
    folder = shlex.quote(str(config.output_dir))
    ways = [f"scale generate {folder} --prompt '...' --temperature 0.8"]
    if run.base_tokenizer.chat_template:
        ways.append(f"scale generate {folder} --chat --prompt '...'")
    several = len(exports(run.folder.root)) > 1
    ways.append(f"scale serve {shlex.quote(str(formats[0].folder)) if several else folder}")
    log(f"next           {'; '.join(ways)}")
