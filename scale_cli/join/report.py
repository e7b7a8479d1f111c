"""What a joined model pays on every held-out corpus, under each head and the router; its report and its model card."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from scale_cli.config.load import load_config
from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import EvaluationSource
from scale_cli.data.corpora import open_sources
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.evaluation.results import NOT_COVERED, Values, finite
from scale_cli.evaluation.scoring import Passes, score_corpus
from scale_cli.export.card import Licence, Stage, card
from scale_cli.join.members import JoinedRuns
from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.report import Table, number, percent
from scale_cli.storage.records import RunRecord
from scale_cli.upscale.method import router_of
from scale_cli.upscale.preservation import SAMPLE_TEXTS

KIND = "scale join"


@dataclass(frozen=True)
class HeadFigures:
    """One head, or the router, on one corpus; a figure that is not finite is None."""

    nats_per_token: float | None  # cross-entropy
    bits_per_byte: float | None  # the same loss per UTF-8 byte of text
    share: float | None  # of the tokens, how much this head served; None of the router


@dataclass(frozen=True)
class JoinedCorpus:
    """A corpus under every head and the router."""

    name: str  # of two with the same name and other texts the second has its run's name behind it
    language: str
    num_documents: int  # scored
    num_tokens: int  # scored
    heads: dict[str, HeadFigures]  # by name, the base's first
    routed: HeadFigures  # the mixture
    worst_document_nats: float | None  # the most that routing cost over the best head on any one document


@dataclass(frozen=True)
class JoinReport(RunRecord):
    """What was joined, and what it costs."""

    FILE = "report.json"
    base: str  # name of the plain base
    base_sha256: str  # of its tensors
    members: list[dict[str, Any]]  # of every expansion name, parent (0 for the base), where it was read, and SHA-256
    router_prior: float  # weight of the base head at the first token
    router_switch_rate: float  # of the posterior rule
    # the most that routing may cost over the best head on a document; None where it may switch
    max_cost_nats: float | None
    corpora: list[JoinedCorpus]
    format: str = "transformers"  # of the folder
    rule: str = "posterior"  # among all heads, or among the base's and the mean of the others

    def to_json(self) -> dict[str, Any]:
        return {"kind": KIND, **asdict(self)}

    def lines(self) -> list[str]:
        names = ["base", *(member["name"] for member in self.members)]
        return [
            f"base           {self.base} (sha256 {self.base_sha256[:12]})",
            *(
                f"member         {member['name']}, upon {names[member['parent']]} (sha256 {member['sha256'][:12]})"
                for member in self.members
            ),
            f"proved         base logits, and every head's against its run alone, bitwise equal on "
            f"{len(SAMPLE_TEXTS)} prompts",
            *self.table().lines(),
            self.bound_in_words(),
        ]

    def table(self) -> Table:
        titles = ["corpus", "", *self.corpora[0].heads, "routed", "worst document"]
        rows = []
        for corpus in self.corpora:
            heads = [*corpus.heads.values(), corpus.routed]
            worst = f"{number(corpus.worst_document_nats, 3, '+')} nats"
            rows += [
                [
                    f"{corpus.name} ({corpus.language})",
                    "nats/token",
                    *(number(head.nats_per_token, 4) for head in heads),
                    worst,
                ],
                ["", "bits/byte", *(number(head.bits_per_byte, 4) for head in heads), ""],
                ["", "served", *("" if head.share is None else percent(head.share) for head in heads), ""],
            ]
        return Table(titles, rows, "ll" + "r" * (len(titles) - 2))

    def bound_in_words(self) -> str:
        if self.max_cost_nats is None:
            return "worst document: routed - best head; no bound holds with a switch rate"
        return f"worst document: routed - best head, in nats; {self.max_cost_nats:.3f} at most, whatever was trained"


def score_corpora(
    model: JoinedForCausalLM, configs: Sequence[RunConfig], tokenizer: PreTrainedTokenizerBase
) -> list[JoinedCorpus]:
    """Score the held-out corpora of some runs, in the windows and precision of each; what several have, once."""
    opened: dict[str, tuple[EvaluationSource, TokenisedCorpus, RunConfig]] = {}
    for config in configs:
        corpora = open_sources(config, config.evaluation.perplexity, tokenizer)
        for source, corpus in zip(config.evaluation.perplexity, corpora, strict=True):
            if any(corpus.folder.name == other.folder.name for _, other, _ in opened.values()):
                continue
            name = source.name if source.name not in opened else f"{source.name} ({config.output_dir.name})"
            opened[name] = source, corpus, config
    return [_score(model, name, *held_out) for name, held_out in opened.items()]


def _score(
    model: JoinedForCausalLM, name: str, source: EvaluationSource, corpus: TokenisedCorpus, config: RunConfig
) -> JoinedCorpus:
    names, progress = model.config.head_names, f"scoring {name}"
    losses = score_corpus(model, corpus, router_of(model), Passes.of(config), heads=names, progress=progress)
    num_tokens, bits, routed = losses.num_tokens.sum(), losses.num_bytes.sum() * math.log(2), losses.nats["posterior"]

    def figures(nats: Values, share: float | None = None) -> HeadFigures:
        return HeadFigures(finite(nats.sum() / num_tokens), finite(nats.sum() / bits), share)

    shares = losses.served["posterior"].sum(axis=1) / num_tokens
    return JoinedCorpus(
        name=name,
        language=source.language,
        num_documents=len(routed),
        num_tokens=int(num_tokens),
        heads={head: figures(losses.nats[head], float(share)) for head, share in zip(names, shares, strict=True)},
        routed=figures(routed),
        worst_document_nats=finite(float(np.max(routed - np.min([losses.nats[head] for head in names], axis=0)))),
    )


def joined_card(joined: JoinedRuns, report: JoinReport, licence: Licence) -> str:
    """Return the README.md: the base, what each expansion was taught, what they cost, and the licence."""
    stages = [Stage(load_config(member.folder / "scale.yaml"), member.folder) for member in joined.members]
    kind = {"llama": "ensemble" if report.rule == "mean" else "joined"}.get(report.format, report.format)
    return card(
        "joined_card.md.j2",
        stages,
        licence,
        "joined",
        kind,
        config=joined.model.config,
        members=list(zip(joined.members, stages, strict=True)),
        heads=["base", *(member.name for member in joined.members)],
        report=report,
        not_covered="" if report.max_cost_nats is None else NOT_COVERED,
    )
