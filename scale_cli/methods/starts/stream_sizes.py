"""How large a base's stream is, measured on random tokens."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from scale_cli.model.family_scale import SUBLAYERS, family_of, linear_of

# Random tokens on which the size of the base's stream is measured.
_NUM_MEASURED = 256


@torch.no_grad()
def measured_stream_rms(base: PreTrainedModel, seed: int) -> dict[str, float]:
    """Return rms(x) at every norm that reads a plain base's stream, by name; without a norm, at
    every map that does.

    It is the median over random tokens: it needs no text, and a few extreme positions do not count.
    """
    measured: dict[str, float] = {}
    decoder = base.get_decoder()
    family = family_of(base.config)
    readers = {"norm": decoder.norm}
    for index, layer in enumerate(decoder.layers):
        for sublayer in SUBLAYERS:
            norm, _ = family.norms_around(sublayer)
            found = (
                {name: linear_of(layer, name) for name in sublayer.reading}
                if norm is None
                else {norm: getattr(layer, norm)}
            )
            readers |= {f"layers.{index}.{name}": module for name, module in found.items()}

    def measure(name: str, _norm: nn.Module, streams: tuple[Tensor, ...]) -> None:
        measured[name] = streams[0].float().pow(2).mean(-1).sqrt().median().item()

    hooks = [
        module.register_forward_pre_hook(partial(measure, name)) for name, module in readers.items()
    ]
    decoder(random_ids(base, seed), use_cache=False)
    for hook in hooks:
        hook.remove()
    return measured


def random_ids(base: PreTrainedModel, seed: int) -> Tensor:
    """Return (1, T) tokens of a base, on its device: random ones after its BOS, which need no text."""
    generator = torch.Generator().manual_seed(seed)
    length = min(_NUM_MEASURED, base.config.max_position_embeddings)
    ids = torch.randint(base.config.vocab_size, (1, length), generator=generator)
    if (bos := base.config.bos_token_id) is not None:
        ids[0, 0] = bos
    return ids.to(base.device)
