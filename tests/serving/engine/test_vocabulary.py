"""Runs with new tokens, routed by vLLM, beside the trained model in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from scale_cli.data.encoding import prompt_ids
from scale_cli.model.script_prior import PriorByScript
from scale_cli.runs.opened import Run
from scale_cli.storage.atomic import read_json
from tests.serving.engine.conftest import Ask
from tests.serving.engine.test_vllm import ENGINE, GREEDY, NEW, SCORED
from tests.small_runs import export, train_run
from tests.vocabulary.grown_run import config_of
from tests.vocabulary.tokenizers_at_hand import ENGLISH, KOREAN, RUSSIAN

TEXTS = [
    f"{ENGLISH[:40]}{KOREAN[:20]}",
    KOREAN[:80],
    ENGLISH[:160],
    f"{KOREAN[40:70]}{ENGLISH[:90]}{KOREAN[90:]}",
    f"{RUSSIAN[:50]}{KOREAN[:30]}{ENGLISH[:30]}{RUSSIAN[50:90]}",
]
OLD = 8192


def test_texts_are_tokenised_continued_and_scored_as_in_transformers(
    ask: Ask, shared_data: Path, tmp_path: Path
) -> None:
    base = shared_data / "ckpt-novels-en" / "hf"
    config = train_run(config_of(shared_data, tmp_path, base=base))
    folder = export(config).folder
    trained: Any = Run(config).open_final().load()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rounds = [{"prompts": TEXTS, "sampling": sampling} for sampling in (GREEDY, SCORED)]
    job = {"folder": str(folder), "engine": ENGINE, "rounds": rounds}
    continued, scored = ask({"new tokens": job}, tmp_path)["new tokens"]["rounds"]

    prompts = [prompt_ids(tokenizer, text) for text in TEXTS]
    assert continued["prompts"] == prompts
    assert [max(ids) >= OLD for ids in prompts] == [True, True, False, True, True]
    prior_of = PriorByScript.of_export(read_json(folder / "config.json")["scale_router"])
    answers = zip(TEXTS, prompts, continued["tokens"], scored["prompt_log_probs"], strict=True)
    for text, ids, written, told in answers:
        ids_1T = torch.tensor([ids])
        prior = prior_of(text)
        expected = trained.generate(
            ids_1T,
            do_sample=False,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            pad_token_id=0,
            router_prior=prior,
        )
        assert written[0] == expected[0, len(ids) :].tolist()
        with torch.no_grad():
            log_probs = (
                trained(input_ids=ids_1T, router_prior=prior)
                .logits[0, :-1]
                .log_softmax(dim=-1)
                .gather(-1, ids_1T[0, 1:, None])
            )
        torch.testing.assert_close(torch.tensor(told[1:]), log_probs[:, 0], atol=1e-3, rtol=0)
