"""Codes: u begins as a random row of E' for every token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from scale_cli.errors import BaseModelError
from scale_cli.methods.starts.copies import copy_layer, map_at_once, one_thread
from scale_cli.methods.starts.start import Start, TextToLearn
from scale_cli.methods.starts.stream_sizes import measured_stream_rms
from scale_cli.model.expansion_scale import ExpansionNorm

# The rms of the codes, relative to the base's stream before its last norm.
_CODES = 1.4
_MATRIX_RATES = {"muon": 16.0, "adamw": 1.5}


class Codes(Start):
    """For text that the base does not know: x says little of it.

    Codes tell every layer which token stands where, and E' learns fast. They are as large as x
    becomes, and the gains let them through at rms 1 at most.
    """

    name = "codes"
    # Only H' changes the loss in the first update; what grows later, and diverges, is u.
    first_update_tells = False

    def suits(self, base: PreTrainedModel, text: TextToLearn | None) -> bool:
        return True

    def fill(self, model: Any, seed: int, text: TextToLearn | None) -> dict[str, float]:
        base = model.base
        expansion = model.expansion
        with one_thread():
            map_at_once(partial(copy_layer, base.config), base.model.layers, expansion.layers)

        stream_rms = measured_stream_rms(base, seed)
        embedding_rms = _rounded(_CODES * stream_rms["norm"])
        if not 0.0 < embedding_rms < math.inf:
            raise BaseModelError(
                f"model.base: rms(x) before its last norm is {stream_rms['norm']:g} on random tokens, but "
                "E' starts in proportion to it; these are no weights of a trained model"
            )
        codes = expansion.embed_tokens.weight
        generator = torch.Generator().manual_seed(seed)
        # In place: E' is the largest tensor made here.
        codes.copy_(torch.randn(codes.shape, generator=generator).mul_(embedding_rms))
        for name, base_rms in stream_rms.items():
            reader = expansion.get_submodule(name)
            if isinstance(reader, ExpansionNorm):  # some families read the stream without a norm
                reader.weight.fill_(min(1.0, _rounded(base_rms) / embedding_rms))
        return {"embedding_rms": embedding_rms}

    def rates(self, began: Mapping[str, Any], optimiser: str) -> Mapping[str, float]:
        return {
            "embedding": 200.0 * began["embedding_rms"],  # relative to the codes' size
            "head": 10.0,
            "gains": 0.5,
            "matrix": _MATRIX_RATES[optimiser],
        }


def _rounded(size: float) -> float:
    """Round a measured size to two digits, so that rounding on different devices does not change
    the start.
    """
    return float(f"{size:.2g}")
