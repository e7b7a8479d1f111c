"""What a run learned of held-out text, and what an export keeps of it and of the base.

Rounding takes from a merged model much of what a short training changed in large matrices, and no
tolerance of logits shows that. So base, run and export are scored on the same tokens.

A plain export of an expansion holds both streams in one, whose norms u enters where it is huge
(`dense.py`). That is at a few tokens, of text unlike that of training, and the base's head is then
not the base. So beginnings of retained documents are scored by that head too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import EvaluationSource, Role
from scale_cli.data.corpora import open_sources
from scale_cli.data.encoding import Integers
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.errors import ExportParityError
from scale_cli.evaluation.scoring import (
    DocumentLosses,
    Passes,
    beginnings,
    same_beginnings,
    score_beginnings,
)
from scale_cli.export.records import Losses
from scale_cli.model.heads import ModelPair
from scale_cli.processes import move_to_device
from scale_cli.runs.opened import MethodFolder
from scale_cli.upscale.base_files import BaseRecord
from scale_cli.upscale.building import MethodModel

TOKENS_JUDGED = 4096  # of all texts of a role
LONGEST_RETAINED = 256  # tokens of a document


@dataclass(frozen=True)
class HeldOutText:
    """Beginnings of held-out documents of one role, by one tokenizer."""

    config: RunConfig
    sources: list[EvaluationSource]
    corpora: list[TokenisedCorpus]
    lengths: list[Integers]  # tokens of each document
    passes: Passes

    @classmethod
    def of(cls, final: MethodFolder, role: Role, longest: int | None = None) -> HeldOutText | None:
        """Open the texts of a role; None if a run has none.

        Of each document, at most the first `longest` tokens are read; None: what the context holds.
        """
        evaluation = final.run.config.evaluation.model_copy(update={"mixed_precision": "no"})
        config = final.run.config.model_copy(update={"evaluation": evaluation})
        sources = [one for one in config.evaluation.perplexity if one.role == role]
        if not sources:
            return None
        corpora = open_sources(config, sources, final.tokenizer)
        passes = Passes.of(config, final.run.base_config.max_position_embeddings)
        of_each = TOKENS_JUDGED // len(corpora)
        length = passes.context if longest is None else min(longest, passes.context)
        lengths = [beginnings(corpus, length, of_each) for corpus in corpora]
        return cls(config, sources, corpora, lengths, passes)

    @property
    def num_tokens(self) -> int:
        return sum(int(lengths_N.sum()) for lengths_N in self.lengths)

    def score(self, model: Any, label: str, base: BaseRecord | None = None) -> list[DocumentLosses]:
        """Return what each document costs a model; `base`: it is that base."""
        return score_beginnings(
            _streams(model),
            self.corpora,
            self.lengths,
            config=self.config,
            passes=self.passes,
            base=base,
            label=label,
        )

    def nats(self, model: Any, base: BaseRecord | None = None) -> dict[str, float]:
        """Return what all of it costs a model, by head and routing rule; `base`: it is that base."""
        nats: dict[str, float] = {}
        for losses in self.score(model, "what was learned", base):
            for name, nats_N in losses.nats.items():
                nats[name] = nats.get(name, 0.0) + float(nats_N.sum())
        return nats


@dataclass(frozen=True)
class Learned:
    """What held-out text costs the base and the run, in nats in all."""

    text: HeldOutText
    base: float
    run: dict[str, float]  # by head and routing rule

    @classmethod
    def of(cls, final: MethodFolder, trained: MethodModel) -> Learned | None:
        """Score a run; None if it has no held-out text of the role acquisition."""
        text = HeldOutText.of(final, "acquisition")
        if text is None:
            return None
        of_base = text
        if text.config.method.vocabulary is not None:
            others = open_sources(text.config, text.sources, final.run.base_tokenizer)
            same = map(same_beginnings, text.lengths, text.corpora, others)
            of_base = replace(text, corpora=others, lengths=list(same))
        base = move_to_device(final.load_base()).eval()
        return cls(
            text=text,
            base=of_base.nats(ModelPair(base), final.record)["base"],
            run=text.nats(trained),
        )

    def losses(self, exported: Any, head: str) -> Losses:
        """Return what the text costs an export that answers with a head, beside base and run."""
        of_export = self.text.nats(exported)[head]
        num_tokens = self.text.num_tokens
        return Losses(
            base=self.base / num_tokens,
            run=self.run[head] / num_tokens,
            export=of_export / num_tokens,
        )


@dataclass(frozen=True)
class Retained:
    """What held-out text of the role retention costs a run's base head, which is the base."""

    final: MethodFolder
    trained: MethodModel

    @cached_property
    def text(self) -> HeldOutText | None:
        """The beginnings of as many documents as the budget allows, short ones."""
        return HeldOutText.of(self.final, "retention", LONGEST_RETAINED)

    @cached_property
    def losses_of_run(self) -> list[DocumentLosses]:
        assert self.text is not None
        return self.text.score(self.trained, "what the base knows")

    def check(self, exported: Any, allowed: float, remedy: str) -> None:
        """Raise ExportParityError if a document costs an export's base head more than the run's.

        Args:
            exported: the model.
            allowed: nats that rounding may cost a document.
            remedy: what the error advises.
        """
        if self.text is None:
            return
        losses_of_export = self.text.score(exported, "its base head")
        for source, run, export in zip(
            self.text.sources, self.losses_of_run, losses_of_export, strict=True
        ):
            apart_N = export.nats["base"] - run.nats["base"]
            worst = int(apart_N.argmax())  # of a NaN, if there is one
            if not apart_N[worst] <= allowed:
                raise ExportParityError(
                    f"the export's base head is not the base: of {source.name}, document "
                    f"{run.places[worst] + 1:,} costs it {apart_N[worst]:.2g} nats more, allowed: "
                    f"{allowed:g}; {remedy}"
                )


def _streams(model: Any) -> Any:
    """Return a model that gives heads; a plain one is the trained head."""
    return model if hasattr(model, "head_logits") else ModelPair(trained=model)
