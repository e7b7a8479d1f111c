"""A briefly trained model, routed by vLLM under every schedule, beside the same model in transformers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from scale_cli.model.heads import token_log_probs
from scale_cli.model.modeling_scale import ScaleForCausalLM
from tests.serving.engine.conftest import (
    DOCUMENT_LENGTH,
    DOCUMENTS,
    PROMPT_LENGTH,
    PROMPTS,
    Ask,
    Trained,
)

NEW = 28  # tokens of a continuation: with its prompt more than two blocks hold
EVERY = 20  # documents, of which one is scored a second time
GREEDY = {"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True}
SCORED = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0}
ENGINE: dict[str, Any] = {
    "hf_overrides": {"architectures": ["ScaleRoutedLlamaForCausalLM"]},
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "block_size": 32,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
}


@pytest.fixture(scope="session")
def answers(trained: Trained, ask: Ask, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What engines say, each under another schedule."""
    prompts = trained.prompts.tolist()
    order = random.Random(0).sample(range(PROMPTS), PROMPTS)
    greedy = {"prompts": prompts, "sampling": GREEDY}
    shuffled = {"prompts": [prompts[at] for at in order], "sampling": GREEDY}
    scored = {"prompts": trained.documents.tolist(), "sampling": SCORED}
    scored_few = {"prompts": trained.documents[::EVERY].tolist(), "sampling": SCORED}
    scored_some = {"prompts": trained.documents[::4].tolist(), "sampling": SCORED}
    few = prompts[:: PROMPTS // 8]
    sampled = [
        {"prompts": few, "sampling": {**GREEDY, "repetition_penalty": 1.3}},
        {
            "prompts": few,
            "sampling": {"temperature": 1.0, "n": 3, "max_tokens": 12, "seed": 1, "logprobs": 0},
        },
        {
            "prompts": few,
            "sampling": {"temperature": 0.0, "max_tokens": 12, "choice": ["yes", "no, never"]},
        },
    ]

    def job(rounds: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        return {"folder": str(trained.folder), "engine": {**ENGINE, **options}, "rounds": rounds}

    jobs = {
        "batch 32, chunks 512": job([greedy, greedy, shuffled, scored, *sampled]),
        "no prefix cache": job([shuffled], enable_prefix_caching=False),
        "chunks 16": job([greedy, greedy, scored_few], max_num_batched_tokens=16, max_num_seqs=16),
        "batch 1": job([greedy], max_num_seqs=1),
        "few blocks": job([greedy, shuffled], num_gpu_blocks_override=14),
        "bfloat16": job([scored_some], dtype="bfloat16"),
    }
    refused = {
        "no router": {"hf_overrides": {**ENGINE["hf_overrides"], "scale_router": None}},
        "speculative": {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 2,
                "prompt_lookup_max": 2,
            }
        },
    }
    jobs |= {name: job([], **options) for name, options in refused.items()}
    found = ask(jobs, tmp_path_factory.mktemp("asked"))
    for rounds, turn in (("batch 32, chunks 512", 2), ("no prefix cache", 0), ("few blocks", 1)):
        mixed = found[rounds]["rounds"][turn]["tokens"]
        found[rounds]["rounds"][turn]["tokens"] = [mixed[order.index(at)] for at in range(PROMPTS)]
    return found


@pytest.fixture(scope="session")
@torch.no_grad()
def continuations(trained: Trained) -> list[list[int]]:
    """What transformers makes of the prompts, with the router that is the model's own."""
    options: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        "pad_token_id": 0,
    }
    made = [trained.model.generate(prompts, **options) for prompts in trained.prompts.split(20)]
    return torch.cat(made)[:, PROMPT_LENGTH:].tolist()


@pytest.fixture(scope="session")
@torch.no_grad()
def losses(trained: Trained) -> Tensor:
    """(K, documents): nats that each head costs, from the second token on."""
    heads = trained.model if isinstance(trained.model, ScaleForCausalLM) else trained.model.streams
    of = [
        -token_log_probs(heads, ids[:, :-1], ids[:, 1:]).log_probs_KBT.sum(dim=-1)
        for ids in trained.documents.split(20)
    ]
    return torch.cat(of, dim=1)


def served_losses(round_of: dict[str, Any]) -> Tensor:
    return torch.tensor([-sum(of[1:]) for of in round_of["prompt_log_probs"]], dtype=torch.float64)


def test_both_heads_are_needed(losses: Tensor) -> None:
    better = (losses[1] < losses[0]).view(2, DOCUMENTS).sum(dim=1)
    assert better[0] < 0.2 * DOCUMENTS
    assert better[1] > 0.8 * DOCUMENTS


def test_no_document_costs_more_than_ln_2_over_its_better_head(
    answers: dict[str, Any], losses: Tensor, record_property: Callable[[str, object], None]
) -> None:
    excess = served_losses(answers["batch 32, chunks 512"]["rounds"][3]) - losses.amin(dim=0)
    record_property(
        f"most nats over the better head, of {len(excess)} documents", f"{excess.max():.4f}"
    )
    assert excess.max() <= math.log(2) + 1e-3


