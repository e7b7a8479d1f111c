"""Evaluations during training, on held-out text; and the choice of the best weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from scale_cli.config.schema import RunConfig
from scale_cli.data.decoding import before_cut_character, text_pieces
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.evaluation.around_generate import (
    TokensWritten,
    before_end,
    ends_of,
)
from scale_cli.evaluation.intervals import finite
from scale_cli.evaluation.scoring import (
    DocumentLosses,
    Passes,
    beginnings,
    same_beginnings,
    score_beginnings,
    tokens_bar,
)
from scale_cli.model.heads import Streams, base_alone
from scale_cli.model.two_streams import TwoStreams
from scale_cli.processes import autocast, is_main, share
from scale_cli.report import number
from scale_cli.runs.method_folder import router_of
from scale_cli.training.metrics_log import (
    BITS,
    EVALUATION,
    SAMPLES,
    SHARES,
    Losses,
    MetricsRecord,
)
from scale_cli.training.objective import attending_by_sdpa
from scale_cli.training.records import Score
from scale_cli.training.sharding import gathered_roots, is_sharded
from scale_cli.upscale.base_files import BaseRecord
from scale_cli.upscale.building import MethodModel

_PROMPT_TOKENS = _NEW_TOKENS = 32  # of a sample


@dataclass(frozen=True)
class Observer:
    """Evaluates a model as it trains; every process takes part."""

    config: RunConfig
    model: MethodModel  # the trained model
    wrapped: nn.Module  # the same as it is run
    observed: Streams  # the same with its base head
    base: BaseRecord
    tokenizer: PreTrainedTokenizerBase
    held_out: list[TokenisedCorpus]  # in the config's order
    by_base_tokens: list[TokenisedCorpus]  # the same text, if the run has new tokens; else empty

    def evaluate(self, step: int) -> MetricsRecord:
        """Return a record of the losses and samples after a step."""
        record: MetricsRecord = {"step": step}
        self.model.eval()
        with gathered_roots(self.wrapped, self.observed), attending_by_sdpa(self.model):
            self._record_losses(record)
            if samples := self.samples():
                record[SAMPLES] = samples
        self.model.train()
        return record

    def _record_losses(self, record: MetricsRecord) -> None:
        """Record every head's loss on the beginnings of the first documents of every held-out
        corpus.

        `base` is the base as it is served, by its own tokens, as in the report. `routed` is the
        loss under the router's rule.
        """
        rule = self.config.method.rules.rule
        scored = self._score(self.observed, self.held_out, "evaluating")
        of_base = self._losses_of_base or scored
        record[EVALUATION] = {}
        record[BITS] = {}
        record[SHARES] = {}
        for source, losses, base in zip(
            self.config.evaluation.perplexity, scored, of_base, strict=True
        ):
            heads = {
                "base": (base.among(losses.places), "base"),
                "trained": (losses, "trained"),
                "routed": (losses, rule),
            }
            record[EVALUATION][source.name] = {
                head: finite(of.nats_per_token(name)) for head, (of, name) in heads.items()
            }
            record[BITS][source.name] = {
                head: finite(of.bits_per_byte(name)) for head, (of, name) in heads.items()
            }
            record[SHARES][source.name] = finite(losses.base_share(rule))

    @cached_property
    def _losses_of_base(self) -> list[DocumentLosses]:
        """What the base loses by its own tokens if the run has others: the same at every step."""
        base = base_alone(self.observed)
        return self._score(base, self.by_base_tokens, "evaluating the base")

    def _score(
        self,
        model: Streams,
        corpora: list[TokenisedCorpus],
        label: str,
    ) -> list[DocumentLosses]:
        """Score the beginnings of the held-out text, by the tokens of the run or of the base."""
        of_each = max(1, self.config.eval_tokens // len(self.held_out))
        lengths = []
        for of_run, corpus in zip(self.held_out, corpora, strict=False):
            lengths_N = beginnings(of_run, self.config.eval_beginning, of_each)
            lengths.append(same_beginnings(lengths_N, of_run, corpus))
        passes = Passes.of(self.config, self.model.config.max_position_embeddings)
        # A sharded model takes rows whole, those of the base's own tokens too.
        longest = max((int(lengths_N.max()) for lengths_N in lengths), default=0)
        passes = replace(passes, sequence_length=max(passes.sequence_length, longest))
        return score_beginnings(
            model,
            corpora,
            lengths,
            config=self.config,
            passes=passes,
            base=self.base,
            label=label if is_main() else None,
            share=share(),
        )

    def samples(self) -> dict[str, dict[str, str]]:
        """Return, by corpus, how the served head and the base continue one held-out document per
        language.

        Only the main process generates, or all if the model is sharded. There are no samples with
        flex_attention.
        """
        config = self.config
        if config.train.attention == "flex_attention" or not (is_main() or is_sharded(self.model)):
            return {}
        of_base = self._samples_of_base
        served = self._sampled(config.method.served, "sampling")
        return {
            name: {**sample, "base": of_base[name]["continuation"]}
            for name, sample in served.items()
        }

    @cached_property
    def _samples_of_base(self) -> dict[str, dict[str, str]]:
        """How the base continues: the same at every step."""
        return self._sampled("base", "sampling the base")

    def _sampled(self, head: str, label: str) -> dict[str, dict[str, str]]:
        """Return a head's samples: of each language's first corpus, by its name."""
        languages: dict[str, tuple[str, TokenisedCorpus]] = {}
        for source, corpus in zip(self.config.evaluation.perplexity, self.held_out, strict=True):
            languages.setdefault(source.language, (source.name, corpus))
        num_tokens = len(languages) * _NEW_TOKENS
        with tokens_bar(num_tokens, label if is_main() else None) as bar:
            return {name: self._sample(corpus, head, bar) for name, corpus in languages.values()}

    @torch.no_grad()
    def _sample(self, corpus: TokenisedCorpus, head: str, bar: Any) -> dict[str, str]:
        """Return the beginning of a document, and a head's greedy continuation of it."""
        answers = TwoStreams(self.observed, router_of(self.config))
        answers.head = head
        ends = ends_of(answers.generation_config.eos_token_id, self.tokenizer)
        answers.generation_config = GenerationConfig(
            max_new_tokens=_NEW_TOKENS,
            do_sample=False,
            eos_token_id=ends or None,
            pad_token_id=next(iter(ends), 0),
        )
        # A shorter document is a heading, which says little; if all are, the longest one is taken.
        lengths = corpus.offsets[1:] - corpus.offsets[:-1]
        index = int((lengths.clip(max=2 * _PROMPT_TOKENS)).argmax())
        begun = corpus.with_boundary(index)[:_PROMPT_TOKENS].tolist()
        begun_T = torch.tensor(before_cut_character(self.tokenizer, begun))
        marks = [] if corpus.markers.eos is None else [corpus.markers.eos]
        prompt_T = torch.cat([begun_T[:1], before_end(marks, begun_T[1:])])
        prompt_BT = prompt_T[None].to(answers.device)
        with autocast(answers.device.type, self.config.evaluation.mixed_precision):
            new_BT = answers.answers(
                prompt_BT, torch.ones_like(prompt_BT), streamer=TokensWritten(bar)
            )
        new_T = before_end(ends, new_BT[0].cpu())
        begun = str(self.tokenizer.decode(prompt_T, skip_special_tokens=True))
        said = text_pieces(self.tokenizer, prompt_T.tolist(), new_T.tolist())
        return {"prompt": begun, "continuation": "".join(said)}

    def failures(self, bits_per_byte: Losses) -> dict[str, str]:
        """Return what failed, by corpus: the trained head is not finite, or it is worse than the base
        at what it is to learn.
        """
        told = {}
        for source in self.config.evaluation.perplexity:
            base, trained = (bits_per_byte[source.name][head] for head in ("base", "trained"))
            before, after = number(base), number(trained)
            if trained is None:
                told[source.name] = "the trained head's loss is not finite"
            elif not self.config.teaches(source) or source.role != "acquisition" or base is None:
                continue
            elif float(after) > float(before):
                told[source.name] = (
                    f"the trained head is worse than the base at what it is to learn, {before} to "
                    f"{after} bits/byte, without an interval, of the text that this evaluation reads"
                )
        return told

    def score(self, step: int, bits_per_byte: Losses) -> Score | None:
        """Return the served head's score; None if a loss is not finite."""
        served = self.config.method.head
        learned = []
        lost = []
        for source in self.config.evaluation.perplexity:
            of_base, of_served = (bits_per_byte[source.name][head] for head in ("base", served))
            if of_base is None or of_served is None:
                return None
            if source.role == "acquisition":
                learned.append(of_served)
            else:
                lost.append(of_served - of_base)
        texts = [corpus.name for corpus in self.held_out]
        return Score(step, sum(learned) / len(learned), max(lost), texts)


def better_of(best: Score | None, new: Score | None, max_forgetting: float) -> Score | None:
    """Return the evaluation whose weights to keep.

    Among those within the bound on forgetting, it is the one that learned most; if none is, the one
    that forgot least. Of equals, the first.
    """
    known = [score for score in (best, new) if score is not None]
    return min(
        known,
        key=lambda score: (max(score.forgetting - max_forgetting, 0.0), score.acquisition),
        default=None,
    )
