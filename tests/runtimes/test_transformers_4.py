"""Plain exports in transformers 4.57, in an environment of its own, beside the trained model in the version of ours."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from scale_cli.config.schema import MethodConfig, ModelConfig
from scale_cli.data.encoding import prompt_ids
from scale_cli.export.dense import plain_model
from scale_cli.export.parity import served_logits
from scale_cli.export.plain_folder import router_keys, write_plain
from scale_cli.model.family_scale import FAMILIES
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.runs.opened import Run
from scale_cli.upscale.base import load_base
from scale_cli.upscale.base_tokenizer import load_tokenizer
from scale_cli.upscale.building import MethodModel, start_model
from scale_cli.upscale.preservation import trained_logits
from tests.small_runs import export, train_run
from tests.vocabulary.grown_run import config_of
from tests.vocabulary.tokenizers_at_hand import ENGLISH, KOREAN
from tests.widening import TINY, as_if_trained, lower_stories, move

SIZES = {
    **TINY,
    "vocab_size": 8192,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WINDOWS = {
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
# Of every base its family, RoPE's theta and scaling, and what is its own.
BASES: dict[str, tuple[str, float, dict[str, Any] | None, dict[str, Any]]] = {
    "llama-llama3": ("llama", 5e5, LLAMA3, {"tie_word_embeddings": True}),
    "llama-linear": ("llama", 1e4, {"rope_type": "linear", "factor": 2.0}, {}),
    "llama-dynamic": (
        "llama",
        1e4,
        {"rope_type": "dynamic", "factor": 2.0},
        {"max_position_embeddings": 64},
    ),
    "mistral": ("mistral", 1e6, None, {"sliding_window": 32, "head_dim": 12}),
    "qwen2": (
        "qwen2",
        1e6,
        None,
        {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1},
    ),
    "qwen3-yarn": ("qwen3", 1e6, YARN, {"head_dim": 16}),
    "gemma3": (
        "gemma3_text",
        1e6,
        {"rope_type": "linear", "factor": 8.0},
        {"head_dim": 16, **WINDOWS},
    ),
    "olmo2": ("olmo2", 5e5, None, {}),
    "olmo3-yarn": ("olmo3", 5e5, YARN, WINDOWS),
    "exaone4": ("exaone4", 1e6, LLAMA3, {**WINDOWS, "tie_word_embeddings": True}),
}
VARIANTS = ("preserve", "route", "llama-pro")
NAMES = [f"{base}-{variant}" for base in BASES for variant in VARIANTS]
EOS = [3, 5]
# Far positions, where a wrong frequency shows most.
IDS = torch.randint(6, 8192, (2, 200), generator=torch.Generator().manual_seed(0))
TEXTS = [
    "Once upon a time, there was a little girl.",
    "  12.5 %,\n\ttabs",
    "옛날 옛적에",
    "<|end_of_text|>a",
]


def write_base(name: str, shared_data: Path, folder: Path) -> None:
    """Write a random base as transformers 4 would: its spelling, and a tokenizer that it knows."""
    family, theta, scaling, differences = BASES[name]
    # A copy: transformers 5 writes more keys into the one that it is given.
    given = {**SIZES, **differences, "rope_theta": theta, "rope_scaling": copy.deepcopy(scaling)}
    config = AutoConfig.for_model(family, **given)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    told = json.loads((folder / "config.json").read_text())
    for new in ("dtype", "rope_parameters"):
        del told[new]
    told |= {
        "torch_dtype": "float32",
        "rope_theta": theta,
        "rope_scaling": scaling,
        "transformers_version": "4.45.0",
    }
    (folder / "config.json").write_text(json.dumps(told))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(shared_data / "ckpt-novels-en" / "hf" / file, folder / file)


@torch.no_grad()
def trained(base: ModelConfig, variant: Any) -> MethodModel:
    """What a method makes of a base, everything that trains moved from its start."""
    model = start_model(load_base(base), MethodConfig(variant=variant), seed=0).eval()
    if isinstance(model, ScaleForCausalLM):
        return as_if_trained(model)
    move(model, 0.05)
    return model


@pytest.fixture(scope="module")
def expected(
    shared_data: Path, transformers_4: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Tensor]]:
    """The exports of all bases, each answered by transformers 4, and the trained model's logits."""
    root, found = tmp_path_factory.mktemp("transformers-4"), {}
    for name in BASES:
        write_base(name, shared_data, root / name)
        base = ModelConfig(base=str(root / name))
        for variant in VARIANTS:
            folder = root / f"{name}-{variant}"
            folder.mkdir()
            model = trained(base, variant)
            plain = plain_model(model, "float32", [IDS])
            write_plain(plain, load_tokenizer(base), base, folder, router_keys(model))
            questions = {"ids": IDS.tolist(), "texts": TEXTS}
            (folder / "questions.json").write_text(json.dumps(questions))
            with torch.no_grad():
                found[folder.name] = folder, trained_logits(model, IDS)
                if variant == "route":
                    options = {
                        "max_new_tokens": 8,
                        "do_sample": False,
                        "pad_token_id": 0,
                        "eos_token_id": EOS,
                    }
                    generated = cast(Any, model).generate(IDS[:, :30], **options)
                    save_file(
                        {"logits": served_logits(model, IDS), "ids": generated},
                        folder / "routed.safetensors",
                    )
    let_answer(transformers_4, [folder for folder, _ in found.values()])
    return found


