"""A base is asked once for what a text costs it; every later evaluation reads what was kept."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import EvaluationSource
from scale_cli.data.tokens import TokenCache, TokenisedCorpus
from scale_cli.evaluation.base_scores import BaseScores
from scale_cli.evaluation.scoring import (
    DocumentLosses,
    Passes,
    beginnings,
    kept_scores,
    score_corpus,
    scored_lengths,
)
from scale_cli.methods.widened import RouterConfig
from scale_cli.model.heads import ModelPair
from scale_cli.processes import ALONE, Share
from scale_cli.runs.opened import Run
from scale_cli.upscale.base_files import BaseRecord
from scale_cli.upscale.base_hashes import record_base
from tests.small_runs import changed, small_run
from tests.threads_as_processes import in_processes
from tests.widening import as_if_trained, real_base, widen

Score = Callable[..., DocumentLosses]
RECORD = BaseRecord(
    name="base",
    revision=None,
    dtype="float32",
    tensors={"a": "0" * 64},
    config_sha256="1" * 64,
    tokenizer_sha256="2" * 64,
)


@pytest.fixture
def config(shared_data: Path, tmp_path: Path) -> RunConfig:
    return small_run(tmp_path, shared_data / "ckpt-stories260K/hf", method={"variant": "full"})


@pytest.fixture
def corpus(shared_data: Path, config: RunConfig, tmp_path: Path) -> TokenisedCorpus:
    tales = str(shared_data / "en-tinystories/tinystories_val.txt")
    source = EvaluationSource(
        name="tales", path=tales, language="en", role="retention", max_documents=4
    )
    return TokenCache(tmp_path / "tokens", Run(config).base_tokenizer).open(source)


@pytest.fixture
def model(shared_data: Path) -> ModelPair:
    """A base, and beside it another model that a run might have trained from it."""
    other = as_if_trained(
        widen(real_base(shared_data, "ckpt-stories260K"), "adapt", "all"), std=0.05
    )
    return ModelPair(real_base(shared_data, "ckpt-stories260K"), other.base).eval()


@pytest.fixture
def unasked(model: ModelPair) -> ModelPair:
    """The same models, of which the base cannot be run."""
    return ModelPair(Unasked(model.base), model.trained).eval()


@pytest.fixture
def score(model: ModelPair, corpus: TokenisedCorpus, config: RunConfig) -> Score:
    """A function that scores the corpus as a process would that has just begun."""
    passes = replace(Passes.of(config, 512), context=96)

    def scored(of: Any = model, *, keeping: bool = True, **options: Any) -> DocumentLosses:
        kept = kept_scores(of, corpus, RECORD, config, passes) if keeping else None
        return score_corpus(of, corpus, RouterConfig(), passes, kept=kept, **options)

    return scored


class Unasked(nn.Module):
    """A base that cannot be run."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.held = base
        self.config = base.config
        self.generation_config = base.generation_config

    def get_decoder(self) -> Any:
        raise AssertionError("the base was asked again")


def test_a_kept_base_gives_the_figures_of_one_pass_over_both(score: Score) -> None:
    both = score(keeping=False)
    for losses in (score(), score()):  # asked, and read
        for name in ("base", "trained", "posterior"):
            np.testing.assert_allclose(losses.nats[name], both.nats[name], rtol=1e-5)
        np.testing.assert_allclose(losses.served["posterior"], both.served["posterior"], rtol=1e-4)
        assert "cosine" not in losses.nats, "its rule needs the logits of both"


def test_a_base_that_was_asked_once_is_not_asked_again(score: Score, unasked: ModelPair) -> None:
    first = score()
    np.testing.assert_equal(score(unasked).nats, first.nats)
    base = score(ModelPair(unasked.base).eval())
    np.testing.assert_equal(base.nats["base"], first.nats["base"])


