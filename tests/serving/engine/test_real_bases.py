"""LoRA of two real bases, trained and exported by the verbs: routed by vLLM, beside transformers."""

from __future__ import annotations

import math
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scale_cli.export.served_folder import routed_name
from scale_cli.generation.generator import Generator
from scale_cli.model.heads import token_log_probs
from scale_cli.storage.atomic import read_json
from tests.serving.engine.conftest import Ask, ids_of
from tests.serving.engine.test_prompts import SAMPLING, Served, beginnings
from tests.serving.engine.test_vllm import ENGINE, GREEDY, NEW, SCORED, served_losses
from tests.small_runs import export, small_run, train_run
from tests.torture.attacker import edit_json, reseal

# With so many blocks about four requests fit. Gemma 3's layers are four groups, each with blocks of its own.
BASES = {"smollm2-135m-instruct": 14, "gemma-3-270m": 56}

DOCUMENTS = 200  # of each language
LENGTH = 48
PROMPTS = 24
PROMPT_LENGTH = 40  # with its continuation more than two blocks hold
SHORT = 8  # beginnings of lines, of each language, which start with the prior of their script

REAL_ENGINE: dict[str, Any] = {**ENGINE, "max_num_batched_tokens": 256, "max_num_seqs": 8}
SCHEDULES = [("8 at a time", 0), ("8 at a time", 1), ("8 at a time", 2), ("no prefix cache", 0)]
SCHEDULES += [("chunks 16", 0), ("batch 1", 0), ("few blocks", 0)]


@dataclass(frozen=True)
class Case:
    """A run's adapter, what engines say with it, and the same model in transformers."""

    model: Any
    documents: Tensor
    continuations: list[list[int]]
    short: Served
    answers: dict[str, Any]


@pytest.fixture(scope="module")
def bases() -> Path:
    """The folder of the real bases: `make serving` writes them."""
    folder = Path(os.environ.get("REAL_BASES", ""))
    absent = [name for name in BASES if not (folder / name / "config.json").is_file()]
    assert not absent, f"REAL_BASES: no {', '.join(absent)} there; run `make serving`"
    return folder


def adapter_of(folder: Path, base: Path, shared_data: Path) -> Path:
    """Train LoRA for some steps on petitions, at the rate that finds itself, and export it."""
    korean = shared_data / "ko-petitions" / "train.txt.xz"
    source = {"name": "petitions", "path": str(korean), "language": "ko", "max_documents": 200}
    steps = {"max_steps": 6, "global_batch_size": 8, "micro_batch_size": 4, "optimiser": "adamw"}
    config = small_run(
        folder,
        base,
        model={"base": str(base), "dtype": "float32"},
        method={"variant": "lora"},
        corpus={"sequence_length": 96, "sources": [source]},
        train={**steps, "lr": "auto", "mixed_precision": "no"},
    )
    return export(train_run(config)).folder


def beginning_with_bos(ids_NT: Tensor, tokenizer: Any) -> Tensor:
    """Put the tokenizer's BOS, if it has one, in the place of each row's first token."""
    if tokenizer.bos_token_id is not None:
        ids_NT[:, 0] = tokenizer.bos_token_id
    return ids_NT


