from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import LlamaConfig

from scale_cli.config.schema import ModelConfig
from scale_cli.config.sources import BenchmarkSource
from scale_cli.errors import RunError
from scale_cli.evaluation.benchmark_heads import ObservedHeads
from scale_cli.evaluation.benchmark_tasks import open_benchmarks
from scale_cli.evaluation.benchmarks import measure_items
from scale_cli.evaluation.results import HEADS
from scale_cli.export.dense import dense_model
from scale_cli.methods.widened import RouterConfig
from scale_cli.model.heads import HeadLogits
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.processes import ALONE, Share
from scale_cli.upscale.tokenizer import load_tokenizer
from tests.evaluation.task_files import some_of_blimp, task_of
from tests.threads_as_processes import in_processes
from tests.widening import as_if_trained, real_base, widen

ROUTER = RouterConfig(prior=0.3, switch_rate=0.01, threshold=0.97)


def sources(shared_data: Path, folder: Path) -> list[dict[str, Any]]:
    return [
        some_of_blimp(shared_data, folder, 1),
        task_of(shared_data, folder, "arc_easy", limit=20, doc_to_text="{{query}}\nAnswer:"),
        task_of(shared_data, folder, "kobest_copa", limit=20),
    ]


def trained(shared_data: Path, checkpoint: str) -> ScaleForCausalLM:
    return as_if_trained(widen(real_base(shared_data, checkpoint), "route", "top:1"))


def answering(
    shared_data: Path, checkpoint: str, model: Any, max_length: int = 512, batch_size: int = 8, share: Share = ALONE
) -> ObservedHeads:
    tokenizer = load_tokenizer(ModelConfig(base=str(shared_data / checkpoint / "hf")))
    return ObservedHeads(
        model, tokenizer, ROUTER, max_length=max_length, batch_size=batch_size, mixed_precision="no", share=share
    )


def asked(*texts: tuple[str, str]) -> list[Instance]:
    return [Instance("loglikelihood", {}, text, index) for index, text in enumerate(texts)]


def opened(source: dict[str, Any]) -> Any:
    (benchmark,), _ = open_benchmarks([BenchmarkSource.model_validate(source)])
    return benchmark


@pytest.mark.parametrize("checkpoint", ["ckpt-stories260K", "ckpt-eltec"])
def test_the_adaptation_head_scores_as_lm_eval_scores_the_exported_model_and_the_base_head_as_the_base(
    shared_data: Path, tmp_path: Path, checkpoint: str
) -> None:
    model = trained(shared_data, checkpoint)
    answers = answering(shared_data, checkpoint, model, max_length=model.base.config.max_position_embeddings)
    dense_model(model, "float32").save_pretrained(tmp_path)
    answers.tokenizer.save_pretrained(tmp_path)
    folders = {"adapted": str(tmp_path), "base": str(shared_data / checkpoint / "hf")}
    theirs = {head: HFLM(folder, device="cpu", dtype="float32", batch_size=8) for head, folder in folders.items()}
    measured = sources(shared_data, tmp_path)
    for source in measured if checkpoint == "ckpt-stories260K" else measured[1:]:
        benchmark = opened(source)
        items = measure_items(benchmark, answers)
        (task,) = benchmark.tasks.values()
        for head, hf in theirs.items():
            expected = [said for said, _ in hf.loglikelihood(task.instances, disable_tqdm=True)]
            ours = [said for item in items for said in item.heads[head].log_likelihoods]
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=2e-3)
            predictions = iter(expected)
            for item in items:
                said = [next(predictions) for _ in item.heads[head].log_likelihoods]
                assert item.heads[head].metrics["acc"] == float(np.argmax(said) == item.gold)


def test_what_is_too_long_loses_the_tokens_that_it_loses_in_lm_eval(shared_data: Path) -> None:
    model = trained(shared_data, "ckpt-stories260K")
    folder = str(shared_data / "ckpt-stories260K" / "hf")
    requests = asked(("Once upon a time there was a cat. " * 8, " It sat."), ("", " The cat sat."), ("<s>One", " day"))
    answers = answering(shared_data, "ckpt-stories260K", model, max_length=32)
    hf = HFLM(folder, device="cpu", dtype="float32", max_length=32, batch_size=4)
    ours = [said for said, _ in answers.loglikelihood(requests)]
    theirs = [said for said, _ in hf.loglikelihood(requests, disable_tqdm=True)]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_context_of_white_space_alone_loses_no_token(shared_data: Path) -> None:
    """A tokenizer without BOS puts nothing before a text, and lm-eval the white space before the continuation."""
    model = trained(shared_data, "ckpt-eltec")
    answers = answering(shared_data, "ckpt-eltec", model)
    assert not answers.tok_encode("")
    requests = asked((" ", "The old house."), ("", " The old house."), ("\n\n", "The"), ("", "\n\nThe"))
    white, empty, white_2, empty_2 = (said for said, _ in answers.loglikelihood(requests))
    assert (white, white_2) == pytest.approx((empty, empty_2), abs=1e-4)


