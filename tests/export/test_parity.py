from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from scale_cli.errors import ExportParityError
from scale_cli.export.dense import dense_model, largest_stream_ratio
from scale_cli.export.formats import check_parity, measure_parity, served_logits
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.storage.records import Parity
from scale_cli.upscale.preservation import trained_logits
from tests.widening import as_if_trained, tiny_llama, widen


def prompts() -> list[Tensor]:
    """Short ones, and one in whose far positions rounded RoPE frequencies would turn everything."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 61, (1, length), generator=generator) for length in (5, 17, 120)]


@pytest.fixture
def trained() -> ScaleForCausalLM:
    return as_if_trained(widen(tiny_llama(), "route", "top:1"))


def test_a_faithful_export_is_close_and_called_good(trained: ScaleForCausalLM) -> None:
    parity = measure_parity(dense_model(trained, "float32"), trained, trained_logits, prompts())
    assert 0.0 < parity.mean_logit_difference <= parity.max_logit_difference <= 1e-4
    assert parity.num_positions == 142
    check_parity(parity, "float32")


@pytest.mark.parametrize("part", ["lm_head.weight", "model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_with_one_wrong_matrix_is_refused(trained: ScaleForCausalLM, part: str, dtype: str) -> None:
    exported: Any = dense_model(trained, dtype)
    with torch.no_grad():
        exported.get_parameter(part).mul_(-1.0)
    parity = measure_parity(exported, trained, trained_logits, prompts())
    with pytest.raises(ExportParityError, match="the export is not the trained model"):
        check_parity(parity, dtype)


def test_a_float16_export_with_one_matrix_a_hundredth_too_large_is_refused_on_a_long_prompt(tmp_path: Path) -> None:
    trained = as_if_trained(widen(tiny_llama(max_position_embeddings=2048), "route", "top:1"))
    dense_model(trained, "float16").save_pretrained(tmp_path)
    exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    long = torch.randint(0, 61, (1, 1500), generator=torch.Generator().manual_seed(0))
    check_parity(measure_parity(exported, trained, trained_logits, [long]), "float16")
    with torch.no_grad():
        exported.model.layers[1].mlp.down_proj.weight.mul_(1.01)
    with pytest.raises(ExportParityError):
        check_parity(measure_parity(exported, trained, trained_logits, [long]), "float16")


def test_an_export_of_another_head_is_refused(trained: ScaleForCausalLM) -> None:
    parity = measure_parity(dense_model(trained, "float32"), trained, served_logits, prompts())
    with pytest.raises(ExportParityError):
        check_parity(parity, "float32")


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_model_with_logits_that_are_not_finite_is_refused(trained: ScaleForCausalLM, broken: float) -> None:
    with torch.no_grad():
        trained.expansion.lm_head.weight[3, 3] = broken
    for dtype in ("float32", "bfloat16"):
        parity = measure_parity(dense_model(trained, dtype), trained, trained_logits, prompts())
        with pytest.raises(ExportParityError):
            check_parity(parity, dtype)


@pytest.mark.parametrize(
    ("difference", "own", "dtype", "good"),
    [
        (1e-4, 0.0, "float32", True),
        (1.1e-4, 1.0, "float32", False),
        (0.2, 0.1, "bfloat16", True),
        (0.21, 0.1, "bfloat16", False),
        (math.nan, 0.1, "bfloat16", False),
        (math.nan, 0.1, "float32", False),
    ],
)
def test_float32_is_held_to_a_figure_and_bfloat16_to_the_models_own_error(
    difference: float, own: float, dtype: str, good: bool
) -> None:
    parity = Parity(difference, difference, own, 1)
    if good:
        check_parity(parity, dtype)
    else:
        with pytest.raises(ExportParityError, match="is not the trained model"):
            check_parity(parity, dtype)


def test_the_models_own_error_is_that_of_the_model_loaded_in_the_exports_dtype(
    trained: ScaleForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained.save_pretrained(tmp_path)
    exact = copy.deepcopy(trained).double()
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(Tensor, "float", Tensor.double)
        patch.setattr(LlamaRMSNorm, "forward", lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight, 1e-6))
        wanted = [trained_logits(exact, ids) for ids in prompts()]
    for dtype in ("float32", "bfloat16", "float16"):
        parity = measure_parity(dense_model(trained, dtype), trained, trained_logits, prompts())
        lowered = ScaleForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
        with torch.no_grad():
            moved = torch.cat(
                [
                    (trained_logits(lowered, i).double() - at).abs().flatten()
                    for i, at in zip(prompts(), wanted, strict=True)
                ]
            )
        close = 1e-5 if dtype == "float32" else 1e-3  # beside less than float32, float32 is exact
        assert parity.own_mean_difference == pytest.approx(moved.mean().item(), rel=close)
        assert parity.own_max_difference == pytest.approx(moved.max().item(), rel=close)


def test_rounding_of_the_trained_models_own_does_not_refuse_an_export() -> None:
    check_parity(Parity(9e-4, 1e-5, 6e-6, 1, own_max_difference=1e-4), "float32")
    for further in (
        Parity(1.1e-3, 1e-5, 6e-6, 1, own_max_difference=1e-4),
        Parity(9e-4, 1.3e-5, 6e-6, 1, own_max_difference=1e-4),
    ):
        with pytest.raises(ExportParityError):
            check_parity(further, "float32")


@torch.no_grad()
def test_a_float16_export_holds_an_expansion_stream_that_is_hundreds_of_times_as_large_as_the_embeddings() -> None:
    base = tiny_llama()
    base.model.embed_tokens.weight.mul_(1e-3)
    model = widen(base, "preserve")
    model.expansion.lm_head.weight.normal_(generator=torch.Generator().manual_seed(0)).mul_(0.05)
    assert largest_stream_ratio(model, prompts()) > 600.0
    exported = dense_model(model, "float16", prompts())
    assert all(bool(torch.isfinite(parameter).all()) for parameter in exported.parameters())
    check_parity(measure_parity(exported, model, trained_logits, prompts()), "float16")


def test_measuring_leaves_the_trained_model_as_it_was(trained: ScaleForCausalLM) -> None:
    before = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    measure_parity(dense_model(trained, "bfloat16"), trained, trained_logits, prompts())
    after = trained.state_dict()
    assert all(
        torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype for name, tensor in before.items()
    )


class Made(TorchDispatchMode):
    """The largest tensor that was made, in bytes, and how many bytes of whole weights were made at once."""

    largest = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        if not op.is_view:
            of_these = [tensor for tensor in tree_leaves(made) if isinstance(tensor, Tensor)]
            self.largest = max(self.largest, *(tensor.nbytes for tensor in of_these), 0)
        return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_that_is_made_to_compare_grows_with_the_number_of_prompts(
    trained: ScaleForCausalLM, dtype: str
) -> None:
    exported, largest = dense_model(trained, dtype), []
    for repeats in (1, 9):
        with Made() as made:
            measure_parity(exported, trained, trained_logits, prompts() * repeats)
        largest.append(made.largest)
    assert largest[0] == largest[1]
    of_one_prompt = 120 * max(61, exported.config.intermediate_size)
    of_one_weight = max(parameter.numel() for parameter in trained.parameters())
    assert largest[0] <= max(of_one_prompt, of_one_weight) * (8 if dtype == "float32" else 4) * 2


def test_what_is_compared_is_not_copied_whole(trained: ScaleForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = dense_model(trained, "bfloat16")
    monkeypatch.setattr(copy, "deepcopy", lambda *_: pytest.fail("a second model"))
    measure_parity(exported, trained, trained_logits, prompts())
