"""The report of a join: the loss of every head and of the router on held-out text; and the model
card.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from scale_cli.config.load import load_config
from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import EvaluationSource
from scale_cli.data.corpora import open_sources
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.evaluation.intervals import finite
from scale_cli.evaluation.results import NOT_COVERED
from scale_cli.evaluation.scoring import (
    DocumentLosses,
    Passes,
    score_corpus,
    scored_lengths,
    tokens_bar,
)
from scale_cli.export.card import Licence, Stage, card
from scale_cli.joining.members import JoinedRuns, free_name
from scale_cli.model.heads import HeadedModel, base_alone
from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.report import Table, number, percent
from scale_cli.runs.method_folder import router_of
from scale_cli.storage.records import RunRecord
from scale_cli.upscale.preservation import SAMPLE_TEXTS

KIND = "scale join"


@dataclass(frozen=True)
class HeadFigures:
    """One head, or the router, on one corpus; a figure that is not finite is None."""

    nats_per_token: float | None  # cross-entropy
    bits_per_byte: float | None  # the same loss per UTF-8 byte of text
    # Of the tokens, which this head served; None for what is not a head of the router.
    share: float | None


@dataclass(frozen=True)
class JoinedCorpus:
    """The figures of every head and the router on one corpus."""

    name: str  # if two different corpora have one name, the second gets its run's name in brackets
    language: str
    num_documents: int  # scored
    num_tokens: int  # scored
    # By name, the base's first. `base` is the base as it is served: by its own tokens.
    heads: dict[str, HeadFigures]
    routed: HeadFigures  # the mixture
    # The most that routing cost over the router's best head on any one document.
    worst_document_nats: float | None
    # The base's head in the router, which reads the runs' new tokens; None if they add none.
    base_of_new_tokens: HeadFigures | None = None


@dataclass(frozen=True)
class JoinReport(RunRecord):
    """The joined expansions, and the loss of every head and the router."""

    FILE = "report.json"
    base: str  # its name
    base_sha256: str  # of its tensors
    members: list[dict[str, Any]]  # for every expansion: name, folder and SHA-256
    router_prior: float  # weight of the base head at the first token
    max_cost_nats: float  # upper bound on what routing costs over the best head on a document
    corpora: list[JoinedCorpus]

    def to_json(self) -> dict[str, Any]:
        return {"kind": KIND, **asdict(self)}

    def lines(self) -> list[str]:
        return [
            f"base           {self.base} (sha256 {self.base_sha256[:12]})",
            *(
                f"member         {member['name']} (sha256 {member['sha256'][:12]})"
                for member in self.members
            ),
            "proved         logits of every head, the base's too, bitwise equal to those of the head "
            f"alone on {len(SAMPLE_TEXTS)} prompts",
            *self.table().lines(),
            self.bound_in_words(),
        ]

    def table(self) -> Table:
        mixed = ["base of new tokens"] if self.corpora[0].base_of_new_tokens else []
        titles = ["corpus", "", *self.corpora[0].heads, *mixed, "routed", "worst document"]
        rows = []
        for corpus in self.corpora:
            of_new = [corpus.base_of_new_tokens] if corpus.base_of_new_tokens else []
            heads = [*corpus.heads.values(), *of_new, corpus.routed]
            name = f"{corpus.name} ({corpus.language})"
            nats = [number(head.nats_per_token, 4) for head in heads]
            bits = [number(head.bits_per_byte, 4) for head in heads]
            served = ["" if head.share is None else percent(head.share) for head in heads]
            worst = f"{number(corpus.worst_document_nats, 3, '+')} nats"
            rows += [
                [name, "nats/token", *nats, worst],
                ["", "bits/byte", *bits, ""],
                ["", "served", *served, ""],
            ]
        return Table(titles, rows, "ll" + "r" * (len(titles) - 2))

    def bound_in_words(self) -> str:
        most = f"{self.max_cost_nats:.3f} at most, whatever was trained"
        said = f"worst document: routed - best head, in nats; {most}"
        if any(corpus.base_of_new_tokens for corpus in self.corpora):
            said += "; on text with new tokens, the base's head is the base of new tokens"
        return said


def score_corpora(joined: JoinedRuns, runs: Sequence[RunConfig]) -> list[JoinedCorpus]:
    """Score the held-out corpora of some runs, each in its run's windows and precision; a shared
    one is scored once.

    As in a run's report, the base is scored by its own tokens.
    """
    tokenizers = [joined.tokenizer]
    if joined.model.config.new_tokens:
        tokenizers.append(joined.base_tokenizer)
    opened: dict[str, tuple[EvaluationSource, list[TokenisedCorpus], RunConfig]] = {}
    for run in runs:
        for source in run.evaluation.perplexity:
            corpora = [open_sources(run, [source], of)[0] for of in tokenizers]
            if any(corpora[0].name == others[0].name for _, others, _ in opened.values()):
                continue
            name = source.name
            if name in opened:
                name = f"{name} ({run.output_dir.name})"
            opened[free_name(name, opened)] = source, corpora, run
    return [_score(joined.model, name, *held_out) for name, held_out in opened.items()]


def _score(
    model: JoinedForCausalLM,
    name: str,
    source: EvaluationSource,
    corpora: Sequence[TokenisedCorpus],  # by the joined tokens; by the base's, if they differ
    run: RunConfig,
) -> JoinedCorpus:
    names = model.heads
    models: list[HeadedModel] = [model, base_alone(model)]
    num_tokens = sum(int(scored_lengths(corpus).sum()) for corpus in corpora)
    with tokens_bar(num_tokens, f"scoring {name}") as bar:
        losses, *of_base = [
            score_corpus(
                scored,
                corpus,
                router_of(model),
                Passes.of(run, model.config.max_position_embeddings),
                bar=bar,
            )
            for corpus, scored in zip(corpora, models, strict=False)
        ]

    def figures(of: DocumentLosses, head: str, share: float | None = None) -> HeadFigures:
        return HeadFigures(finite(of.nats_per_token(head)), finite(of.bits_per_byte(head)), share)

    shares = losses.served["posterior"].sum(axis=1) / losses.num_tokens.sum()
    heads = {
        head: figures(losses, head, float(share)) for head, share in zip(names, shares, strict=True)
    }
    base_of_new_tokens = None
    if of_base:
        base_of_new_tokens = heads["base"]
        heads["base"] = figures(of_base[0].among(losses.places), "base")
    routed_N = losses.nats["posterior"]
    best_N = np.min([losses.nats[head] for head in names], axis=0)
    return JoinedCorpus(
        name=name,
        language=source.language,
        num_documents=len(routed_N),
        num_tokens=int(losses.num_tokens.sum()),
        heads=heads,
        routed=figures(losses, "posterior"),
        worst_document_nats=finite(float(np.max(routed_N - best_N))),
        base_of_new_tokens=base_of_new_tokens,
    )


def joined_card(joined: JoinedRuns, report: JoinReport, licence: Licence) -> str:
    """Return the README.md: the base, what each expansion was taught, what they cost, and the
    licence.
    """
    folders = [member.folder for member in joined.members]
    stages = [Stage(load_config(folder / "scale.yaml"), folder) for folder in folders]
    return card(
        stages,
        licence=licence,
        tag="joined",
        kind="transformers",
        config=joined.model.config,
        members=list(zip(joined.members, stages, strict=True)),
        report=report,
        not_covered=NOT_COVERED,
    )
