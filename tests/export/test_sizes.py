"""What is said of the size served is what is written."""

from typing import Any

import pytest
import torch

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
        {"variant": "llama-pro"},
    ],
    ids=lambda method: method["variant"],
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