@torch.no_grad()
def by_hand(
    model: ScaleForCausalLM, context: list[int], continuation: list[int], router: RouterConfig
) -> dict[str, float]:
    """Both rules token by token, in plain probabilities, from whole logits."""
    ids = torch.tensor([context + continuation])
    base, adapted = model.routed_logits(model.final_states(ids, preserved=True))
    cosine = torch.nn.functional.cosine_similarity(base[0], adapted[0], dim=-1).tolist()
    heads: list[Tensor] = [logits[0].double().softmax(-1) for logits in (base, adapted)]
    weight, sums = router.prior, dict.fromkeys(HEADS, 0.0)
    for position, token in enumerate(ids[0, 1:].tolist()):
        p_base, p_adapted = (float(head[position, token]) for head in heads)
        routed = weight * p_base + (1 - weight) * p_adapted
        if position + 1 >= len(context):
            sums["base"] += math.log(p_base)
            sums["adapted"] += math.log(p_adapted)
            sums["posterior"] += math.log(routed)
            sums["cosine"] += math.log(p_base if cosine[position] >= router.threshold else p_adapted)
        weight = (1 - router.switch_rate) * weight * p_base / routed + router.switch_rate * router.prior
    return sums


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_router_judges_context_and_continuation_and_the_score_is_the_continuations(
    shared_data: Path, batch_size: int
) -> None:
    model = trained(shared_data, "ckpt-stories260K")
    answers = answering(shared_data, "ckpt-stories260K", model, batch_size=batch_size)
    texts = [
        ("Once upon a time, there was a little girl", " named Lily."),
        ("Anna", " sat down and was sad."),
        ("", " A"),
    ]
    for text in texts:
        ids = answers.tok_encode("".join(text), add_special_tokens=False)
        start = len(answers.tok_encode(text[0])) if text[0] else 0
        context = ids[:start] or [answers.prefix_token_id]
        expected = by_hand(model, context, ids[start:], ROUTER)
        got = {}
        for answers.head in HEADS:
            got[answers.head] = answers.loglikelihood(asked(*texts))[texts.index(text)][0]
        assert got == pytest.approx(expected, abs=1e-3)
        assert len(set(got.values())) >= 3, "the heads do differ"


class CountingHeads:
    """Two heads, of which the trained one has broken: it gives nothing any probability."""

    config = LlamaConfig(vocab_size=512)

    def __init__(self) -> None:
        self.num_rows = 0

    def parameters(self) -> Any:
        return iter([torch.nn.Parameter(torch.zeros(1))])

    def head_logits(self, input_ids: Tensor) -> HeadLogits:
        self.num_rows += len(input_ids)
        even = torch.zeros(*input_ids.shape, self.config.vocab_size)
        return lambda at: [even[:, at], torch.full_like(even[:, at], math.nan)]


def test_a_request_is_observed_once_for_all_heads(shared_data: Path) -> None:
    model = CountingHeads()
    answers = answering(shared_data, "ckpt-stories260K", model)
    requests = asked(("One", " day"), ("One", " night"), ("One", " day"))
    for answers.head in HEADS:
        answers.loglikelihood(requests)
    assert model.num_rows == 2


def test_a_broken_head_says_minus_infinity_and_routing_survives_it(shared_data: Path) -> None:
    answers = answering(shared_data, "ckpt-stories260K", CountingHeads())
    got = {}
    for answers.head in HEADS:
        ((got[answers.head], is_greedy),) = answers.loglikelihood(asked(("One fine", " day")))
        assert not is_greedy
    num_tokens = -got["base"] / math.log(CountingHeads.config.vocab_size)
    assert got["adapted"] == -math.inf
    assert got["cosine"] == got["base"]
    assert got["posterior"] >= got["base"] - num_tokens * 0.01 - 0.01 + math.log(1.0 - ROUTER.switch_rate) * num_tokens


@pytest.mark.parametrize(("max_length", "continuation"), [(2, " a long day it was"), (64, "")])
def test_a_continuation_that_cannot_be_scored_is_named(shared_data: Path, max_length: int, continuation: str) -> None:
    answers = answering(shared_data, "ckpt-stories260K", CountingHeads(), max_length=max_length)
    with pytest.raises(RunError, match=f"{continuation!r} after 'One'"):
        answers.loglikelihood(asked(("One", continuation)))


def test_several_processes_that_share_the_requests_answer_as_one_does(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained(shared_data, "ckpt-stories260K")
    requests = asked(
        *((f"Once upon a time {word}", " there was a cat" * count) for count, word in enumerate("abcde", 1))
    )

    def answers(share: Share) -> list[list[tuple[float, bool]]]:
        heads = answering(shared_data, "ckpt-stories260K", model, batch_size=2, share=share)
        answered = []
        for heads.head in HEADS:
            answered.append(heads.loglikelihood(requests))
        return answered

    alone = answers(ALONE)
    assert in_processes(monkeypatch, 2, answers) == [alone, alone]
    assert in_processes(monkeypatch, 4, answers) == [alone] * 4  # more processes than batches
