"""The figures of a forgetting report: plain data, computed by bootstrap, and read from disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from scale_cli.config.load import load_config
from scale_cli.config.schema import EVALUATE_SECTIONS, RunConfig, differences
from scale_cli.config.sources import BenchmarkSource, EvaluationSource
from scale_cli.data.overlap import SharedText
from scale_cli.errors import RunError
from scale_cli.evaluation.intervals import Values, finite, paired_differences
from scale_cli.report import (
    DASH,
    Cell,
    Interval,
    difference_cell,
    number,
    percent,
    perplexity,
    worst_document,
)
from scale_cli.runs.folder import RunFolder, trained_sha256
from scale_cli.storage.atomic import file_sha256, is_whole
from scale_cli.storage.records import RunRecord

if TYPE_CHECKING:
    # It imports torch, which a finished report does not need.
    from scale_cli.evaluation.scoring import DocumentLosses

_MAX_EXPONENT = 700.0  # the exponential of more overflows
HEADS_AND_RULES = ("base", "trained", "posterior", "cosine")
_BASE_OF_NEW_TOKENS = "base of new tokens"
# Of corpora, in words.
ROLES = {"retention": "what the base knew", "acquisition": "what it was taught"}
# What the guarantee of the posterior rule leaves out.
NOT_COVERED = (
    "This bound holds for whole documents, scored from their first token. It does not cover text "
    "scored after a context that favours another head, such as the choices of a benchmark. It does "
    "not cover generation either: a head must first win back the nats by which a long prompt "
    "favours another."
)


@dataclass(frozen=True)
class HeadResult:
    """One head, or one routing rule, on one corpus; a figure that is not finite is None."""

    nats_per_token: float | None  # cross-entropy
    perplexity: float | None  # its exponential
    # The same loss per UTF-8 byte of text, comparable between tokenizers.
    bits_per_byte: float | None
    bits_per_byte_difference: Interval  # from the base head
    # the most that any one document lost against the base head, over the whole document
    worst_document_nats: float | None
    base_share: float | None  # share of tokens that the base head served; None if nothing is routed


@dataclass(frozen=True)
class Figure:
    """A column in the tables of the report and the comparison: one figure of a head on a corpus."""

    title: str
    subtitle: str  # the unit, and what else stands below the title
    # A dash if there is no figure; a column of dashes is left out.
    cell: Callable[[HeadResult], str | Cell]
    of_base: bool = True  # whether it is shown for the base's head too
    per_token: bool = False  # comparable only between runs with the same tokens
    compared: bool = True  # whether the comparison has it


FIGURES = (
    Figure(
        "nats/token",
        "",
        lambda head: number(head.nats_per_token, 4),
        per_token=True,
        compared=False,
    ),
    Figure("bits/byte", "", lambda head: number(head.bits_per_byte)),
    Figure(
        "bits/byte − base",
        "95 % interval",
        lambda head: difference_cell(head.bits_per_byte_difference),
        of_base=False,
    ),
    Figure("perplexity", "of a token", lambda head: perplexity(head.perplexity), per_token=True),
    Figure(
        "worst document",
        "nats − base",
        lambda head: worst_document(head.worst_document_nats),
        of_base=False,
    ),
    Figure(
        "by base head",
        "of the tokens",
        lambda head: DASH if head.base_share is None else percent(head.base_share),
        of_base=False,
    ),
)


@dataclass(frozen=True)
class CorpusResult:
    """Every head on one corpus."""

    name: str
    language: str
    role: str
    num_documents: int
    num_tokens: int  # by the run's tokenizer
    num_base_tokens: int  # of the same text, by the base's own tokenizer
    num_bytes: int
    # `base` is the base as it is served: by its own tokens. `cosine` only if one pass shows both heads.
    heads: dict[str, HeadResult]
    # The base's head in the router, which reads the run's new tokens; None if the run adds none.
    base_of_new_tokens: HeadResult | None = None
    shared: list[SharedText] = field(default_factory=list)  # with the text that is trained on
    taught: bool = True  # whether text of its kind was trained on; conversations often are not

    @property
    def role_in_words(self) -> str:
        """The role, and whether the text, or a part of it, is also trained on."""
        if not self.shared:
            return self.role
        is_replay = all(shared.role == "replay" for shared in self.shared)
        return f"{self.role}, also {'replay' if is_replay else 'trained on'}"

    def failed(self, head: str) -> bool:
        """Return whether a head is not finite, or worse than the base at what it was to learn."""
        ends = self.heads[head].bits_per_byte_difference.ends
        return not ends or (self.role == "acquisition" and self.taught and min(ends) > 0)

    @property
    def has_new_tokens(self) -> bool:
        return self.base_of_new_tokens is not None

    @property
    def bytes_per_token(self) -> float:
        return self.num_bytes / self.num_tokens


@dataclass(frozen=True)
class BenchmarkHead:
    """One head, or one routing rule, on one benchmark."""

    # `acc`, and `acc_norm` and `f1` if lm-eval reports them. For a generative task, lm-eval's own
    # metrics, with the filter's name if there are several: `exact_match, strict-match`.
    metrics: dict[str, Interval]
    # Of the same metrics from the base head; empty for the base head itself.
    differences: dict[str, Interval]
    # items that this head has right and the base head wrong; None if scores lie in between
    gained: int | None = None
    lost: int | None = None  # the opposite
    # Of the difference in the judging metric: McNemar's exact test, or random sign flips.
    p_value: float | None = None
    p_holm: float | None = None  # the same, adjusted over all benchmarks of the report


@dataclass(frozen=True)
class BenchmarkResult:
    """Every head on one benchmark."""

    name: str
    language: str
    role: str
    num_items: int
    heads: dict[str, BenchmarkHead]
    judged_by: str = "acc"  # the metric that is tested and averaged


@dataclass(frozen=True)
class BenchmarkItems:
    """All items of one benchmark, under every head. Shapes: N items, H heads."""

    source: BenchmarkSource  # its entry in the config
    items: list[dict[str, Any]]  # as JSON has them
    scores: dict[str, Values]  # (N, H) by every metric that all items have
    f1: Values | None = None  # (H,) over all items, if lm-eval reports it for a single task

    @property
    def judged_by(self) -> str:
        """The first metric with scores from 0 to 1 for all items: `acc` for multiple choice.

        Raises RunError if there is none.
        """
        for name, scores_NH in self.scores.items():
            if ((scores_NH >= 0.0) & (scores_NH <= 1.0)).all():
                return name
        raise RunError("lm-eval reports no metric that says whether an item is right")


@dataclass(frozen=True)
class SkippedBenchmark:
    """A benchmark that was asked for and not measured."""

    name: str
    reason: str


@dataclass(frozen=True)
class LanguageAverage:
    """The mean of the judging metrics of a language's benchmarks, with equal weights."""

    language: str
    num_benchmarks: int
    acc: dict[str, Interval]
    acc_difference: dict[str, Interval]


