from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.methods import METHODS
from scale_cli.planning import count_flops, count_saved_tensors, kept_for_backward, num_bytes
from scale_cli.training.objective import for_training
from scale_cli.upscale.base import base_without_weights
from scale_cli.upscale.building import MethodModel, build_model, start_model
from tests.model.test_families import tiny
from tests.widening import tiny_llama

VARIANTS = tuple(METHODS)
EACH = [MethodConfig.model_validate({"variant": variant}) for variant in VARIANTS]
TOP = MethodConfig.model_validate({"variant": "route", "collaboration": {"layers": "top:1"}})
OWN = MethodConfig.model_validate(
    {"variant": "preserve", "expansion": {"hidden_ratio": 0.7, "mlp_ratio": 0.1}}
)
OTHERS = ["gemma3_text"]
methods = pytest.mark.parametrize(
    ("family", "method"),
    [*(("llama", method) for method in (*EACH, TOP, OWN)), *((family, TOP) for family in OTHERS)],
    ids=[*VARIANTS, "route, top layer", "own sizes", *OTHERS],
)


def base_of(family: str) -> PreTrainedModel:
    return tiny_llama() if family == "llama" else tiny(family)


def without_weights(base: PreTrainedModel, method: MethodConfig) -> MethodModel:
    with torch.device("meta"):
        return build_model(
            base_without_weights(base.config, str(base.dtype).removeprefix("torch.")),
            method,
            seed=0,
        )


def window(vocab_size: int, length: int, batch_size: int = 1) -> dict[str, Any]:
    ids = torch.randint(
        0, vocab_size, (batch_size, length), generator=torch.Generator().manual_seed(0)
    )
    return {
        "input_ids": ids,
        "labels": ids,
        "shift_labels": ids,
        "num_items_in_batch": length,
        "use_cache": False,
    }


def described(model: MethodModel) -> list[tuple[Any, ...]]:
    return [(name, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()]


@methods
def test_parameters_products_and_what_is_saved_are_those_of_the_model_that_trains(
    family: str, method: MethodConfig
) -> None:
    base, length = base_of(family), 24
    planned, real = without_weights(base, method), start_model(base, method, seed=0).train()
    assert {parameter.device.type for parameter in planned.parameters()} == {"meta"}
    assert described(planned) == described(real)
    for mixed_precision in ("no", "bf16"):
        saved = count_saved_tensors(without_weights(base, method), mixed_precision)
        with kept_for_backward(real, "cpu", mixed_precision) as kept:
            for_training(real, TrainConfig(max_steps=1))(**window(61, 120))
        whole = saved.copies_bytes + 120 * (saved.bytes_per_token + saved.head_bytes_per_token)
        assert whole == pytest.approx(num_bytes(kept.values()), rel=1e-3)
    counted = count_flops(planned, length)
    real.set_attn_implementation("eager")
    unknown_to_it = {
        torch.ops.aten.addmm_: lambda _, left, right, **__: 2 * left[0] * left[1] * right[1],
        torch.ops.aten._grouped_mm: lambda left, right, *_, **__: 2 * left[0] * left[1] * right[-1],
    }
    with FlopCounterMode(display=False, custom_mapping=unknown_to_it) as counter:
        for_training(real, TrainConfig(max_steps=1))(**window(61, length)).loss.backward()
    of_attention = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    assert counted.products * length == counter.get_total_flops() - of_attention
    assert counted.attention_per_key * length**2 == pytest.approx(of_attention, rel=1e-12)


@pytest.mark.parametrize("variant", ["preserve", "full"])
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_masks_of_isolated_documents_are_counted_as_autograd_saves_them(
    variant: str, mixed_precision: str
) -> None:
    method, base, length = MethodConfig.model_validate({"variant": variant}), tiny_llama(), 53
    without, planned = (
        count_saved_tensors(without_weights(base, method), mixed_precision, masked=masked)
        for masked in (False, True)
    )
    assert without.bytes_per_pair == 0
    real = start_model(base, method, seed=0).train()
    positions = torch.cat([torch.arange(20), torch.arange(length - 20)]).unsqueeze(0)
    with kept_for_backward(real, "cpu", mixed_precision) as kept:
        for_training(real, TrainConfig(max_steps=1))(**window(61, length), position_ids=positions)
    of_masks = [tensor for tensor in kept.values() if tensor.shape == (1, 1, length, length)]
    itemsize = 4 if mixed_precision == "no" else 2
    assert len(of_masks) == base.config.num_hidden_layers
    assert planned.bytes_per_pair == len(of_masks) * itemsize + 1, (
        "and the mask that they are made of"
    )
