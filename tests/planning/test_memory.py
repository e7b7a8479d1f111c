from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.methods.recipes import trainable_parameters
from scale_cli.planning import (
    Memory,
    Parameters,
    SavedTensors,
    count_saved_tensors,
    training_memory,
)
from scale_cli.training.objective import for_training
from scale_cli.training.optimiser import build_optimiser, optimiser_tensors
from scale_cli.upscale.building import start_model
from scripts.benchmark.counting import LiveBytes
from tests.planning.test_counting import EACH, VARIANTS, window, without_weights
from tests.widening import tiny_llama

CARD_OF_24_GB = Path(__file__).parents[2] / "configs" / "llama-3.1-8b-24gb.yaml"
VOCAB_SIZE, LENGTH, BATCH_SIZE = 2048, 64, 4
LORA = MethodConfig(variant="lora")
DISTILLED = MethodConfig.model_validate({"variant": "preserve", "distillation": {"weight": 1.0}})
methods = pytest.mark.parametrize("method", EACH, ids=VARIANTS)


@cache
def saved_tensors(method_json: str, mixed_precision: str) -> SavedTensors:
    method = MethodConfig.model_validate_json(method_json)
    return count_saved_tensors(
        without_weights(tiny_llama(vocab_size=VOCAB_SIZE), method), mixed_precision
    )


def planned_memory(
    method: MethodConfig, mixed_precision: Any, num_processes: int = 1, optimiser: str = "adamw"
) -> Memory:
    model = without_weights(tiny_llama(vocab_size=VOCAB_SIZE), method)
    sizes = {"global_batch_size": 8, "micro_batch_size": 4, "mixed_precision": mixed_precision}
    train = TrainConfig.model_validate({"max_steps": 1, "optimiser": optimiser, **sizes})
    return training_memory(
        Parameters.of(model, train),
        saved_tensors(method.model_dump_json(), mixed_precision),
        train,
        sequence_length=LENGTH,
        vocab_size=VOCAB_SIZE,
        num_processes=num_processes,
        device_type="cpu",
        distils=method.distils,
    )


@pytest.mark.parametrize(
    ("method", "mixed_precision"),
    [
        *((method, "no") for method in EACH),
        *((method, "bf16") for method in (EACH[0], LORA, DISTILLED)),
    ],
    ids=[*VARIANTS, "preserve, bf16", "lora, bf16", "distilled, bf16"],
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
    assert Parameters.of(model, train).checkpoint_bytes == planned.trainable + planned.moments
