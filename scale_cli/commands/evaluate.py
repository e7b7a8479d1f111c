"""The verb `scale evaluate`: score every held-out corpus, and write the forgetting report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scale_cli.config.load import dump_config
from scale_cli.config.schema import EvaluationConfig, RunConfig
from scale_cli.data.corpora import one_document, open_sources
from scale_cli.errors import ConfigError, ForgettingError, how_to_install, is_installed
from scale_cli.evaluation.benchmarks import BenchmarkItems, open_benchmarks_of, summarise_benchmarks
from scale_cli.evaluation.continuations import SelectableHeads, count_letters
from scale_cli.evaluation.render import draw_trade_off, html, markdown, terminal_lines
from scale_cli.evaluation.results import HEADS, Report, summarise
from scale_cli.evaluation.scoring import Passes, score_corpus
from scale_cli.processes import is_main, main_first, on_main, share, share_of_machine
from scale_cli.report.figures import save, svg
from scale_cli.storage.atomic import new_folder, write_text
from scale_cli.storage.records import trained_sha256
from scale_cli.upscale.run import Run

PICTURE = "trade-off.png"


@dataclass(frozen=True)
class EvaluationSummary:
    """What was measured, for the terminal."""

    folder: Path
    report: Report

    def lines(self) -> list[str]:
        alone = [f"warning: {one_document(corpus.name)}" for corpus in self.report.corpora if corpus.num_documents == 1]
        lines = [*terminal_lines(self.report), *alone, f"report: {self.folder / 'report.html'}"]
        if self.report.has_trade_off and not (self.folder / PICTURE).is_file():
            lines.append(f"without its picture, which needs matplotlib: {how_to_install('matplotlib')}")
        return lines


def evaluate(config: RunConfig) -> EvaluationSummary:
    """Score base and trained model on every held-out corpus, and write `evaluation/`; all processes share the work."""
    sources = config.evaluation.perplexity
    if not sources and not config.evaluation.benchmarks:
        raise ConfigError("evaluation.perplexity: names no corpus to evaluate on")
    run, main, passes = Run(config), is_main(), Passes.of(config)
    final = run.open_final()
    benchmarks = open_benchmarks_of(config.evaluation)  # before time is spent: a file may not be there
    model = final.load_two_headed(share_of_machine())
    corpora = main_first(lambda: open_sources(config, config.evaluation.perplexity, final.tokenizer))
    results = []
    num_resamples, asked = config.evaluation.bootstrap_resamples, config.evaluation.continuations
    for source, corpus in zip(sources, corpora, strict=True):
        shown = f"evaluating {source.name}" if main else None
        losses = score_corpus(model, corpus, config.method.router, passes, progress=shown, share=share())
        letters = None
        if asked is not None:
            answers = SelectableHeads(model, config.method.router)
            letters = count_letters(
                answers, HEADS, corpus, final.tokenizer, asked, passes, progress=shown, share=share()
            )
        results.append(summarise(source, losses, letters, num_resamples=num_resamples, seed=config.seed))
    items, skipped = ([], []) if benchmarks is None else benchmarks.measure(model, final.tokenizer, config, share())
    of_benchmarks, averages = summarise_benchmarks(items, num_resamples=num_resamples, seed=config.seed)
    report = Report(
        variant=config.method.variant,
        served=config.method.definition.served(config.method.settings),
        step=final.state.step,
        num_tokens_trained=final.state.num_tokens,
        trained_sha256=trained_sha256(final.path),
        corpora=results,
        benchmarks=of_benchmarks,
        benchmark_averages=averages,
        skipped_benchmarks=skipped,
    )
    on_main(lambda: write_report(report, config, run.folder.evaluation, items))
    return EvaluationSummary(run.folder.evaluation, report)


def write_report(report: Report, config: RunConfig, folder: Path, benchmarks: Sequence[BenchmarkItems] = ()) -> None:
    """Write report.{json,md,html}, its picture where that can be drawn, and items/NAME.jsonl of every benchmark."""
    with new_folder(folder) as partial:
        for benchmark in benchmarks:
            lines = "".join(item.to_json_line() for item in benchmark.items)
            write_text(partial / "items" / f"{benchmark.name}.jsonl", lines)
        report.save(partial)
        drawn = report.has_trade_off and is_installed("matplotlib")
        write_text(partial / "report.md", markdown(report, config.method, PICTURE if drawn else None))
        picture = svg(lambda figure: draw_trade_off(figure, report)) if drawn else None
        write_text(partial / "report.html", html(report, config.method, picture))
        if drawn:
            save(lambda figure: draw_trade_off(figure, report), partial / PICTURE)
        write_text(partial / "scale.yaml", dump_config(config))


def check_gate(evaluation: EvaluationConfig, max_forgetting: float | None) -> None:
    """Refuse a gate, where there is one, that would hold nothing."""
    if max_forgetting is not None and not any(source.role == "retention" for source in evaluation.perplexity):
        raise ConfigError("--max-forgetting: evaluation.perplexity has no corpus of role retention")


def check_forgetting(report: Report, max_forgetting: float | None) -> None:
    """Hold the served head to a limit on every retention corpus."""
    for corpus in report.with_role("retention"):
        lost = corpus.heads[report.served].bits_per_byte_difference.value
        if max_forgetting is not None and (lost is None or lost > max_forgetting):
            figure = "a loss that is not finite" if lost is None else f"{lost:+.4f} bits/byte"
            raise ForgettingError(
                f"{corpus.name}: {figure} against the base, more than --max-forgetting {max_forgetting}"
            )
