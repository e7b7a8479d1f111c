"""Adapters and models that others trained, by plain PEFT and transformers, routed with their base."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from starlette.testclient import TestClient
from transformers import AutoTokenizer

from scale_cli.generation.generator import Generator, Sampling
from scale_cli.generation.server import create_app
from tests.command_line import Scale
from tests.generation.test_routed_runs import PROMPTS, greedy, mixed, plain

GREEDY = Sampling(max_new_tokens=6)
TARGETS = ["q_proj", "v_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "other ranks": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "embedding and head whole": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "head and embedding adapted": {"target_modules": [*TARGETS, "lm_head", "embed_tokens"]},
    "biases of its own": {"lora_bias": True},
    "rows of tokens": {"trainable_token_indices": [5, 99]},
}


def disturb(model: Any, seed: int = 5) -> None:
    """Change what trains as much as training might."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.1 * torch.randn_like(weight)


@pytest.fixture(scope="module")
def adapter(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that lets plain PEFT make an adapter."""
    folder = tmp_path_factory.mktemp("adapters")

    def make(name: str) -> Path:
        made = folder / name.replace(" ", "-")
        if not made.is_dir():
            asked = {"r": 4, "target_modules": TARGETS, **ADAPTERS[name]}
            torch.manual_seed(0)
            model = get_peft_model(plain(stories), LoraConfig(task_type="CAUSAL_LM", **asked))
            disturb(model)
            model.save_pretrained(str(made))
        return made

    return make


@pytest.fixture(scope="module")
def tuned(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tuned checkpoint, by transformers alone."""
    folder = tmp_path_factory.mktemp("tuned") / "model"
    model = plain(stories)
    disturb(model)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(stories).save_pretrained(folder)
    return folder


def new_ids(generator: Generator) -> list[list[int]]:
    framed = [generator.framed(prompt) for prompt in PROMPTS]
    return [new_T.tolist() for new_T in generator.generate(framed, GREEDY)]


@torch.no_grad()
def check_pair(generator: Generator, base: Any, trained: Any) -> None:
    """The heads are both models' own, bit for bit, and what is routed is their posterior mixture."""
    ids_T = generator.framed(PROMPTS[0]).ids_T
    heads = generator.model.streams.head_logits(ids_T[None])(slice(None))
    assert torch.equal(heads[0], base(input_ids=ids_T[None]).logits)
    assert torch.equal(heads[1], trained(input_ids=ids_T[None]).logits)
    assert not torch.equal(heads[0], heads[1])

    streams = generator.model.streams
    cache = streams.decoding_cache()
    streams.head_logits(ids_T[None, :-1], cache)(slice(None))
    next_logits = streams.head_logits(ids_T[None, -1:], cache)(slice(None))
    for decoded_B1V, whole_BTV in zip(next_logits, heads, strict=True):
        torch.testing.assert_close(decoded_B1V[:, 0], whole_BTV[:, -1], atol=1e-4, rtol=0)
    for prompt, new in zip(PROMPTS, new_ids(generator), strict=True):
        framed = generator.framed(prompt)
        assert framed.base_prior == 0.5
        expected, _ = mixed([base, trained], 0.5, framed.ids_T, GREEDY.max_new_tokens)
        assert framed.ids_T.tolist() + new == expected.tolist()


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_made_by_peft_is_routed_with_its_base(
    name: str, adapter: Callable[[str], Path], stories: Path
) -> None:
    folder = adapter(name)
    trained = PeftModel.from_pretrained(plain(stories), str(folder)).eval()
    generator = Generator(folder, base=str(stories))
    check_pair(generator, plain(stories), trained)
    alone = Generator(folder, "trained", str(stories))
    assert new_ids(alone) == [
        greedy(trained, alone.framed(prompt).ids_T, GREEDY) for prompt in PROMPTS
    ]
    assert new_ids(Generator(folder, "base", str(stories))) == new_ids(Generator(stories))


def test_an_adapter_serves_the_bases_own_weights(
    adapter: Callable[[str], Path], stories: Path
) -> None:
    generator = Generator(adapter("LoRA"), base=str(stories))
    held = {weight.data_ptr(): weight.numel() for weight in generator.model.parameters()}
    trained = [w for name, w in generator.model.named_parameters() if "lora_" in name]
    of_base = plain(stories).num_parameters()
    assert sum(held.values()) == of_base + sum(weight.numel() for weight in trained)


def test_without_a_flag_the_base_is_the_one_that_the_adapter_names(
    adapter: Callable[[str], Path], stories: Path, scale: Scale
) -> None:
    folder = adapter("LoRA")
    assert json.loads((folder / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(stories)
    assert new_ids(Generator(folder)) == new_ids(Generator(folder, base=str(stories)))
    asked = ("--prompt", PROMPTS[0], "--max-new-tokens", "4", "--show-heads")
    done = scale("generate", folder, "--base", stories, *asked)
    assert done.exit_code == 0 and "shares of the heads in 4 tokens: base " in done.stderr


def test_a_fine_tuned_model_is_routed_with_its_base(tuned: Path, stories: Path) -> None:
    generator = Generator(tuned, base=str(stories))
    check_pair(generator, plain(stories), plain(tuned))
    assert new_ids(Generator(tuned, "trained", str(stories))) == new_ids(Generator(tuned))
    assert new_ids(Generator(tuned, "base", str(stories))) == new_ids(Generator(stories))


@pytest.mark.parametrize("kind", ["adapter", "copy"])
def test_the_server_answers_with_both_models_as_scale_generate_does(
    kind: str, adapter: Callable[[str], Path], tuned: Path, stories: Path
) -> None:
    folder = adapter("LoRA") if kind == "adapter" else tuned
    generator = Generator(folder, base=str(stories))
    asked = {"model": "given", "prompt": PROMPTS, "max_tokens": 6, "temperature": 0}
    answer = TestClient(create_app(generator, "given")).post("/v1/completions", json=asked)
    said = [choice["text"] for choice in answer.json()["choices"]]
    assert said == [one.completion for one in generator.continue_all(PROMPTS, GREEDY)]
    assert said != [one.completion for one in Generator(stories).continue_all(PROMPTS, GREEDY)], (
        "the base alone"
    )
