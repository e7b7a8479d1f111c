from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from scale_cli.config.load import load_config
from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.methods.recipes import trainable_parameters
from scale_cli.planning.memory import Memory, cost_of_run, memory_of
from scale_cli.planning.step import step_cost
from scale_cli.training.objective import for_training
from scale_cli.training.optimiser import build_optimiser, optimiser_tensors
from scale_cli.upscale.building import start_model
from scripts.benchmark.counting import LiveBytes
from tests.planning.test_step import EACH, TRAINED, counted, window
from tests.widening import tiny_llama

CARD_OF_24_GB = Path(__file__).parents[2] / "configs" / "llama-3.1-8b-24gb.yaml"
VOCAB_SIZE, LENGTH, BATCH_SIZE = 2048, 64, 4
LORA = MethodConfig(variant="lora")
DISTILLED = MethodConfig.model_validate({"variant": "preserve", "distillation": {"weight": 1.0}})
methods = pytest.mark.parametrize("method", EACH, ids=TRAINED)


def planned_memory(method: MethodConfig, mixed_precision: Any, **train: Any) -> Memory:
    sizes = {"global_batch_size": 8, "micro_batch_size": 4, "mixed_precision": mixed_precision}
    step = counted(tiny_llama(vocab_size=VOCAB_SIZE), method, mixed_precision)
    settings = TrainConfig.model_validate({"max_steps": 1, **sizes, **train})
    return memory_of(step, method, settings, LENGTH)


@pytest.mark.parametrize(
    ("method", "mixed_precision"),
    [
        *((method, "no") for method in EACH),
        *((method, "bf16") for method in (EACH[0], LORA, DISTILLED)),
    ],
    ids=[*TRAINED, "preserve, bf16", "lora, bf16", "distilled, bf16"],
)
def test_activations_and_logits_are_what_a_real_step_allocates_at_its_fullest(
    method: MethodConfig, mixed_precision: str
) -> None:
    planned = planned_memory(method, mixed_precision)
    model = start_model(tiny_llama(vocab_size=VOCAB_SIZE), method, seed=0).train()
    with LiveBytes() as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed_precision == "bf16"):
            options = {"distillation": (1.0,) * BATCH_SIZE} if method.distils else {}
            taken = window(VOCAB_SIZE, LENGTH, BATCH_SIZE) | options
            loss = for_training(model, TrainConfig(max_steps=1))(**taken).loss
        loss.backward()
    assert planned.saved + planned.head == pytest.approx(live.peak, rel=0.1)


@methods
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weights_gradients_and_moments_are_the_optimisers(method: MethodConfig, name: str) -> None:
    planned = planned_memory(method, "no", optimiser=name)
    model = start_model(tiny_llama(vocab_size=VOCAB_SIZE), method, seed=0).train()
    train = TrainConfig.model_validate({"max_steps": 1, "optimiser": name})
    optimiser = build_optimiser(model, train)
    for_training(model, TrainConfig(max_steps=1))(
        **window(VOCAB_SIZE, LENGTH, BATCH_SIZE)
    ).loss.backward()
    optimiser.step()
    trained = trainable_parameters(model).values()
    moments = [
        tensor
        for name, tensor in optimiser_tensors(optimiser, model).items()
        if not name.startswith("step.")
    ]
    assert planned.trainable == sum(parameter.nbytes for parameter in trained)
    assert planned.gradients == sum(
        parameter.grad.nbytes for parameter in trained if parameter.grad is not None
    )
    assert planned.moments == sum(tensor.nbytes for tensor in moments)
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert planned.frozen == held - planned.trainable
    assert planned.checkpoint == planned.trainable + planned.moments


def test_the_config_for_a_card_of_24_gb_fits_with_the_base_of_its_true_sizes() -> None:
    config = load_config(CARD_OF_24_GB)
    base = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    )
    step = cost_of_run(config, base, "cuda")
    length = config.corpus.sequence_length
    planned = memory_of(step, config.method, config.train, length, device_type="cuda")
    assert planned.frozen == pytest.approx(9.09e9, rel=0.01)
    assert planned.process == 0, "a GPU holds neither libraries nor texts"
    assert planned.total < 0.9 * 24 * 2**30  # the rest is for allocator, libraries, and W made anew


def test_on_a_cpu_libraries_and_the_tokenizer_are_part_of_the_sum() -> None:
    preserve, lora = (planned_memory(method, "bf16") for method in (EACH[0], LORA))
    for planned in (preserve, lora):
        assert planned.total - planned.process == sum(list(vars(planned).values())[:-1])
        assert planned.process > 5e8
    assert lora.process == preserve.process


def test_a_head_that_is_multiplied_as_it_is_held_is_not_copied() -> None:
    base = tiny_llama(vocab_size=VOCAB_SIZE).config
    in_bytes = {
        dtype: step_cost(base, LORA, "bf16", dtype=dtype).lowered_head_bytes
        for dtype in ("float32", "bfloat16")
    }
    assert in_bytes == {"float32": 2 * VOCAB_SIZE * base.hidden_size, "bfloat16": 0}
    full = step_cost(base, MethodConfig(variant="full"), "bf16", dtype="bfloat16")
    assert full.lowered_head_bytes == in_bytes["float32"]