@dataclass(frozen=True)
class Report(RunRecord):
    """A forgetting report."""

    FILE = "report.json"
    variant: str  # of the method
    served: str  # the head, or the routing rule, that the model answers with
    step: int  # optimiser steps trained
    num_tokens_trained: int  # target tokens trained on
    trained_sha256: str  # of the trained weights that were measured
    corpora: list[CorpusResult]  # results, in the config's order
    benchmarks: list[BenchmarkResult] = field(default_factory=list)  # likewise
    benchmark_averages: list[LanguageAverage] = field(default_factory=list)  # per language
    skipped_benchmarks: list[SkippedBenchmark] = field(default_factory=list)
    # Names of the corpora, which contain hashes of their text.
    texts: list[str] = field(default_factory=list)
    dtype: str = ""  # of the base's weights
    mixed_precision: str = ""  # of the passes: `no`, or what autocast computes products in
    device: str = ""  # that computed them, by its name
    context: int = 0  # the most tokens that one was predicted from
    date: str = ""  # of the measurement, as 2026-01-31
    searched_training_text: bool = True  # for held-out text; False: it is gone
    note: str = ""  # on a model that others trained: which base its own file names, if another

    @property
    def precision(self) -> str:
        """How it was measured, in words."""
        products = "" if self.mixed_precision == "no" else f", products in {self.mixed_precision}"
        context = f"documents whole, {self.context:,} tokens at most before a token"
        return f"the base in {self.dtype}{products}, on {self.device}; {context}"

    @property
    def rules(self) -> list[str]:
        """The routing rules that were measured on text."""
        measured = {head for corpus in self.corpora for head in corpus.heads}
        return [rule for rule in HEADS_AND_RULES[2:] if rule in measured]

    @property
    def by_role(self) -> list[CorpusResult]:
        return [corpus for role in ROLES for corpus in self.with_role(role)]

    def with_role(self, role: str) -> list[CorpusResult]:
        return [corpus for corpus in self.corpora if corpus.role == role]

    def corpus(self, name: str) -> CorpusResult:
        return next(corpus for corpus in self.corpora if corpus.name == name)

    def benchmark(self, name: str) -> BenchmarkResult | None:
        return next((result for result in self.benchmarks if result.name == name), None)

    def base_share_by_language(self, rule: str) -> dict[str, float]:
        """Return the base head's share of tokens under a routing rule, per language."""
        shares = {}
        for language in dict.fromkeys(corpus.language for corpus in self.corpora):
            corpora = [corpus for corpus in self.corpora if corpus.language == language]
            served = sum(
                (corpus.heads[rule].base_share or 0.0) * corpus.num_tokens for corpus in corpora
            )
            shares[language] = served / sum(corpus.num_tokens for corpus in corpora)
        return shares

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values, with the shares per language beside it."""
        shares = {rule: self.base_share_by_language(rule) for rule in self.rules}
        return {**asdict(self), "base_share_by_language": shares}


def summarise(
    source: EvaluationSource,
    losses: DocumentLosses,
    of_base: DocumentLosses | None = None,  # by the base's own tokens, if the run has others
    *,
    shared: Iterable[SharedText] = (),
    taught: bool = True,
    num_resamples: int,
    seed: int,
) -> CorpusResult:
    """Return the figures of one corpus from its documents' losses."""
    nats = dict(losses.nats)
    num_tokens = num_base_tokens = float(losses.num_tokens.sum())
    if of_base is not None:
        # Without BOS and EOS, a document of one new token has nothing to score, but its pieces do.
        of_base = of_base.among(losses.places)
        nats[_BASE_OF_NEW_TOKENS] = nats["base"]
        nats["base"] = of_base.nats["base"]
        num_base_tokens = float(of_base.num_tokens.sum())

    base_N = nats["base"]
    # Nats of a document divided by this are bits/byte.
    scale_N = losses.num_bytes * math.log(2)
    intervals = paired_differences(
        base_N,
        np.column_stack(list(nats.values())),
        scale_N,
        num_resamples=num_resamples,
        seed=seed,
    )
    heads = {}
    for (name, nats_N), difference in zip(nats.items(), intervals, strict=True):
        nats_per_token = nats_N.sum() / (num_base_tokens if name == "base" else num_tokens)
        with np.errstate(invalid="ignore"):  # of losses that are not finite
            lost_N = nats_N - base_N
        heads[name] = HeadResult(
            nats_per_token=finite(nats_per_token),
            perplexity=math.exp(nats_per_token) if nats_per_token < _MAX_EXPONENT else None,
            bits_per_byte=finite(nats_N.sum() / scale_N.sum()),
            bits_per_byte_difference=difference,
            worst_document_nats=finite(np.max(lost_N)),
            base_share=losses.base_share(name) if name in losses.served else None,
        )

    return CorpusResult(
        name=source.name,
        language=source.language,
        role=source.role,
        num_documents=len(losses.num_tokens),
        num_tokens=int(num_tokens),
        num_base_tokens=int(num_base_tokens),
        num_bytes=int(losses.num_bytes.sum()),
        heads={name: heads[name] for name in HEADS_AND_RULES if name in heads},
        base_of_new_tokens=heads.get(_BASE_OF_NEW_TOKENS),
        shared=list(shared),
        taught=taught,
    )


def finished_report(
    config: RunConfig, sections: tuple[str, ...] = EVALUATE_SECTIONS
) -> Report | None:
    """Return the report that is already there for this training and these sections of a config, or
    None.
    """
    run = RunFolder(config.output_dir)
    if not is_whole(run.evaluation):
        return None
    report = Report.load(run.evaluation)
    changed = differences(load_config(run.evaluation / "scale.yaml"), config, sections)
    is_current = report.trained_sha256 == trained_sha256(run.final)
    return report if is_current and not changed else None


def report_sha256(config: RunConfig, report: Report | None) -> str | None:
    path = RunFolder(config.output_dir).evaluation / Report.FILE
    return None if report is None else file_sha256(path)
