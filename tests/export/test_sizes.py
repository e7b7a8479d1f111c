"""What is said of the size served is what is written."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from scale_cli.config.schema import MethodConfig
from scale_cli.export.dense import plain_model
from scale_cli.export.sizes import served_size
from scale_cli.upscale.building import build_model, start_model
from tests.widening import tiny_llama


@pytest.mark.parametrize(
    "method",
    [
        {"variant": "preserve", "expansion": {"ratio": 0.25}},
        {"variant": "full"},
        {"variant": "lora"},
        {"variant": "lora", "lora": {"embeddings": True}},
        {"variant": "llama-pro"},
    ],
    ids=["preserve", "full", "lora", "lora with embeddings", "llama-pro"],
)
@pytest.mark.parametrize("tied", [True, False])
def test_the_size_served_is_that_of_the_plain_export_and_known_without_weights(
    method: dict[str, Any], tied: bool
) -> None:
    checked = MethodConfig.model_validate(method)
    written = plain_model(
        start_model(tiny_llama(tie_word_embeddings=tied), checked, seed=0), "bfloat16"
    )
    with torch.device("meta"):
        unfilled = build_model(tiny_llama(tie_word_embeddings=tied), checked, seed=0)
    base = tiny_llama(tie_word_embeddings=tied)
    size = served_size(unfilled, base.config, "bfloat16")
    assert size.parameters == written.num_parameters()
    assert size.num_bytes == 2 * size.parameters
    assert size.base_parameters == base.num_parameters()
    widened = written.config.hidden_size / base.config.hidden_size - 1
    assert size.ratio == (widened if checked.definition.widens else None)


@pytest.mark.parametrize("whole", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_what_an_adapter_that_others_made_has_whole_is_counted_once_or_twice_as_it_is_written(
    whole: list[str],
) -> None:
    base = tiny_llama(tie_word_embeddings=True)
    settings = LoraConfig(target_modules=["q_proj"], modules_to_save=whole)
    adapted: Any = get_peft_model(copy.deepcopy(base), settings)
    written = plain_model(adapted, "float32")
    size = served_size(adapted, base.config, "float32")
    assert size.parameters == written.num_parameters()
