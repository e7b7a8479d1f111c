"""The verb `scale evaluate`: score every held-out corpus, and write the forgetting report."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import date
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from scale_cli.config.load import dump_config
from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import CorpusSource
from scale_cli.data.corpora import open_held_out, trained_on
from scale_cli.data.overlap import shared_texts
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.errors import CheckFailed, ConfigError
from scale_cli.evaluation.benchmarks import open_benchmarks_of, summarise_benchmarks
from scale_cli.evaluation.render import CURVE, History, failures, page, terminal_lines
from scale_cli.evaluation.results import (
    BenchmarkItems,
    CorpusResult,
    Report,
    SkippedBenchmark,
    summarise,
)
from scale_cli.evaluation.scoring import (
    Passes,
    kept_scores,
    num_tokens_read,
    score_corpus,
    tokens_bar,
)
from scale_cli.model.heads import Streams, base_alone
from scale_cli.planning.memory import cost_of_run
from scale_cli.processes import (
    device,
    device_name,
    is_main,
    on_main,
    share,
    slow_in_bfloat16,
)
from scale_cli.report import Table
from scale_cli.runs.early import check_gate
from scale_cli.runs.folder import trained_sha256
from scale_cli.runs.opened import MethodFolder, Run
from scale_cli.storage.atomic import new_folder, write_text
from scale_cli.terminal import log
from scale_cli.training.history import cost_table, history_of
from scale_cli.training.metrics_log import read_records
from scale_cli.training.records import Cost, TrainState
from scale_cli.upscale.given_model import other_base
from scale_cli.values import counted


def evaluate(
    config: RunConfig, checkpoint: Path | None = None, *, trust_tasks: bool = False
) -> Report:
    """Score base and trained model on every held-out corpus, and write `evaluation/`.

    A `checkpoint` is scored in place of `final/`, and its report lies in `evaluations/`. Files of
    benchmarks may run code only with `trust_tasks`. All processes share the work.
    """
    started_s = time.monotonic()
    run = Run(config)
    config = run.config
    check_measures_something(config)
    records = read_records(run.folder.metrics)  # early, since it may be damaged
    if checkpoint is None:
        final = run.open_final()
        folder = run.folder.evaluation
    else:
        final = run.open_trained(checkpoint)
        folder = run.folder.evaluations / checkpoint.resolve().name
    in_bfloat16 = config.evaluation.mixed_precision == "bf16"
    for warning in slow_in_bfloat16(device().type, {"evaluation.mixed_precision=no": in_bfloat16}):
        log(f"warning: {warning}")
    # Early, since a file may be missing.
    benchmarks = open_benchmarks_of(config.evaluation, trust_tasks=trust_tasks)
    passes = Passes.of(config, run.base_config.max_position_embeddings)
    model = final.load_streams()
    texts = open_held_out(config, final.tokenizer, run.base_tokenizer)

    num_tokens = sum(num_tokens_read(corpus, passes.context) for corpus in chain(*texts))
    num_items = 0 if benchmarks is None else benchmarks.num_items
    and_items = f" and {counted(num_items, 'item')} of benchmarks" if num_items else ""
    log(f"evaluating on {counted(num_tokens, 'token')} of text{and_items}")
    training = trained_on(config, final.path, final.tokenizer)
    if training is None:
        log(
            "warning: the tokenised training text is gone, so held-out text is not looked for in it"
        )
    with tokens_bar(num_tokens, "evaluating" if is_main() else None) as bar:
        results = _measure_texts(
            final, model, *texts, training=training or (), passes=passes, bar=bar
        )
    items: list[BenchmarkItems] = []
    skipped: list[SkippedBenchmark] = []
    if benchmarks is not None:
        items, skipped = benchmarks.measure(model, final.tokenizer, config, share())

    report = _report(
        final,
        passes,
        corpora=texts[0],
        searched=training is not None,
        results=results,
        items=items,
        skipped=skipped,
    )
    elapsed_s = time.monotonic() - started_s

    def write() -> None:
        history = history_of(records, report, _cost(final, elapsed_s))
        _write(report, config, folder, items, history)

    on_main(write)
    if is_main():
        log_report(report, folder)
    return report


def check_measures_something(config: RunConfig) -> None:
    """Raise ConfigError if a config names nothing to evaluate on."""
    if not config.evaluation.perplexity and not config.evaluation.benchmarks:
        raise ConfigError(
            "evaluation.perplexity: names no corpus to evaluate on; "
            "add one, or add evaluation.benchmarks"
        )


def _measure_texts(
    final: MethodFolder,
    model: Streams,
    corpora: Sequence[TokenisedCorpus],
    by_base_tokens: Sequence[TokenisedCorpus],  # the same text, if the run has new tokens
    *,
    training: Sequence[tuple[CorpusSource, TokenisedCorpus]],
    passes: Passes,
    bar: Any,
) -> list[CorpusResult]:
    """Return every head's figures on every held-out corpus."""
    config = final.run.config
    score = partial(score_corpus, router=config.method.rules, passes=passes, bar=bar, share=share())
    kept_of = partial(kept_scores, base=final.record, config=config, passes=passes)
    base = base_alone(model)
    results = []
    for source, corpus, of_base in zip_longest(
        config.evaluation.perplexity, corpora, by_base_tokens
    ):
        result = summarise(
            source,
            score(model, corpus, kept=kept_of(model, corpus)),
            None if of_base is None else score(base, of_base, kept=kept_of(base, of_base)),
            shared=shared_texts(corpus, training),
            taught=config.teaches(source),
            num_resamples=config.evaluation.bootstrap_resamples,
            seed=config.seed,
        )
        results.append(result)
    return results


