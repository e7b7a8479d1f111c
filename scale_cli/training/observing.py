"""What is measured of the weights on the way: held-out text, some items of benchmarks; and the best weights so far."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedTokenizerBase

from scale_cli.config.schema import ContinuationsConfig, RunConfig
from scale_cli.config.sources import EvaluationSource
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.evaluation.continuations import SelectableHeads, continuations, prompts_of
from scale_cli.evaluation.scoring import Passes, score_corpus
from scale_cli.evaluation.statistics import finite
from scale_cli.model.heads import HeadedModel
from scale_cli.processes import ALONE, is_main, share
from scale_cli.storage.metrics import Losses, Shares
from scale_cli.storage.records import Score
from scale_cli.training.sharding import gathered_roots, is_sharded
from scale_cli.upscale.method import MethodModel
from scale_cli.upscale.objective import attending_by_sdpa

if TYPE_CHECKING:
    from scale_cli.evaluation.benchmark_tasks import OpenedBenchmarks


_SAMPLE = ContinuationsConfig(prompts=1, prompt_tokens=32, new_tokens=32)


@dataclass(frozen=True)
class HeldOutLosses:
    """What every head pays for the first documents of one corpus, `routed` for the router's rule."""

    nats_per_token: dict[str, float]
    bits_per_byte: dict[str, float]
    base_share: float  # of tokens, those that the base head served under that rule


@dataclass(frozen=True)
class Observer:
    """What measures a model as it trains; every process takes part."""

    config: RunConfig
    model: MethodModel  # what is trained
    wrapped: nn.Module  # the same as it is run
    observed: HeadedModel  # the same with its base head
    tokenizer: PreTrainedTokenizerBase  # of the run
    held_out: list[TokenisedCorpus]  # in the config's order
    benchmarks: OpenedBenchmarks | None  # those of which a few items are asked

    def losses(self) -> dict[str, HeldOutLosses]:
        """Return what some documents of every held-out corpus cost, by the corpus's name."""
        losses, train = {}, self.config.train
        with self._in_evaluation():
            for source, corpus in zip(self.config.evaluation.perplexity, self.held_out, strict=True):
                scored = score_corpus(
                    self.observed,
                    corpus,
                    self.config.method.router,
                    Passes.of(self.config),
                    max_documents=train.eval_max_documents,
                    progress=f"evaluating {source.name}" if is_main() else None,
                    share=share(),
                )
                names = {"base": "base", "adapted": "adapted", "routed": self.config.method.router.rule}
                losses[source.name] = HeldOutLosses(
                    {head: scored.nats_per_token(name) for head, name in names.items()},
                    {head: scored.bits_per_byte(name) for head, name in names.items()},
                    scored.base_share(names["routed"]),
                )
        return losses

    def accuracies(self) -> Losses:
        """Return every head's share of right answers among the first items of every benchmark."""
        assert self.benchmarks is not None, "opened where train.eval_benchmarks_every_steps is set"
        with self._in_evaluation():
            # A sharded model's processes run it together, and answers have as many tokens as they happen to have.
            of_all = ALONE if is_sharded(self.model) else share()
            return self.benchmarks.accuracies(self.observed, self.tokenizer, self.config, of_all)

    def samples(self) -> dict[str, dict[str, str]]:
        """Return how the served head goes on after the beginning of a held-out document of each language, by corpus.

        The main process alone does it, but where parts of the model are elsewhere; where attention is compiled nobody.
        """
        train, texts = self.config.train, {}
        if train.attention == "flex_attention" or not (is_main() or is_sharded(self.model)):
            return {}
        with self._in_evaluation():
            answers = SelectableHeads(self.observed, self.config.method.router)
            for source, corpus in self._of_each_language():
                for prompt in prompts_of(corpus, self.tokenizer, _SAMPLE):
                    precision = self.config.evaluation.mixed_precision
                    said = continuations(answers, self._served, self.tokenizer, _SAMPLE.new_tokens, precision, [prompt])
                    begun = str(self.tokenizer.decode(prompt.ids, skip_special_tokens=True))
                    texts[source.name] = {"prompt": begun, "continuation": said[0]}
        return texts

    def _of_each_language(self) -> list[tuple[EvaluationSource, TokenisedCorpus]]:
        pairs = zip(self.config.evaluation.perplexity, self.held_out, strict=True)
        return list({source.language: (source, corpus) for source, corpus in reversed(list(pairs))}.values())[::-1]

    @property
    def _served(self) -> str:
        """The head, or the rule, that the model answers with."""
        return self.config.method.definition.served(self.config.method.settings)

    def score(self, step: int, losses: Mapping[str, HeldOutLosses]) -> Score | None:
        """Return what the head that is served has learned and lost; None where that is not finite."""
        served = "routed" if self.config.method.definition.routes else "adapted"
        learned, lost = [], []
        for source in self.config.evaluation.perplexity:
            bits = losses[source.name].bits_per_byte
            if source.role == "acquisition":
                learned.append(bits[served])
            else:
                lost.append(bits[served] - bits["base"])
        score = Score(step, sum(learned) / len(learned), max(lost))
        return score if math.isfinite(score.acquisition) and math.isfinite(score.forgetting) else None

    @contextmanager
    def _in_evaluation(self) -> Iterator[None]:
        self.model.eval()
        with gathered_roots(self.wrapped, self.observed), attending_by_sdpa(self.model):
            yield
        self.model.train()


def recorded(losses: Mapping[str, HeldOutLosses]) -> tuple[Losses, Losses, Shares]:
    """Return nats per token, bits per byte and the base head's shares, by corpus; None for what is not finite."""

    def by_head(of_heads: dict[str, float]) -> dict[str, float | None]:
        return {head: finite(figure) for head, figure in of_heads.items()}

    return (
        {name: by_head(of_one.nats_per_token) for name, of_one in losses.items()},
        {name: by_head(of_one.bits_per_byte) for name, of_one in losses.items()},
        {name: finite(of_one.base_share) for name, of_one in losses.items()},
    )


def better_of(best: Score | None, new: Score | None, max_forgetting: float) -> Score | None:
    """Return which of two evaluations to keep the weights of.

    Of those that keep within the bound on forgetting, that which has learned most; where none does, that which has
    lost least. Of two that are alike, the first.
    """
    known = [score for score in (best, new) if score is not None]
    return min(known, key=lambda score: (max(score.forgetting - max_forgetting, 0.0), score.acquisition), default=None)