def test_beginnings_that_are_known_stay_so_and_the_whole_is_asked_for_once(
    score: Score, unasked: ModelPair, corpus: TokenisedCorpus
) -> None:
    begun = beginnings(corpus, 40, 100)
    first = score(lengths_N=begun)
    np.testing.assert_equal(score(unasked, lengths_N=begun).nats, first.nats)
    with pytest.raises(AssertionError, match="asked again"):
        score(unasked)
    whole = score()
    np.testing.assert_equal(score(unasked).nats, whole.nats)
    assert whole.num_tokens.sum() == scored_lengths(corpus).sum()


def test_a_loss_that_is_not_finite_stays_so_and_is_not_asked_for_again(tmp_path: Path) -> None:
    lengths_N = np.array([3, 1])
    scores = BaseScores(tmp_path / "scores", lengths_N)
    scores.keep(0, torch.tensor([-1.5, -math.inf, math.nan]))
    scores.save()
    read = BaseScores(tmp_path / "scores", lengths_N)
    assert read.of_document(0, 3).tolist() == [-1.5, -math.inf, -math.inf]
    assert read.of_document(1, 1).isnan().all()


def test_what_is_damaged_is_asked_for_again(
    score: Score, corpus: TokenisedCorpus, unasked: ModelPair
) -> None:
    first = score()
    (kept,) = corpus.folder.parent.glob("*.base-*/log_probs.bin")
    kept.write_bytes(b"\0" * kept.stat().st_size)
    np.testing.assert_equal(score().nats, first.nats)
    np.testing.assert_equal(score(unasked).nats, first.nats)


def test_processes_that_keep_different_scores_run_the_same_passes(
    model: ModelPair,
    corpus: TokenisedCorpus,
    config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As two machines without a common disk do: one has kept the base, the other has not."""
    passes = replace(Passes.of(config, 512), context=96)

    def scored(share: Share = ALONE) -> DocumentLosses:
        kept = kept_scores(model, corpus, RECORD, config, passes)
        assert kept is not None
        if share.index == 1:
            kept = replace(kept, folder=tmp_path / "nothing.base-here")
        return score_corpus(model, corpus, RouterConfig(), passes, kept=kept, share=share)

    alone = scored()
    for together in in_processes(monkeypatch, 2, scored):
        np.testing.assert_equal(together.nats, alone.nats)


def test_another_base_precision_or_context_is_kept_apart(
    model: ModelPair, corpus: TokenisedCorpus, config: RunConfig
) -> None:
    passes = Passes.of(config, 512)
    rounded = changed(config, "evaluation.mixed_precision=bf16")
    other = replace(RECORD, tensors={"a": "3" * 64})
    ways: list[tuple[BaseRecord, RunConfig, Passes]] = [
        (RECORD, config, passes),
        (other, config, passes),
        (RECORD, rounded, passes),
        (RECORD, config, replace(passes, context=64)),
    ]
    kept = [kept_scores(model, corpus, *way) for way in ways]
    assert len({of.folder for of in kept if of is not None}) == len(ways)


def test_the_same_weights_with_another_rope_theta_are_kept_apart(
    model: ModelPair, corpus: TokenisedCorpus, config: RunConfig
) -> None:
    passes = Passes.of(config, 512)
    records = [record_base(model.base, config.model)]
    model.base.config.rope_parameters["rope_theta"] *= 2
    records.append(record_base(model.base, config.model))
    assert records[0].tensors == records[1].tensors
    one, other = (kept_scores(model, corpus, record, config, passes) for record in records)
    assert one is not None and other is not None and one.folder != other.folder


def test_only_a_base_of_its_own_is_kept(
    shared_data: Path, model: ModelPair, corpus: TokenisedCorpus, config: RunConfig
) -> None:
    passes = Passes.of(config, 512)
    widened = widen(real_base(shared_data, "ckpt-stories260K"), "route")
    assert kept_scores(widened, corpus, RECORD, config, passes) is None
    cosine = changed(config, "method.router.rule=cosine")
    assert kept_scores(model, corpus, RECORD, cosine, passes) is None