def _report(
    final: MethodFolder,
    passes: Passes,
    *,
    corpora: Sequence[TokenisedCorpus],
    searched: bool,  # for held-out text in the text that was trained on
    results: list[CorpusResult],
    items: list[BenchmarkItems],
    skipped: list[SkippedBenchmark],
) -> Report:
    config = final.run.config
    state = TrainState.load(final.path)
    of_benchmarks, averages = summarise_benchmarks(
        items, num_resamples=config.evaluation.bootstrap_resamples, seed=config.seed
    )
    return Report(
        variant=config.method.variant,
        served=config.method.served,
        step=state.step,
        num_tokens_trained=state.num_tokens,
        trained_sha256=trained_sha256(final.path),
        corpora=results,
        benchmarks=of_benchmarks,
        benchmark_averages=averages,
        skipped_benchmarks=skipped,
        texts=[corpus.name for corpus in corpora],
        dtype=config.model.dtype,
        mixed_precision=passes.mixed_precision,
        device=device_name(device()),
        context=passes.context,
        date=date.today().isoformat(),
        searched_training_text=searched,
        note=other_base(str(final.path), config.model),
    )


def log_report(report: Report, folder: Path) -> None:
    for line in terminal_lines(report):
        log(line)
    log(f"report: {folder / 'report.html'}")
    for failure in failures(report):
        log(f"warning: {failure}")


def _write(
    report: Report,
    config: RunConfig,
    folder: Path,
    benchmarks: Sequence[BenchmarkItems],
    history: History,
) -> None:
    """Write report.{json,md,html}, the learning curve, and items/NAME.jsonl for each benchmark."""
    with new_folder(folder) as partial:
        for benchmark in benchmarks:
            lines = (
                json.dumps(item, ensure_ascii=False, allow_nan=False, default=str) + "\n"
                for item in benchmark.items
            )
            write_text(partial / "items" / f"{benchmark.source.name}.jsonl", "".join(lines))
        report.save(partial)
        for form in ("md", "html"):
            write_text(partial / f"report.{form}", page(report, config, form, history))
        if history.curve:
            write_text(partial / CURVE, history.curve)
        write_text(partial / "scale.yaml", dump_config(config))


def _cost(final: MethodFolder, evaluated_s: float) -> Table | None:
    """Return what training and this evaluation took; None for weights whose cost is not known."""
    run = final.run
    cost = Cost.load_if_there(final.path)
    if cost is None or not run.config.method.definition.trains:
        return None
    state = TrainState.load(final.path)
    num_new = max(0, len(run.tokenizer) - run.base_config.vocab_size)
    step = cost_of_run(run.config, run.base_config, num_new=num_new)
    work = state.num_tokens * step.flops(run.config.corpus.sequence_length)
    return cost_table(state, cost, work, evaluated_s)


def check_learned(report: Report) -> None:
    """Raise CheckFailed if a head is not finite, or worse than the base at what it was to learn."""
    if failed := failures(report):
        raise CheckFailed(" ".join(failed))


def check_forgetting(report: Report, fail_above: float | None) -> None:
    """Raise CheckFailed if the served head lost more than the limit on a retention corpus.

    ConfigError: there is none. Several processes learn it here (`console.load`).
    """
    if fail_above is None:
        return
    check_gate([corpus.role for corpus in report.corpora])
    for corpus in report.with_role("retention"):
        lost = corpus.heads[report.served].bits_per_byte_difference.value
        if lost is None or lost > fail_above:
            figure = "a loss that is not finite" if lost is None else f"{lost:+.4f} bits/byte"
            raise CheckFailed(
                f"{corpus.name}: {figure} against the base, more than --fail-above {fail_above}"
            )
