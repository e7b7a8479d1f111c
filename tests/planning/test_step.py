"""What is counted on tensors without numbers is what torch counts and keeps in a real step."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.methods import METHODS
from scale_cli.planning.step import StepCost, step_cost
from scale_cli.training.objective import for_training
from scale_cli.training.optimiser import build_optimiser, kinds_of_parameters
from scale_cli.upscale.building import NewPieces, start_model
from scripts.benchmark.counting import SUMMED_IN_PLACE, kept_for_backward, num_bytes
from tests.model.test_families import BASES, tiny
from tests.widening import tiny_llama

TRAINED = [name for name, method in METHODS.items() if method.trains]
EACH = [MethodConfig(variant=variant) for variant in TRAINED]
TOP, OWN, SOME, HEAD = (
    MethodConfig.model_validate(method)
    for method in (
        {"variant": "route", "collaboration": {"layers": "top:1"}},
        {"variant": "preserve", "expansion": {"hidden_ratio": 0.7, "mlp_ratio": 0.1}},
        {"variant": "lora", "lora": {"targets": ["1.self_attn.v_proj", "embed_tokens"]}},
        {"variant": "lora", "lora": {"targets": ["lm_head"]}},
    )
)
CASES = [
    *(("llama", method) for method in (*EACH, TOP, OWN, SOME, HEAD)),
    *((family, method) for family in BASES for method in (TOP, MethodConfig(variant="full"))),
]


def base_of(family: str) -> PreTrainedModel:
    return tiny_llama() if family == "llama" else tiny(family)


def counted(base: PreTrainedModel, method: MethodConfig, *asked: Any, **more: Any) -> StepCost:
    dtype = str(base.dtype).removeprefix("torch.")
    return step_cost(base.config, method, *asked, dtype=dtype, **more)


def window(vocab_size: int, length: int, batch_size: int = 1) -> dict[str, Any]:
    ids = torch.randint(
        0, vocab_size, (batch_size, length), generator=torch.Generator().manual_seed(0)
    )
    asked = {"labels": ids, "shift_labels": ids, "num_items_in_batch": length}
    return {"input_ids": ids, **asked, "use_cache": False}


@pytest.mark.parametrize(("family", "method"), CASES, ids=lambda of: getattr(of, "variant", of))
def test_parameters_products_and_what_is_kept_are_a_real_steps(
    family: str, method: MethodConfig
) -> None:
    base, length = base_of(family), 24
    planned = counted(base, method)
    kept_planned = {"no": planned, "bf16": counted(base, method, "bf16")}
    real = start_model(base, method, seed=0).train()

    of_kinds = dict.fromkeys(planned.trained, 0)
    for name, kind in kinds_of_parameters(real).items():
        of_kinds[kind] += real.get_parameter(name).numel()
    assert of_kinds == planned.trained
    in_all = sum(parameter.numel() for parameter in real.parameters())
    assert planned.num_frozen + planned.num_trainable == in_all

    real.set_attn_implementation("sdpa")
    for precision, step in kept_planned.items():
        with kept_for_backward(real, "cpu", precision) as kept:
            for_training(real, TrainConfig(max_steps=1))(**window(61, 7))
        whole = step.copies_bytes + 7 * step.bytes_per_token
        if step.keeps_logits:  # planned apart
            kept = {key: of for key, of in kept.items() if of.shape[-2:] != (7, 61)}
        assert whole == pytest.approx(num_bytes(kept.values()), rel=1e-3)

    real.set_attn_implementation("eager")
    with FlopCounterMode(display=False, custom_mapping=SUMMED_IN_PLACE) as counter:
        for_training(real, TrainConfig(max_steps=1))(**window(61, length)).loss.backward()
    of_attention = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    assert planned.product_flops * length == counter.get_total_flops() - of_attention
    assert planned.attention_per_key * length**2 == pytest.approx(of_attention, rel=1e-12)

    if method is not SOME:  # adapters of an embedding are not multiplied as they are held
        optimiser = build_optimiser(real, TrainConfig(max_steps=1, optimiser="muon"))
        with FlopCounterMode(display=False) as counter:
            optimiser.step()
        assert planned.muon_flops == counter.get_total_flops()


@pytest.mark.parametrize("variant", ["preserve", "full"])
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_masks_of_isolated_documents_are_counted_as_autograd_keeps_them(
    variant: str, mixed_precision: str
) -> None:
    method, base, length = MethodConfig(variant=variant), tiny_llama(), 53
    planned = counted(base, method, mixed_precision, masked=True)
    num_layers = base.config.num_hidden_layers
    real = start_model(base, method, seed=0).train()
    positions = torch.cat([torch.arange(20), torch.arange(length - 20)]).unsqueeze(0)
    with kept_for_backward(real, "cpu", mixed_precision) as kept:
        for_training(real, TrainConfig(max_steps=1))(**window(61, length), position_ids=positions)
    of_masks = [tensor for tensor in kept.values() if tensor.shape == (1, 1, length, length)]
    assert planned.bytes_per_pair == len(of_masks) * (4 if mixed_precision == "no" else 2)
    assert len(of_masks) == num_layers


@pytest.mark.parametrize("variant", ["route", "full"])
def test_new_tokens_are_rows_of_what_trains(variant: str) -> None:
    method = MethodConfig.model_validate(
        {"variant": variant, "vocabulary": {"new_tokens": 256, "script": "hangul"}}
    )
    base = tiny_llama()
    planned = counted(base, method, num_new=7)
    real = start_model(base, method, 0, NewPieces(["0"] * 7, []))
    counts = [
        sum(p.numel() for p in real.parameters() if p.requires_grad is trains)
        for trains in (False, True)
    ]
    assert [planned.num_frozen, planned.num_trainable] == counts


@pytest.mark.parametrize("family", BASES)
def test_the_model_that_is_served_has_the_parameters_of_the_plain_export(family: str) -> None:
    from scale_cli.export.dense import dense_model

    base = tiny(family)
    for variant in ("route", "full"):
        method = MethodConfig(variant=variant)
        model: Any = start_model(tiny(family), method, seed=0)
        plain = dense_model(model, "float32") if variant == "route" else model
        served = sum(parameter.numel() for parameter in plain.parameters())
        assert counted(base, method).num_served == served
