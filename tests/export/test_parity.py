import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from scale_cli.errors import ExportParityError
from scale_cli.export.dense import dense_model, largest_stream_ratio
from scale_cli.export.parity import TOLERANCES, check_close, coarser, measure_parity
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.upscale.preservation import trained_logits
from tests.widening import UNKNOWN, as_if_trained, random_ids, tiny_llama, widen


def prompts() -> list[Tensor]:
    """Short ones, and one in whose far positions rounded RoPE frequencies would turn everything."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 61, (1, length), generator=generator) for length in (5, 17, 120)]


def prove(exported: Any, trained: ScaleForCausalLM, *ids: Tensor) -> None:
    """Hold an export to its model on prompts of three lengths, or on these ids."""
    of_prompts = [*ids] or prompts()
    measure_parity(exported, trained, trained_logits, of_prompts, coarser(exported, trained))


@pytest.fixture
def trained() -> ScaleForCausalLM:
    return as_if_trained(widen(tiny_llama(), "route", "top:1"))


@pytest.mark.parametrize(
    "part", ["lm_head.weight", "model.norm.weight", "model.layers.1.mlp.down_proj.weight"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_with_one_wrong_matrix_is_refused(
    trained: ScaleForCausalLM, part: str, dtype: str
) -> None:
    exported = dense_model(trained, dtype)
    prove(exported, trained)
    with torch.no_grad():
        exported.get_parameter(part).mul_(-1.0)
    with pytest.raises(ExportParityError):
        prove(exported, trained)


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 1.01), ("float16", 1.2)])
def test_an_export_with_one_matrix_slightly_too_large_is_refused_on_a_long_prompt(
    tmp_path: Path, dtype: str, factor: float
) -> None:
    trained = as_if_trained(widen(tiny_llama(max_position_embeddings=2048), "route", "top:1"))
    dense_model(trained, dtype).save_pretrained(tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    long = random_ids(1, 1500)
    prove(exported, trained, long)
    with torch.no_grad():
        exported.model.layers[1].mlp.down_proj.weight.mul_(factor)
    with pytest.raises(ExportParityError):
        prove(exported, trained, long)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_model_with_logits_that_are_not_finite_is_refused(
    trained: ScaleForCausalLM, broken: float
) -> None:
    with torch.no_grad():
        trained.expansion.lm_head.weight[3, 3] = broken
    for dtype in ("float32", "bfloat16"):
        exported = dense_model(trained, dtype)
        with pytest.raises(ExportParityError):
            prove(exported, trained)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("broken", [1.01, math.nan])
def test_logits_may_be_apart_by_a_share_of_the_largest_for_each_dtype(
    dtype: torch.dtype, broken: float
) -> None:
    wanted = torch.tensor([[0.0, -50.0, 3.0]])
    allowed = 50.0 * TOLERANCES[dtype].logits
    check_close(wanted + 0.99 * allowed, wanted, TOLERANCES[dtype].logits, "")
    with pytest.raises(ExportParityError, match="too far: logits differ"):
        check_close(wanted + broken * allowed, wanted, TOLERANCES[dtype].logits, "too far")


def test_predictions_that_are_all_a_little_off_are_refused_by_their_mean_in_nats(
    trained: ScaleForCausalLM,
) -> None:
    """What every position has is no rounding, though it is within the tolerance of logits."""
    exported = dense_model(trained, "bfloat16")
    exported.lm_head.register_forward_hook(lambda _, __, logits: 1.5 * logits)
    with pytest.raises(
        ExportParityError, match=r"nats from that model's on average; allowed: 0\.05"
    ):
        prove(exported, trained)


@torch.no_grad()
def test_a_float16_export_holds_a_stream_of_hundreds_of_times_the_embeddings() -> None:
    base = tiny_llama()
    base.model.embed_tokens.weight.mul_(1e-3)
    model = widen(base, "preserve", text=UNKNOWN)  # u is codes as large as x becomes
    model.expansion.lm_head.weight.normal_(generator=torch.Generator().manual_seed(0)).mul_(0.05)
    assert largest_stream_ratio(model, prompts()) > 600.0
    exported = dense_model(model, "float16", prompts())
    assert all(bool(torch.isfinite(parameter).all()) for parameter in exported.parameters())
    prove(exported, model)
