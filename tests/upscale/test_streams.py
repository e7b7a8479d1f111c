"""The expansion stream beside the base stream."""

from __future__ import annotations

import torch

from scale_cli.export.dense import largest_stream_ratio
from scale_cli.upscale.objective import layer_ratios, measured_stream_ratios
from tests.widening import as_if_trained, tiny_llama, widen


@torch.no_grad()
def test_the_ratio_before_the_first_norm_is_that_of_the_embeddings_and_every_norm_is_measured() -> None:
    model = as_if_trained(widen(tiny_llama(), "preserve"))
    ids = torch.arange(40).view(2, 20)
    with measured_stream_ratios(model) as ratios:
        for half in ids:  # of several forward passes the largest
            model(input_ids=half[None])
    u, x = model.expansion.embed_tokens(ids), model.base.get_input_embeddings()(ids)
    first = (u.pow(2).mean(-1) / (x.pow(2).mean(-1) + model.base.config.rms_norm_eps)).sqrt().max()
    torch.testing.assert_close(ratios["expansion.layers.0.input_layernorm"], first)
    by_layer = layer_ratios(model, ratios)
    assert by_layer.shape == (len(model.expansion.layers) + 1,)
    assert by_layer.max().item() == max(ratio.item() for ratio in ratios.values())
    assert largest_stream_ratio(model, list(ids[:, None])) == by_layer.max().item()
    assert not any(module._forward_pre_hooks for module in model.modules())