def let_answer(python: Path, folders: list[Path]) -> None:
    """Put each folder's questions to transformers 4."""
    ran = subprocess.run(
        [python, "-I", Path(__file__).parent / "answer.py", *folders],
        capture_output=True,
        text=True,
        env={"HF_HUB_OFFLINE": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("4.57."), ran.stdout


def test_every_supported_family_is_exported() -> None:
    assert {family for family, *_ in BASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_an_export_answers_in_transformers_4_as_the_trained_model_does_here(
    name: str,
    expected: dict[str, tuple[Path, Tensor]],
    shared_data: Path,
    record_property: Callable[[str, object], None],
) -> None:
    folder, logits = expected[name]
    answers = load_file(folder / "answers.safetensors")
    difference = (answers["logits"] - logits).abs().max().item()
    record_property(
        "largest difference of a logit",
        f"{difference:.1e} at a deviation of {logits.std().item():.2g}",
    )
    assert difference <= 1e-4
    tokenizer = load_tokenizer(ModelConfig(base=str(shared_data / "ckpt-novels-en" / "hf")))
    assert answers["ids"].tolist() == [
        number for text in TEXTS for number in prompt_ids(tokenizer, text)
    ]
    assert answers["ends"].tolist() == [tokenizer.eos_token_id, *EOS]


@pytest.mark.parametrize("base", BASES)
def test_with_its_code_an_export_routes_there_as_the_trained_model_does_here(
    base: str, expected: dict[str, tuple[Path, Tensor]]
) -> None:
    folder, _ = expected[f"{base}-route"]
    answers, wanted = (
        load_file(folder / "answers.safetensors"),
        load_file(folder / "routed.safetensors"),
    )
    torch.testing.assert_close(answers["routed"], wanted["logits"], rtol=0.0, atol=1e-4)
    assert torch.equal(answers["generated"], wanted["ids"])


def test_an_export_with_new_tokens_answers_there_as_it_does_here(
    transformers_4: Path, shared_data: Path, tmp_path: Path
) -> None:
    base = lower_stories(shared_data)  # whose tokenizer has a list of special tokens, as many have
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings["additional_special_tokens"] = ["<s>", "</s>"]
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    config = train_run(config_of(shared_data, tmp_path, base=base))
    folder, session = export(config).folder, Run(config).open_final()
    texts, model = [*TEXTS, ENGLISH, KOREAN], cast(Any, session.load())
    ids = torch.tensor([session.tokenizer(text).input_ids[:50] for text in (ENGLISH, KOREAN)])
    assert [row.max() >= 512 for row in ids] == [False, True]
    (folder / "questions.json").write_text(json.dumps({"ids": ids.tolist(), "texts": texts}))
    let_answer(transformers_4, [folder])
    answers = load_file(folder / "answers.safetensors")
    assert answers["ids"].tolist() == [
        number for text in texts for number in prompt_ids(session.tokenizer, text)
    ]
    torch.testing.assert_close(answers["logits"], trained_logits(model, ids), rtol=0.0, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(
            answers["routed"], served_logits(model, ids), rtol=0.0, atol=1e-4
        )
    generated = model.generate(ids[:, :30], max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(answers["generated"], generated)
