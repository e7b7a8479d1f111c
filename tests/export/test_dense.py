from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scale_cli.config.schema import MethodConfig
from scale_cli.export.dense import dense_model
from scale_cli.methods.widened import CollaborationConfig, ExpansionConfig
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.upscale.method import start_model
from tests.model.test_families import answered
from tests.widening import as_if_trained, tiny_llama


@torch.no_grad()
def adaptation(model: ScaleForCausalLM, input_ids: Tensor) -> Tensor:
    return model.adaptation_logits(model.final_states(input_ids, preserved=False))


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
