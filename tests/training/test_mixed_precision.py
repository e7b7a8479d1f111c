from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import Batches, PackedWindows
from scale_cli.training.optimiser import build_optimiser
from scale_cli.training.step import train_step
from scale_cli.upscale.method import start_model
from scale_cli.upscale.objective import for_training
from tests.widening import tiny_llama


class CopiesOf(TorchDispatchMode):
    """Notes every tensor that has the shape of one of some weights, or of its transpose, and is none of them."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.shapes = {tuple(shape) for w in weights for shape in (w.shape, w.shape[::-1])}
        self.storages = {w.untyped_storage().data_ptr() for w in weights}
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        of_a_shape = isinstance(result, Tensor) and tuple(result.shape) in self.shapes
        if of_a_shape and result.untyped_storage().data_ptr() not in self.storages:
            self.made.append(f"{func}: {result.dtype} {tuple(result.shape)}")
        return result


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mixed_precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("variant", ["preserve", "adapt", "lora"])
def test_a_frozen_base_in_16_bits_is_never_copied_and_what_trains_is_held_in_float32(
    variant: str, mixed_precision: Any, checkpointing: bool
) -> None:
    # Sizes at which no block of the expansion has the shape of one of the base's weights; 14 tokens at once.
    dtype = torch.float16 if mixed_precision == "fp16" else torch.bfloat16
    whole: Any = tiny_llama(num_key_value_heads=4)
    base = whole.to(dtype)
    frozen = [parameter for parameter in base.parameters() if parameter.ndim == 2]
    model: Any = start_model(base, MethodConfig.model_validate({"variant": variant, "lora": {"rank": 2}}), seed=0)
    train = TrainConfig(
        max_steps=2,
        mixed_precision=mixed_precision,
        activation_checkpointing=checkpointing,
        global_batch_size=4,
        micro_batch_size=2,
    )
    ids = torch.randint(0, 61, (400,), generator=torch.Generator().manual_seed(1)).numpy()
    batches = Batches([PackedWindows(ids, 7)], [1.0], num_steps=2, seed=0, global_batch_size=4, micro_batch_size=2)
    optimiser, accelerator = build_optimiser(model, train), Accelerator(cpu=True)
    wrapped = for_training(model.train(), train)
    with CopiesOf(frozen) as copies:
        for step in range(2):
            train_step(accelerator, wrapped, optimiser, batches.of_step(step), train)
    assert copies.made == []
    assert {weight.dtype for weight in frozen} == {dtype}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    moments = [state[name] for state in optimiser.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert {tensor.dtype for tensor in (*trained, *moments)} == {torch.float32}
    num_trained = sum(parameter.numel() for parameter in trained)
    assert sum(moment.nbytes for moment in moments) == 8 * num_trained
