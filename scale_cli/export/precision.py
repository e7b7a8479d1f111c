"""A model's weights in another dtype, and nothing else of it."""

from __future__ import annotations

import torch

from scale_cli.upscale.folder import MethodModel


def lower_weights(model: MethodModel, dtype: torch.dtype) -> None:
    """Hold every weight in a dtype, in place.

    RoPE's frequencies are no weights: `Module.to` would round them too, and no model that is loaded from a folder has
    them in less than float32.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
