"""Every family: random plain models, widened, with an adapter or a copy, beside their own transformers classes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from scale_cli.model.family_scale import FAMILIES as BASES
from scale_cli.model.routing import base_shares, log_prior, mix_logits, posterior_log_weights
from scale_cli.serving import FAMILIES
from tests.serving.engine.conftest import Ask, random_adapter

STREAMS = [80, 48]
PRIOR = 0.6
ROUTER = {"stream_sizes": STREAMS, "prior": PRIOR}
# more than one tile, and no multiple of what vLLM rounds up to
VOCABULARY = 9001
LENGTH = 90
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": sum(STREAMS),
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOWS = {"sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"]}
OWN: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 48},
    "Gemma3": WINDOWS,
    "Exaone4": WINDOWS,
}
SHARED = "Llama, its vocabulary and its attention heads shared by two processes"
LACKING = f"{SHARED}; the base lacks some tokens"
COMPILED = "Qwen3, its trunk compiled"
ADAPTED = ", an adapter"
COPIED = ", a copy"
MODEL_TYPES = {family.class_name: model_type for model_type, family in BASES.items()}
NUM_NEW = 40
NEW_TOKENS: dict[str, Any] = {
    "first": [index % 7 for index in range(NUM_NEW)],
    "own": [0, 3, 5],
}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "block_size": 32,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
BY_TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
BOTH = ("embed_tokens", "lm_head")
# The family, whether its head is its embedding, what the adapter has whole, and options of the engine.
WHOLE: dict[str, tuple[str, bool, Sequence[str], dict[str, Any]]] = {
    "both": ("Llama", False, BOTH, {}),
    "the head alone": ("Llama", False, ("lm_head",), {}),
    "the embedding alone, which the head was": ("Llama", True, ("embed_tokens",), {}),
    "both, one matrix, scaled": ("Gemma3", True, BOTH, {}),
    "both, shared by two processes": ("Llama", False, BOTH, BY_TWO),
    "both, the trunk compiled": ("Qwen3", False, BOTH, {"enforce_eager": False}),
}
IDS = torch.randint(0, VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def routed_log_probs(model: Any, new_tokens: dict[str, Any] | None = None) -> Tensor:
    """(B, T - 1): of each token after the first, routed in torch over what the plain model's head reads."""
    hidden = model.model(input_ids=IDS).last_hidden_state.float()
    head = model.lm_head.weight.float()
    base, added = (
        stream @ columns.T
        for stream, columns in zip(hidden.split(STREAMS, -1), head.split(STREAMS, -1), strict=True)
    )
    trained = base + added
    if new_tokens is not None:
        shares = base_shares({"new_tokens": new_tokens})
        assert shares is not None
        base = shares(base[..., :-NUM_NEW])
    return mixed_log_probs(torch.stack([base, trained]))


def mixed_log_probs(logits_KBTV: Tensor) -> Tensor:
    """(B, T - 1): of each token after the first, under the posterior mixture."""
    next_ids = IDS[:, 1:, None].expand(2, -1, -1, -1)
    said_KBT = logits_KBTV.log_softmax(-1)[:, :, :-1].gather(-1, next_ids)[..., 0]
    weights = posterior_log_weights(said_KBT, log_prior(PRIOR))
    mixed = mix_logits(weights[..., :-1].float(), logits_KBTV[:, :, :-1]).log_softmax(-1)
    return mixed.gather(-1, IDS[:, 1:, None])[..., 0]


@torch.no_grad()
def of_pair(base: Any, trained: Any) -> Tensor:
    """(B, T - 1): of each token after the first, under the posterior mixture of two models."""
    heads = [each(input_ids=IDS).logits.float() for each in (base, trained)]
    return mixed_log_probs(torch.stack(heads))


def job_of(folder: Path, family: str, **engine: Any) -> dict[str, Any]:
    routed = {"hf_overrides": {"architectures": [f"ScaleRouted{family}ForCausalLM"]}}
    sampling = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
    rounds = [{"prompts": IDS.tolist(), "sampling": sampling}]
    return {"folder": str(folder), "engine": {**ENGINE, **routed, **engine}, "rounds": rounds}


def said_by(answers: dict[str, Any]) -> Tensor:
    return torch.tensor([of[1:] for of in answers["rounds"][0]["prompt_log_probs"]])


def of_family(
    family: str, root: Path, dtype: torch.dtype = torch.float32
) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    """Write an expansion, an adapter and a copy; return the expansion, and the jobs and log-probabilities of all
    three."""
    folder = root / family
    config = AutoConfig.for_model(MODEL_TYPES[family], **{**SIZES, **OWN.get(family, {})})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().to(dtype)
    model.save_pretrained(folder)
    tell_of_the_router(folder)
    job = job_of(folder, family)

    adapted = root / f"{family}{ADAPTED}"
    trained = random_adapter(model, adapted, folder, prior=PRIOR)
    copied = root / f"{family}{COPIED}"
    torch.manual_seed(1)
    other = AutoModelForCausalLM.from_config(config).eval().to(dtype)
    other.save_pretrained(copied)
    tell_of_the_router(copied, kind="copy", base=str(folder), revision=None)

    jobs = {family: job} | {
        beside.name: job | {"folder": str(beside)} for beside in (adapted, copied)
    }
    expected = {family: routed_log_probs(model)}
    for beside, second in ((adapted, trained), (copied, other)):
        expected[beside.name] = of_pair(model, second)
    return model, jobs, expected


