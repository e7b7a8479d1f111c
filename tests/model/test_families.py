"""Every family of base: preserved bit for bit, trained, exported as the family's own plain model."""

import copy
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from scale_cli.config.schema import MethodConfig, ModelConfig
from scale_cli.export.dense import dense_model
from scale_cli.export.parity import coarser, measure_parity
from scale_cli.model.family_scale import FAMILIES
from scale_cli.upscale.base import load_base
from scale_cli.upscale.base_hashes import changed_tensors, record_base
from scale_cli.upscale.building import start_model
from scale_cli.upscale.preservation import trained_logits
from tests.widening import (
    TINY,
    as_if_trained,
    assert_starts_as_base,
    random_ids,
    routed_heads,
    tiny_llama,
    train_steps,
    widen,
)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {
    "tie_word_embeddings": True,
    "rope_parameters": {"full_attention": LINEAR | {"rope_theta": 1e6}},
}
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied, biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama, three queries a key": (
        "llama",
        {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48},
    ),
    "mistral, gelu, linear rope": (
        "mistral",
        {"sliding_window": None, "hidden_act": "gelu", "rope_parameters": LINEAR},
    ),
    "mistral, window 8": ("mistral", {"sliding_window": 8, "head_dim": 12}),
    "qwen2, tanh gelu": ("qwen2", {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}),
    "qwen2, upper layers windowed": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "gemma3_text": (
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "layer_types": KINDS,
            **GEMMA,
        },
    ),
    "olmo2, biases": ("olmo2", {"attention_bias": True}),
    "olmo3, yarn in full layers": (
        "olmo3",
        {"sliding_window": 8, "layer_types": KINDS, "rope_parameters": {"full_attention": YARN}},
    ),
    "exaone4, tied": (
        "exaone4",
        {"sliding_window": 8, "layer_types": KINDS, "tie_word_embeddings": True},
    ),
    "exaone4, no windows": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "num_key_value_heads": 1},
    ),
    "qwen3, yarn, one key head": (
        "qwen3",
        {"head_dim": 8, "num_key_value_heads": 1, "rope_parameters": YARN},
    ),
}
families = pytest.mark.parametrize("family", BASES)
IDS = random_ids(2, 40, seed=3)


def config_of(family: str) -> Any:
    model_type, differences = BASES[family]
    return AutoConfig.for_model(model_type, **{**TINY, "pad_token_id": None, **differences})


def write_tiny(family: str, folder: Path) -> None:
    """Write a random base of a family, gains and biases not at their defaults."""
    model = AutoModelForCausalLM.from_config(config_of(family))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)


@functools.cache
def _loaded(family: str, dtype: Any) -> PreTrainedModel:
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(family, Path(folder))
        return load_base(ModelConfig(base=folder, dtype=dtype))


def tiny(family: str, dtype: Any = "float32") -> PreTrainedModel:
    """Return such a base, through a folder as users have it."""
    return copy.deepcopy(_loaded(family, dtype))


@torch.no_grad()
def answered(model: Any, ids: Tensor = IDS) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def test_every_supported_family_is_tested() -> None:
    assert {model_type for model_type, _ in BASES.values()} == set(FAMILIES)


METHODS = [("preserve", None), ("route", "top:1"), ("adapt", None), ("route", "none")]


