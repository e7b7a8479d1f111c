from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.training.objective import for_training
from scale_cli.upscale.building import start_model
from scripts.benchmark.algebra import ideal_flops_per_token
from tests.widening import tiny_llama

SEQUENCE_LENGTH = 24
LLAMA_3_2_1B = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
)
# Every method, what trains being at the bottom, in the middle, at the top, or beside it.
METHODS = [
    {"variant": "full"},
    {"variant": "freeze", "freeze": {"num_layers": 0}},
    {"variant": "freeze", "freeze": {"num_layers": 2}},
    {"variant": "freeze", "freeze": {"num_layers": 3}},
    {"variant": "lora"},
    {"variant": "lora", "lora": {"rank": 3, "targets": ["1.self_attn.v_proj", "2.mlp.down_proj"]}},
    {"variant": "lora", "lora": {"rank": 3, "targets": ["embed_tokens"]}},
    {"variant": "lora", "lora": {"rank": 3, "targets": ["lm_head"]}},
    {"variant": "lora", "lora": {"rank": 3, "embeddings": True}},
    {"variant": "llama-pro", "llama_pro": {"num_blocks": 2}},
    {"variant": "preserve"},
    {"variant": "route", "expansion": {"ratio": 0.5, "hidden_ratio": 0.7, "mlp_ratio": 0.1}},
    {"variant": "adapt"},
    {"variant": "adapt", "collaboration": {"layers": "top:2", "modules": ["attention"]}},
    {"variant": "adapt", "collaboration": {"layers": [0, 2], "modules": ["mlp"]}},
]

# The counter does not know a product that is summed in place.
SUMMED_IN_PLACE = {
    torch.ops.aten.addmm_: lambda _, left, right, **__: 2 * left[0] * left[1] * right[1]
}


def counted(model: Any, num_tokens: int, **options: Any) -> dict[str, float]:
    """FLOPs per token of one real forward and backward, by torch's operator; eager attention, so all are products."""
    model.set_attn_implementation("eager")
    model.train()
    ids = torch.randint(0, 61, (2, num_tokens // 2))
    counter = FlopCounterMode(display=False, custom_mapping=SUMMED_IN_PLACE)
    with counter:
        for_training(model, TrainConfig(max_steps=1))(
            input_ids=ids,
            labels=ids,
            shift_labels=ids,
            num_items_in_batch=1,
            use_cache=False,
            **options,
        ).loss.backward()
    return {
        str(op): flops / num_tokens for op, flops in counter.get_flop_counts()["Global"].items()
    }


@pytest.mark.parametrize(("number", "settings"), list(enumerate(METHODS)), ids=str)
def test_the_formula_is_what_a_real_model_computes(number: int, settings: dict[str, Any]) -> None:
    base = tiny_llama(tie_word_embeddings=number % 2 == 1)
    method = MethodConfig.model_validate(settings)
    ideal = ideal_flops_per_token(base.config, method, SEQUENCE_LENGTH)
    by_operator = counted(start_model(base, method, seed=0), 2 * SEQUENCE_LENGTH)
    products = by_operator.pop("aten.mm") + by_operator.pop("aten.addmm_", 0.0)
    assert products == ideal.linear + ideal.head
    # Eager attention multiplies with every key and masks afterwards; the formula counts the keys a token sees.
    assert sum(by_operator.values()) == ideal.attention * SEQUENCE_LENGTH / (
        (SEQUENCE_LENGTH + 1) / 2
    )


def test_distillation_has_no_product_of_its_own() -> None:
    method = MethodConfig.model_validate({"variant": "route", "distillation": {"weight": 1.0}})
    model = start_model(tiny_llama(), method, seed=0)
    with_it = counted(model, 2 * SEQUENCE_LENGTH, distillation=(1.0, 0.0))
    assert with_it == counted(model, 2 * SEQUENCE_LENGTH)


@pytest.mark.parametrize("ratio", [0.125, 0.25, 0.5, 1.0])
def test_decoder_maps_cost_what_the_design_says_in_units_of_a_forward_pass(ratio: float) -> None:
    def linear(variant: str) -> float:
        method = MethodConfig.model_validate({"variant": variant, "expansion": {"ratio": ratio}})
        return ideal_flops_per_token(LLAMA_3_2_1B, method, 8192).linear

    forward = linear("full") / 3
    # The gate has 8192 of the 2 (2048 + 512) + 3 8192 rows of 2048 that a layer's maps have, and reads
    # x alone.
    of_u = 1 - 8192 / (2 * (2048 + 512) + 3 * 8192)
    preserve = 1 + 2 * ratio + 3 * of_u * ratio**2
    assert linear("preserve") == pytest.approx(forward * preserve, rel=1e-12)
    # The first layer's queries, keys and values need no gradient of the base stream below them.
    adapt = 2 + 3 * ratio + 3 * of_u * (ratio + ratio**2)
    assert linear("adapt") == pytest.approx(forward * adapt, rel=0.01)
    assert linear("lora") == pytest.approx(forward * 2, rel=0.05)