@pytest.fixture(scope="module")
def served_and_expected(
    ask: Ask, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Any, Tensor]]:
    root = tmp_path_factory.mktemp("families")
    jobs: dict[str, Any] = {}
    expected: dict[str, Tensor] = {}
    for family in FAMILIES:
        model, jobs_of_family, expected_of_family = of_family(family, root)
        jobs |= jobs_of_family
        expected |= expected_of_family
        if family == "Llama":
            expected[LACKING] = routed_log_probs(model, NEW_TOKENS)
    jobs[SHARED] = jobs["Llama"] | {"engine": {**jobs["Llama"]["engine"], **BY_TWO}}
    expected[SHARED] = expected["Llama"]
    lacking = {"scale_router": {**ROUTER, "new_tokens": NEW_TOKENS}}
    overrides = {"hf_overrides": {**jobs[SHARED]["engine"]["hf_overrides"], **lacking}}
    jobs[LACKING] = jobs[SHARED] | {"engine": {**jobs[SHARED]["engine"], **overrides}}
    for kind in ("", ADAPTED, COPIED):
        compiled = {"engine": {**jobs["Qwen3"]["engine"], "enforce_eager": False}}
        jobs[f"{COMPILED}{kind}"] = jobs[f"Qwen3{kind}"] | compiled
        expected[f"{COMPILED}{kind}"] = expected[f"Qwen3{kind}"]
    for kind in (ADAPTED, COPIED):
        jobs[f"{SHARED}{kind}"] = jobs[f"Llama{kind}"] | {"engine": jobs[SHARED]["engine"]}
        expected[f"{SHARED}{kind}"] = expected[f"Llama{kind}"]
    answers = ask(jobs, root)
    return {name: (answers[name], expected[name]) for name in jobs}


def tell_of_the_router(folder: Path, **keys: Any) -> None:
    told = json.loads((folder / "config.json").read_text())
    told["scale_router"] = {**keys, "prior": PRIOR} if keys else ROUTER
    (folder / "config.json").write_text(json.dumps(told))


EVERY = [*FAMILIES, SHARED, COMPILED]


@pytest.mark.parametrize(
    "name", [f"{of}{kind}" for kind in ("", ADAPTED, COPIED) for of in EVERY] + [LACKING]
)
def test_a_family_routes_between_its_heads_as_torch_does(
    name: str, served_and_expected: dict[str, tuple[Any, Tensor]]
) -> None:
    answers, expected = served_and_expected[name]
    torch.testing.assert_close(said_by(answers), expected, atol=1e-3, rtol=1e-4)


@pytest.fixture(scope="module")
def with_whole_modules(
    ask: Ask, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Any, Tensor]]:
    """Adapters, rank-stabilised, with an embedding or a head of their own."""
    root = tmp_path_factory.mktemp("whole")
    jobs: dict[str, Any] = {}
    expected: dict[str, Tensor] = {}
    for name, (family, tied, whole, engine) in WHOLE.items():
        folder = root / f"{family}, {tied}"
        keys = {**SIZES, **OWN.get(family, {}), "tie_word_embeddings": tied}
        torch.manual_seed(0)
        config = AutoConfig.for_model(MODEL_TYPES[family], **keys)
        base = AutoModelForCausalLM.from_config(config).eval()
        base.save_pretrained(folder)
        trained = random_adapter(
            base, root / name, folder, whole=whole, stabilised=True, prior=PRIOR
        )
        expected[name] = of_pair(base, trained)
        jobs[name] = job_of(root / name, family, **engine)
    answers = ask(jobs, root)
    return {name: (answers[name], expected[name]) for name in jobs}


@pytest.mark.parametrize("name", WHOLE)
def test_an_adapter_with_an_embedding_or_a_head_of_its_own_routes_as_torch_does(
    name: str, with_whole_modules: dict[str, tuple[Any, Tensor]]
) -> None:
    answers, expected = with_whole_modules[name]
    torch.testing.assert_close(said_by(answers), expected, atol=1e-3, rtol=1e-4)


@pytest.fixture(scope="module")
def in_bfloat16(
    ask: Ask, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Any, Tensor]]:
    root = tmp_path_factory.mktemp("bfloat16")
    _, jobs, expected = of_family("Qwen3", root, torch.bfloat16)
    for job in jobs.values():
        job["engine"] |= {"dtype": "bfloat16", "enforce_eager": False}
    answers = ask(jobs, root)
    return {name: (answers[name], expected[name]) for name in jobs}


@pytest.mark.parametrize("kind", ["", ADAPTED, COPIED])
def test_a_compiled_trunk_in_bfloat16_routes_as_torch_does_within_its_rounding(
    kind: str, in_bfloat16: dict[str, tuple[Any, Tensor]]
) -> None:
    answers, expected = in_bfloat16[f"Qwen3{kind}"]
    assert (said_by(answers) - expected).abs().mean() < 0.1