# Both dtypes of every family, and two of the methods.
@pytest.mark.parametrize(
    ("family", "variant", "layers", "dtype"),
    [
        (
            family,
            *METHODS[(number + 2 * place) % 4],
            ("float32", "bfloat16")[(number // 2 + place) % 2],
        )
        for number, family in enumerate(BASES)
        for place in range(2)
    ],
)
def test_base_logits_are_the_bases_bit_for_bit_before_and_after_training(
    family: str, variant: str, layers: str | None, dtype: Any
) -> None:
    base = tiny(family, dtype)
    expected = answered(base)
    record = record_base(base, ModelConfig(base="a base", dtype=dtype))
    model = widen(base, variant, layers, ratio=0.5)
    assert torch.equal(routed_heads(model, IDS)[0].float(), expected)
    assert_starts_as_base(model, IDS, expected)
    train_steps(model, IDS.repeat(1, 5).flatten(), num_steps=2, lr=1e-2)
    base_logits, trained = routed_heads(model, IDS)
    assert (trained.float() - expected).abs().max() > 0.01, "it has trained"
    assert torch.equal(base_logits.float(), expected)
    assert changed_tensors(base, record) == []


LENGTHS: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 32}
ROPE: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": LENGTHS,
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **LENGTHS},
    "longrope": {
        "short_factor": [1.0, 1.5, 2.0, 3.0],
        "long_factor": [2.0, 3.0, 5.0, 9.0],
        **LENGTHS,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("rope", ["default", *ROPE_INIT_FUNCTIONS])
def test_with_every_rope_type_of_transformers_it_is_preserved_bit_for_bit_and_exactly_a_plain_llama(
    rope: str,
) -> None:
    parameters = {"rope_type": rope, "rope_theta": 10_000.0, **ROPE[rope]}
    base = tiny_llama(num_key_value_heads=4, max_position_embeddings=48, rope_parameters=parameters)
    model = as_if_trained(widen(base, "route", "top:1", ratio=0.5))
    dense = dense_model(model, "float32")
    # Below and above the original length, and back: some types change their frequencies with the
    # length.
    for length in (20, 60, 20):
        ids = random_ids(2, length, seed=length)
        base_logits, trained = routed_heads(model, ids)
        assert torch.equal(base_logits, answered(base, ids))
        assert (answered(dense, ids) - trained).abs().max() <= 1e-4


@pytest.mark.parametrize(
    "family",
    ["qwen3", "qwen3, biases", "gemma3_text", "olmo2, biases", "exaone4, tied"],
)
@pytest.mark.parametrize(
    ("maps", "base_dtype", "dtype"),
    [
        (("q_proj", "k_proj"), "bfloat16", "float32"),
        (("o_proj", "down_proj"), "bfloat16", "bfloat16"),
    ],
)
def test_an_export_is_exact_where_a_norm_of_what_a_layer_makes_meets_its_epsilon(
    family: str, maps: tuple[str, ...], base_dtype: str, dtype: str
) -> None:
    model = as_if_trained(widen(tiny(family, base_dtype), "adapt", ratio=0.5))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # The mean square of a head, or of what is written, is about eps.
            if any(of in name for of in maps):
                parameter.mul_(0.003)
    exported = dense_model(model, dtype, [IDS])
    prompts = [ids[None] for ids in IDS]
    measure_parity(exported, model, trained_logits, prompts, coarser(exported, model))
    if dtype == "float32":
        exact = copy.deepcopy(model).float()
        measure_parity(exported, exact, trained_logits, prompts, coarser(exported, exact))
        for ids in prompts:
            apart = answered(exported, ids) - trained_logits(exact, ids)
            assert apart.abs().max() <= 5e-5


@families
@pytest.mark.parametrize("variant", ["lora", "llama-pro"])
def test_a_baseline_starts_as_its_base_bit_for_bit(family: str, variant: Any) -> None:
    base = tiny(family)
    expected = answered(base)
    model = start_model(base, MethodConfig(variant=variant), seed=0).eval()
    assert torch.equal(answered(model), expected)


@torch.no_grad()
@pytest.mark.parametrize("family", BASES)
@pytest.mark.parametrize("variant", ["preserve", "adapt"])
def test_what_leaves_the_layers_grows_at_most_as_the_codes_do(family: str, variant: str) -> None:
    """A gate that read u would square it in every layer."""
    model: Any = as_if_trained(widen(tiny(family), variant, ratio=0.5), std=0.2)

    def largest_u() -> float:
        states = model.final_states(IDS, with_base_head=False)
        return states.u_BTE.abs().max().item()

    model.expansion.embed_tokens.weight.mul_(1e4)
    large = largest_u()
    model.expansion.embed_tokens.weight.mul_(1e4)
    assert largest_u() < 1.5e4 * large
