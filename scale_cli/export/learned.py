"""What a run learned of held-out text, and what an export keeps of it.

Rounding takes from a merged model much of what a short training changed in large matrices, and no
tolerance of logits shows that. So base, run and export are scored on the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scale_cli.config.schema import RunConfig
from scale_cli.data.corpora import open_sources
from scale_cli.data.encoding import Integers
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.evaluation.scoring import (
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

TOKENS_JUDGED = 4096  # of all texts


@dataclass(frozen=True)
class HeldOutText:
    """Beginnings of held-out documents of what was to be learned, by one tokenizer."""

    config: RunConfig
    corpora: list[TokenisedCorpus]
    lengths: list[Integers]  # tokens of each document
    passes: Passes

    @property
    def num_tokens(self) -> int:
        return sum(int(lengths_N.sum()) for lengths_N in self.lengths)

    def nats(self, model: Any, base: BaseRecord | None = None) -> dict[str, float]:
        """Return what all of it costs a model, by head and routing rule; `base`: it is that base."""
        nats: dict[str, float] = {}
        for losses in score_beginnings(
            model,
            self.corpora,
            self.lengths,
            config=self.config,
            passes=self.passes,
            base=base,
            label="what was learned",
        ):
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
        evaluation = final.run.config.evaluation.model_copy(update={"mixed_precision": "no"})
        config = final.run.config.model_copy(update={"evaluation": evaluation})
        sources = [one for one in config.evaluation.perplexity if one.role == "acquisition"]
        if not sources:
            return None
        corpora = open_sources(config, sources, final.tokenizer)
        passes = Passes.of(config, final.run.base_config.max_position_embeddings)
        of_each = TOKENS_JUDGED // len(corpora)
        lengths = [beginnings(corpus, passes.context, of_each) for corpus in corpora]
        text = of_base = HeldOutText(config, corpora, lengths, passes)
        if config.method.vocabulary is not None:
            others = open_sources(config, sources, final.run.base_tokenizer)
            same = map(same_beginnings, lengths, corpora, others)
            of_base = HeldOutText(config, others, list(same), passes)
        base = move_to_device(final.load_base()).eval()
        return cls(
            text=text,
            base=of_base.nats(ModelPair(base), final.record)["base"],
            run=text.nats(_streams(trained)),
        )

    def losses(self, exported: Any, head: str) -> Losses:
        """Return what the text costs an export that answers with a head, beside base and run."""
        of_export = self.text.nats(_streams(exported))[head]
        num_tokens = self.text.num_tokens
        return Losses(
            base=self.base / num_tokens,
            run=self.run[head] / num_tokens,
            export=of_export / num_tokens,
        )


def _streams(model: Any) -> Any:
    """Return a model that gives heads; a plain one is the trained head."""
    return model if hasattr(model, "head_logits") else ModelPair(trained=model)
