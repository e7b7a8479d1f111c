"""How large a model is when it is served: parameters, bytes and the real ratio of widening."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from scale_cli.export.dense import SAME_SCALES, dense_config
from scale_cli.export.records import ServedSize
from scale_cli.model.modeling_scale import ScaleForCausalLM


def served_size(model: Any, base_config: Any, dtype: str) -> ServedSize:
    """Return how large a method's model (`MethodModel`) is as a plain export in `dtype`, beside its
    plain base.

    `model` may be on the meta device, as `build_model` makes it there from `base_without_weights`:
    only sizes are read, so `scale plan` can say them before anything is downloaded. Tied weights
    count once, as in the file. A widened model is larger served than trained: its zero blocks are
    stored too, and its head is no longer tied.
    """
    plain: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    ratio = None
    served = plain.config
    if isinstance(model, ScaleForCausalLM):
        served = dense_config(model, SAME_SCALES)
        ratio = served.hidden_size / base_config.hidden_size - 1
    elif plain.get_input_embeddings().weight is not plain.get_output_embeddings().weight:
        served = deepcopy(served)
        served.tie_word_embeddings = False  # an adapter may have one of them, or each, whole
    item = getattr(torch, dtype).itemsize
    parameters = _num_parameters(served)
    base_parameters = _num_parameters(base_config)
    return ServedSize(
        parameters=parameters,
        num_bytes=parameters * item,
        base_parameters=base_parameters,
        base_bytes=base_parameters * item,
        ratio=ratio,
    )


def _num_parameters(config: Any) -> int:
    with torch.device("meta"):
        return int(AutoModelForCausalLM.from_config(config).num_parameters())
