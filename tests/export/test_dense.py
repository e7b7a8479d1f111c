from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from scale_cli.config.schema import MethodConfig
from scale_cli.export import dense as dense_module
from scale_cli.export.dense import dense_model
from scale_cli.methods.widened import CollaborationConfig, ExpansionConfig
from scale_cli.model.expansion_scale import ExpansionNorm
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.upscale.method import start_model
from tests.widening import as_if_trained, real_base, real_ids, tiny_llama, widen


@torch.no_grad()
def adaptation(model: ScaleForCausalLM, input_ids: Tensor) -> Tensor:
    return model.adaptation_logits(model.final_states(input_ids, preserved=False))


@torch.no_grad()
def answered(model: Any, input_ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=input_ids, use_cache=False).logits
    return logits.float()


def saved_and_loaded(model: PreTrainedModel, folder: Path) -> Any:
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=False).eval()


@torch.no_grad()
def louder(model: ScaleForCausalLM, factor: float) -> ScaleForCausalLM:
    """The same function with an expansion stream `factor` times as large: written louder, read more softly."""
    written: list[Any] = [model.expansion.embed_tokens.weight]
    layer: Any
    for layer in model.expansion.layers:
        for linear in (layer.o_proj, layer.down_proj):
            written += [linear.weight_21, linear.weight_22]
    for parameter in written:
        parameter.mul_(factor)
    for module in model.expansion.modules():
        if isinstance(module, ExpansionNorm):
            module.weight.mul_(1.0 / factor)
    return model


def test_it_is_exact_where_the_expansion_stream_has_grown_past_the_bases(shared_data: Path) -> None:
    ids = real_ids(shared_data, "ckpt-stories260K")[: 12 * 64].view(12, 64)
    model = as_if_trained(widen(real_base(shared_data, "ckpt-stories260K"), "preserve"))
    before = adaptation(model, ids)
    assert torch.equal(adaptation(louder(model, 32.0), ids), before)
    assert (answered(dense_model(model, "float32"), ids) - before).abs().max() <= 1e-4


@settings(deadline=None, max_examples=12)
@given(st.floats(0.1, 1.5), st.floats(0.01, 2.0), st.floats(0.01, 2.0), st.booleans())
def test_it_is_exact_and_the_base_untouched_whatever_the_sizes(
    heads: float, stream: float, mlp: float, writes: bool
) -> None:
    base = tiny_llama()
    ids = torch.arange(60).view(3, 20)
    expected = answered(base, ids)
    expansion = ExpansionConfig(ratio=heads, hidden_ratio=stream, mlp_ratio=mlp)
    collaboration = CollaborationConfig(layers="top:1" if writes else "none")
    started = start_model(base, MethodConfig(variant="route", expansion=expansion, collaboration=collaboration), seed=0)
    assert isinstance(started, ScaleForCausalLM)
    assert torch.equal(adaptation(started.eval(), ids), expected), "the function at the start"
    model = as_if_trained(started)
    assert torch.equal(answered(model.base, ids), expected)
    assert (answered(dense_model(model, "float32"), ids) - adaptation(model, ids)).abs().max() <= 1e-4


@pytest.mark.parametrize("variant", ["preserve", "adapt"])
def test_in_bfloat16_it_is_no_worse_than_twice_the_widened_model_in_bfloat16(
    shared_data: Path, tmp_path: Path, variant: str
) -> None:
    model = as_if_trained(widen(real_base(shared_data, "ckpt-stories260K", "bfloat16"), variant), std=0.05)
    loaded = saved_and_loaded(dense_model(model, "bfloat16"), tmp_path)
    assert loaded.dtype == torch.bfloat16
    nn.Module.to(model, torch.float32)
    ids = real_ids(shared_data, "ckpt-stories260K")[:1536].view(24, 64)
    exact = adaptation(model, ids)
    nn.Module.to(model, torch.bfloat16)
    own_error = (adaptation(model, ids).float() - exact).abs().mean()
    assert 0.0 < (answered(loaded, ids) - exact).abs().mean() <= 2.0 * own_error


def mantissas(tensor: Tensor) -> Tensor:
    return torch.frexp(tensor.float()).mantissa


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.no_grad()
def test_scaling_the_streams_changes_no_mantissa(shared_data: Path, dtype: str) -> None:
    model = as_if_trained(widen(real_base(shared_data, "ckpt-stories260K", dtype), "adapt"))
    if dtype == "bfloat16":
        model.expansion.to(torch.bfloat16).float()
    dense: Any = dense_model(model, dtype)
    scales = dense_module._SCALES[dtype]
    num_base = model.base.config.hidden_size
    embeddings = dense.model.embed_tokens.weight
    assert torch.equal(embeddings[:, :num_base].float(), scales.base * model.base.model.embed_tokens.weight.float())
    assert torch.equal(mantissas(embeddings[:, num_base:]), mantissas(model.expansion.embed_tokens.weight))
    assert torch.equal(dense.lm_head.weight[:, :num_base].float(), model.base.lm_head.weight.float())
    layers = zip(dense.model.layers, model.base.model.layers, model.expansion.layers, strict=True)
    for joined, frozen, added in layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
            owner = "self_attn" if hasattr(frozen.self_attn, name) else "mlp"
            weight = getattr(getattr(joined, owner), name).weight
            base_weight, blocks = getattr(getattr(frozen, owner), name).weight, getattr(added, name)
            rows, columns = base_weight.shape
            parts = {
                (0, 0): (weight[:rows, :columns], base_weight),
                (0, 1): (weight[:rows, columns:], blocks.weight_12),
                (1, 0): (weight[rows:, :columns], blocks.weight_21),
                (1, 1): (weight[rows:, columns:], blocks.weight_22),
            }
            for (row, _), (part, block) in parts.items():
                assert torch.equal(mantissas(part), mantissas(block))
                scale = (scales.base, scales.expansion)[row] if name in ("o_proj", "down_proj") else 1.0
                assert torch.equal(part.float(), scale * block.float())
