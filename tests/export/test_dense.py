import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scale_cli.config.schema import MethodConfig
from scale_cli.export import dense as dense_module
from scale_cli.export.dense import dense_model
from scale_cli.methods.widened import CollaborationConfig, ExpansionConfig
from scale_cli.model.expansion_scale import ExpansionNorm
from scale_cli.model.family_scale import OWNERS
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.upscale.building import start_model
from tests.model.test_families import answered
from tests.widening import (
    as_if_trained,
    assert_starts_as_base,
    real_base,
    real_ids,
    tiny_llama,
    trained_head,
    widen,
)


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
    before = trained_head(model, ids)
    assert torch.equal(trained_head(louder(model, 32.0), ids), before)
    assert (answered(dense_model(model, "float32"), ids) - before).abs().max() <= 1e-4


@settings(max_examples=12)
@given(st.floats(0.1, 1.0), st.floats(0.01, 1.0), st.floats(0.01, 1.0), st.booleans())
def test_it_is_exact_and_the_base_untouched_whatever_the_sizes(
    heads: float, stream: float, mlp: float, writes: bool
) -> None:
    base = tiny_llama()
    ids = torch.arange(60).view(3, 20)
    expected = answered(base, ids)
    expansion = ExpansionConfig(ratio=heads, hidden_ratio=stream, mlp_ratio=mlp)
    collaboration = CollaborationConfig(layers="top:1" if writes else "none")
    started = start_model(
        base,
        MethodConfig(variant="route", expansion=expansion, collaboration=collaboration),
        seed=0,
    )
    assert isinstance(started, ScaleForCausalLM)
    assert_starts_as_base(started.eval(), ids, expected, num_eps=500.0)  # 82 was the most
    model = as_if_trained(started)
    assert torch.equal(answered(model.base, ids), expected)
    assert (
        answered(dense_model(model, "float32"), ids) - trained_head(model, ids)
    ).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.no_grad()
def test_streams_are_scaled_by_powers_of_two_alone_so_that_no_mantissa_changes(
    shared_data: Path, dtype: str
) -> None:
    model = as_if_trained(widen(real_base(shared_data, "ckpt-stories260K", dtype), "adapt"))
    if dtype == "bfloat16":
        model.expansion.to(torch.bfloat16).float()
    dense = dense_model(model, dtype)
    a, b = vars(dense_module._SCALES[dtype]).values()
    assert math.frexp(a)[0] == math.frexp(b)[0] == 0.5
    base, added, num_base = model.base, model.expansion, model.base.config.hidden_size
    of_x, of_u = dense.model.embed_tokens.weight.float().tensor_split([num_base], dim=1)
    assert torch.equal(of_x, a * base.model.embed_tokens.weight.float())
    assert torch.equal(of_u, b * added.embed_tokens.weight)
    assert torch.equal(dense.lm_head.weight[:, :num_base], base.lm_head.weight)
    for joined, frozen, own in zip(
        dense.model.layers, base.model.layers, added.layers, strict=True
    ):
        for name, owner in OWNERS.items():
            weight, blocks = getattr(getattr(frozen, owner), name).weight, getattr(own, name)
            of_u = [blocks.weight_12, blocks.weight_22]
            if name == "gate_proj":  # it reads x alone
                assert of_u == [None, None]
                num_u = added.embed_tokens.weight.shape[1]
                of_u = [torch.zeros(len(of), num_u) for of in (weight, blocks.weight_21)]
            whole = [[weight, of_u[0]], [blocks.weight_21, of_u[1]]]
            scales = (a, b) if name in ("o_proj", "down_proj") else (1.0, 1.0)
            rows = [
                scale * torch.cat(row, dim=1).float()
                for scale, row in zip(scales, whole, strict=True)
            ]
            assert torch.equal(
                getattr(getattr(joined, owner), name).weight.float(), torch.cat(rows)
            )