@torch.no_grad()
def test_prompts_are_scored_as_transformers_scores_them(
    trained: Trained, answers: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    documents = trained.documents[::EVERY]
    logits = trained.model(input_ids=documents).logits[:, :-1]
    expected = logits.log_softmax(dim=-1).gather(-1, documents[:, 1:, None])[..., 0]
    for job, turn, every in (("batch 32, chunks 512", 3, EVERY), ("chunks 16", 2, 1)):
        served = torch.tensor(
            [of[1:] for of in answers[job]["rounds"][turn]["prompt_log_probs"][::every]]
        )
        difference = (served - expected).abs().max().item()
        record_property(
            f"{job}: largest difference of a prompt's log-probability", f"{difference:.1e}"
        )
        assert difference <= 1e-3


GREEDY_ROUNDS = [
    ("batch 32, chunks 512", 0),
    ("batch 32, chunks 512", 1),
    ("batch 32, chunks 512", 2),
    ("no prefix cache", 0),
    ("chunks 16", 0),
    ("chunks 16", 1),
    ("batch 1", 0),
    ("few blocks", 0),
    ("few blocks", 1),
]


@pytest.mark.parametrize(("job", "turn"), GREEDY_ROUNDS)
def test_greedy_continuations_are_those_of_transformers(
    job: str,
    turn: int,
    answers: dict[str, Any],
    continuations: list[list[int]],
    record_property: Callable[[str, object], None],
) -> None:
    served = [of[0] for of in answers[job]["rounds"][turn]["tokens"]]
    same = sum(found == expected for found, expected in zip(served, continuations, strict=True))
    record_property(f"{job}, round {turn + 1}: equal continuations of {PROMPTS}", same)
    assert same == PROMPTS


def test_what_was_to_be_shown_did_happen(answers: dict[str, Any]) -> None:
    def counter(job: str, turn: int, name: str) -> int:
        return int(answers[job]["rounds"][turn]["counters"][f"vllm:{name}"])

    assert counter("few blocks", 0, "num_preemptions") > 0
    assert counter("batch 32, chunks 512", 0, "prefix_cache_hits") == 0
    assert counter("batch 32, chunks 512", 1, "prefix_cache_hits") >= PROMPTS * 32
    assert counter("chunks 16", 1, "prefix_cache_hits") >= PROMPTS * 32
    assert counter("no prefix cache", 0, "prefix_cache_hits") == 0


def test_bfloat16_costs_what_it_costs_a_plain_model(
    answers: dict[str, Any], losses: Tensor, record_property: Callable[[str, object], None]
) -> None:
    excess = served_losses(answers["bfloat16"]["rounds"][0]) - losses.amin(dim=0)[::4]
    record_property("bfloat16: most nats over the better head in float32", f"{excess.max():.3f}")
    assert excess.max() <= math.log(2) + 0.01 * DOCUMENT_LENGTH


@torch.no_grad()
def test_a_repetition_penalty_acts_as_in_transformers(
    trained: Trained, answers: dict[str, Any]
) -> None:
    prompts = trained.prompts[:: PROMPTS // 8]
    options: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        "pad_token_id": 0,
    }
    expected = trained.model.generate(prompts, repetition_penalty=1.3, **options)[
        :, PROMPT_LENGTH:
    ].tolist()
    assert [of[0] for of in answers["batch 32, chunks 512"]["rounds"][4]["tokens"]] == expected


@torch.no_grad()
def test_each_of_several_samples_has_the_log_probabilities_of_the_mixture(
    trained: Trained, answers: dict[str, Any]
) -> None:
    sampled = answers["batch 32, chunks 512"]["rounds"][5]
    for prompt, made, told in zip(
        trained.prompts[:: PROMPTS // 8].tolist(),
        sampled["tokens"],
        sampled["log_probs"],
        strict=True,
    ):
        assert len(made) == 3
        for tokens, log_probs in zip(made, told, strict=True):
            ids = torch.tensor([prompt + tokens])
            scores = (
                trained.model(input_ids=ids).logits[0, PROMPT_LENGTH - 1 : -1].log_softmax(dim=-1)
            )
            expected = scores.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(log_probs), expected, atol=1e-3, rtol=0)


def test_a_grammar_binds_the_mixture(answers: dict[str, Any]) -> None:
    texts = [of[0] for of in answers["batch 32, chunks 512"]["rounds"][6]["text"]]
    assert set(texts) <= {"yes", "no, never"}


@pytest.mark.parametrize(
    ("name", "said"),
    [("no router", "config.json has no scale_router"), ("speculative", "speculative decoding")],
)
def test_what_cannot_be_routed_is_refused_in_one_line(
    name: str, said: str, answers: dict[str, Any]
) -> None:
    refused = answers[name]["refused"]
    assert said in refused
    assert "\n" not in refused
