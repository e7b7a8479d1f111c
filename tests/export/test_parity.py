import copy
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from scale_cli.errors import ExportParityError
from scale_cli.export.dense import dense_model, largest_stream_ratio
from scale_cli.export.formats import check_parity, measure_parity
from scale_cli.export.records import Parity
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.upscale.preservation import trained_logits
from tests.widening import UNKNOWN, as_if_trained, random_ids, tiny_llama, trained_head, widen


def prompts() -> list[Tensor]:
    """Short ones, and one in whose far positions rounded RoPE frequencies would turn everything."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 61, (1, length), generator=generator) for length in (5, 17, 120)]


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
    exported: Any = dense_model(trained, dtype)
    check_parity(measure_parity(exported, trained, trained_logits, prompts()), dtype)
    with torch.no_grad():
        exported.get_parameter(part).mul_(-1.0)
    parity = measure_parity(exported, trained, trained_logits, prompts())
    with pytest.raises(ExportParityError):
        check_parity(parity, dtype)


def test_a_float16_export_with_one_matrix_a_hundredth_too_large_is_refused_on_a_long_prompt(
    tmp_path: Path,
) -> None:
    trained = as_if_trained(widen(tiny_llama(max_position_embeddings=2048), "route", "top:1"))
    dense_model(trained, "float16").save_pretrained(tmp_path)
    exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    long = random_ids(1, 1500)
    check_parity(measure_parity(exported, trained, trained_logits, [long]), "float16")
    with torch.no_grad():
        exported.model.layers[1].mlp.down_proj.weight.mul_(1.01)
    with pytest.raises(ExportParityError):
        check_parity(measure_parity(exported, trained, trained_logits, [long]), "float16")


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_model_with_logits_that_are_not_finite_is_refused(
    trained: ScaleForCausalLM, broken: float
) -> None:
    with torch.no_grad():
        trained.expansion.lm_head.weight[3, 3] = broken
    for dtype in ("float32", "bfloat16"):
        parity = measure_parity(dense_model(trained, dtype), trained, trained_logits, prompts())
        with pytest.raises(ExportParityError):
            check_parity(parity, dtype)


@pytest.mark.parametrize(
    ("parity", "dtype", "good"),
    [
        (Parity(1e-4, 1e-4, 0.0, 1), "float32", True),
        (Parity(1.1e-4, 1.1e-4, 1.0, 1), "float32", False),
        # It rounds as the model itself does.
        (Parity(9e-4, 1e-5, 6e-6, 1, own_max_difference=1e-4), "float32", True),
        (Parity(1.1e-3, 1e-5, 6e-6, 1, own_max_difference=1e-4), "float32", False),
        (Parity(9e-4, 1.3e-5, 6e-6, 1, own_max_difference=1e-4), "float32", False),
        (Parity(0.2, 0.2, 0.1, 1), "bfloat16", True),
        (Parity(0.21, 0.21, 0.1, 1), "bfloat16", False),
        (Parity(math.nan, math.nan, 0.1, 1), "bfloat16", False),
        (Parity(math.nan, math.nan, 0.1, 1), "float32", False),
    ],
)
def test_float32_is_held_to_a_figure_and_bfloat16_to_the_models_own_error(
    parity: Parity, dtype: str, good: bool
) -> None:
    with nullcontext() if good else pytest.raises(ExportParityError):
        check_parity(parity, dtype)


def test_the_models_own_error_is_that_of_the_model_loaded_in_the_exports_dtype(
    trained: ScaleForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained.save_pretrained(tmp_path)
    before, exact = copy.deepcopy(trained.state_dict()), copy.deepcopy(trained).double()
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(Tensor, "float", Tensor.double)
        patch.setattr(
            LlamaRMSNorm, "forward", lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight, 1e-6)
        )
        wanted = [trained_logits(exact, ids) for ids in prompts()]
    for dtype in ("float32", "bfloat16", "float16"):
        parity = measure_parity(dense_model(trained, dtype), trained, trained_logits, prompts())
        lowered = ScaleForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
        differences = [
            trained_head(lowered, ids) - at for ids, at in zip(prompts(), wanted, strict=True)
        ]
        moved = torch.cat([difference.abs().flatten() for difference in differences])
        close = 1e-5 if dtype == "float32" else 1e-3  # beside less than float32, float32 is exact
        assert parity.own_mean_difference == pytest.approx(moved.mean().item(), rel=close)
        assert parity.own_max_difference == pytest.approx(moved.max().item(), rel=close)
    torch.testing.assert_close(
        trained.state_dict(), before, rtol=0.0, atol=0.0
    )  # of the same dtypes, too


@torch.no_grad()
def test_a_float16_export_holds_a_stream_of_hundreds_of_times_the_embeddings() -> None:
    base = tiny_llama()
    base.model.embed_tokens.weight.mul_(1e-3)
    model = widen(base, "preserve", text=UNKNOWN)  # u is codes as large as x becomes
    model.expansion.lm_head.weight.normal_(generator=torch.Generator().manual_seed(0)).mul_(0.05)
    assert largest_stream_ratio(model, prompts()) > 600.0
    exported = dense_model(model, "float16", prompts())
    assert all(bool(torch.isfinite(parameter).all()) for parameter in exported.parameters())
    check_parity(measure_parity(exported, model, trained_logits, prompts()), "float16")