@pytest.fixture(scope="module", params=BASES)
def case(
    request: pytest.FixtureRequest,
    ask: Ask,
    bases: Path,
    shared_data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Case:
    root = tmp_path_factory.mktemp(request.param)
    by_script = adapter_of(root, bases / request.param, shared_data)
    even = without_script(by_script, root / "even")
    generator = Generator(by_script)

    texts = ["en-eltec/valid.txt.xz", "ko-petitions/valid.txt.xz"]
    rows = [
        ids_of(shared_data, generator.tokenizer, text, 100_000)[: DOCUMENTS * LENGTH]
        for text in texts
    ]
    documents = beginning_with_bos(torch.cat(rows).view(-1, LENGTH), generator.tokenizer)
    prompts = documents[:: len(documents) // PROMPTS, :PROMPT_LENGTH][:PROMPTS]
    both = zip(*(beginnings(shared_data / text)[:SHORT] for text in reversed(texts)), strict=True)
    short = [generator.framed(text) for pair in both for text in pair]

    jobs = jobs_for(even, documents, prompts, num_blocks=BASES[request.param])
    short_round = {"prompts": [of.ids_T.tolist() for of in short], "sampling": SAMPLING}
    jobs["by script"] = job_of(by_script, [short_round])
    answers = ask(jobs, root)
    (told,) = answers["by script"]["rounds"]
    model = Generator(even).model
    return Case(
        model,
        documents,
        continuations(model, prompts),
        Served(
            generator,
            short,
            [of[0] for of in told["tokens"]],
            torch.tensor([of[0] for of in told["log_probs"]]),
        ),
        answers,
    )


def without_script(folder: Path, to: Path) -> Path:
    """Copy an export whose router begins evenly, whatever script a prompt has."""
    shutil.copytree(folder, to)
    router = {**read_json(to / "config.json")["scale_router"]}
    del router["script"]
    edit_json(to / "config.json", {"scale_router": router})
    reseal(to)
    return to


def job_of(folder: Path, rounds: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    routed = routed_name(read_json(folder / "config.json")["architectures"][0])
    engine = {**REAL_ENGINE, "hf_overrides": {"architectures": [routed]}, **options}
    return {"folder": str(folder), "engine": engine, "rounds": rounds}


def jobs_for(folder: Path, documents: Tensor, prompts: Tensor, num_blocks: int) -> dict[str, Any]:
    """Return engines, each with another schedule, and what they are asked."""
    greedy = {"prompts": prompts.tolist(), "sampling": GREEDY}
    mixed = {"prompts": prompts[shuffled(len(prompts))].tolist(), "sampling": GREEDY}
    scored = {"prompts": documents.tolist(), "sampling": SCORED}
    return {
        "8 at a time": job_of(folder, [greedy, greedy, mixed, scored]),
        "no prefix cache": job_of(folder, [greedy], enable_prefix_caching=False),
        "chunks 16": job_of(folder, [greedy], max_num_batched_tokens=16),
        "batch 1": job_of(folder, [greedy], max_num_seqs=1),
        "few blocks": job_of(folder, [greedy], num_gpu_blocks_override=num_blocks),
    }


@torch.no_grad()
def continuations(model: Any, prompts: Tensor) -> list[list[int]]:
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    made = model.generate(prompts, max_new_tokens=NEW, min_new_tokens=NEW, **options)
    return made[:, PROMPT_LENGTH:].tolist()


def shuffled(count: int) -> list[int]:
    return random.Random(0).sample(range(count), count)


@torch.no_grad()
def test_no_document_costs_more_than_ln_2_over_its_better_head(
    case: Case, record_property: Callable[[str, object], None]
) -> None:
    losses = torch.cat(
        [
            -token_log_probs(case.model.streams, ids[:, :-1], ids[:, 1:]).log_probs_KBT.sum(dim=-1)
            for ids in case.documents.split(10)
        ],
        dim=1,
    )
    excess = served_losses(case.answers["8 at a time"]["rounds"][3]) - losses.amin(dim=0)
    record_property("most nats over the better head", f"{excess.max():.4f}")
    record_property("least", f"{excess.min():.4f}")
    gained = (losses[0] - losses[1]).view(2, DOCUMENTS).mean(dim=1)
    record_property("nats that training gained, English and Korean", gained.tolist())
    assert gained[1] > 0
    assert excess.max() <= math.log(2) + 1e-3


@pytest.mark.parametrize(("job", "turn"), SCHEDULES)
def test_greedy_continuations_are_those_of_transformers(case: Case, job: str, turn: int) -> None:
    served = [of[0] for of in case.answers[job]["rounds"][turn]["tokens"]]
    if turn == 2:
        order = shuffled(PROMPTS)
        served = [served[order.index(at)] for at in range(PROMPTS)]
    assert served == case.continuations


def test_prefixes_were_cached_and_requests_preempted_where_that_was_to_be_shown(
    case: Case,
) -> None:
    def counter(job: str, turn: int, name: str) -> int:
        return int(case.answers[job]["rounds"][turn]["counters"][f"vllm:{name}"])

    assert counter("8 at a time", 0, "prefix_cache_hits") == 0
    assert counter("8 at a time", 1, "prefix_cache_hits") >= PROMPTS * 32
    assert counter("no prefix cache", 0, "prefix_cache_hits") == 0
    assert counter("few blocks", 0, "num_preemptions") > 0


def test_short_prompts_begin_with_the_prior_of_their_script(case: Case) -> None:
    priors = [prompt.base_prior or 0.0 for prompt in case.short.prompts]
    assert len({round(prior, 6) for prior in priors}) == 2
    torch.testing.assert_close(case.short.log_probs, case.short.expected(priors), atol=1e-3, rtol=0)
