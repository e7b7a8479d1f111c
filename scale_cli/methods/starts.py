"""The initial values of every added block."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from scale_cli.errors import BaseModelError
from scale_cli.methods.widened import STARTS
from scale_cli.model.expansion_scale import Expansion, ExpansionLinear, ExpansionNorm
from scale_cli.model.family_scale import OWNERS, STEPS, family_of, linear_of
from scale_cli.model.modeling_scale import ScaleForCausalLM

# Random tokens on which the size of the base's stream is measured.
_NUM_MEASURED = 256
# Of the randomised SVD: most directions per block of rows, extra dimensions of the random subspace, power iterations.
_OF_BLOCK = 64
_OVERSAMPLED = 16
_PASSES = 2


@torch.no_grad()
def initialise_expansion(
    model: ScaleForCausalLM, start: str, seed: int, embedding_scale: float | None = None
) -> None:
    """Fill every added block; the base is only read.

    | block | reads -> writes       | svd                         | normal    |
    |-------|-----------------------|-----------------------------|-----------|
    | W21   | x -> u                | S_k V_k^T of W, k = rows    | N(0, s^2) |
    | W22   | u -> u                | N(0, s^2)                   | N(0, s^2) |
    | W12   | u -> x (if it exists) | 0                           | 0         |
    | E'    | token -> u            | U_k S_k of E, k = columns   | N(0, s^2) |
    | H'    | u -> logits           | 0                           | 0         |
    | g'    | gain of an input norm | 1                           | 1         |
    | g'    | of an output norm     | rms(g)                      | rms(g)    |
    | b2    | bias, if W has one    | 0                           | 0         |

    Some families have output norms (over a layer's output, or its queries and keys): g are the base's gains there.
    s is the base's initializer_range. If W has fewer directions than are needed, the remaining rows are N(0, s^2). If
    more than 64 are needed, blocks of W's rows give 64 each at most.
    Numbers are drawn on the CPU in float32, so they are the same for every device and dtype.

    With an `embedding_scale`, E' starts as random codes whose size is relative to the base's stream. Since u is divided
    by rms(x), which grows from norm to norm, the gains bring u to the size of a normalised stream at every norm.

    | E'    | token -> u            | N(0, e^2), e = embedding_scale x rms(x) before the last norm                  |
    | g'    | gain of norm k        | min(1, rms(x) before norm k / e); without a norm, W22 is multiplied by it     |

    `start` applies to W21, and to E' without an `embedding_scale`. The model's configuration stores e.

    Source: SCALE, arXiv 2511.03270 (an SVD start for W21 and W22 is recommended; H' = 0 and W12 = 0 keep the function).
    """
    generator = torch.Generator().manual_seed(seed)
    std = float(model.base.config.initializer_range)
    base, expansion = model.base, model.expansion
    codes, family = expansion.embed_tokens.weight, family_of(base.config)
    if embedding_scale is None:
        rows = [family.token_rows(base)]
        if expansion.new_tokens is not None:
            rows.append(expansion.new_tokens.embed_tokens.weight)
        embedding = torch.cat([of_tokens.float() for of_tokens in rows])
        codes.copy_(_start_from(embedding.T, codes.T.shape, start, std, generator).T)
    expansion.lm_head.weight.zero_()
    for base_layer, layer in zip(base.model.layers, expansion.layers, strict=True):
        for name in OWNERS:
            frozen, widened = linear_of(base_layer, name), getattr(layer, name)
            # The numbers of a quantised weight too, in float32, in which directions are computed.
            weight = frozen.weight.dequantize()
            widened.weight_21.copy_(
                _start_from(weight, widened.weight_21.shape, start, std, generator)
            )
            widened.weight_22.copy_(_normal(widened.weight_22.shape, std, generator))
            for zero in (widened.weight_12, widened.bias_2):
                if zero is not None:
                    zero.zero_()
    _start_gains(base, expansion)
    if embedding_scale is not None:
        _start_codes(model, seed, embedding_scale, generator)


def _start_gains(base: Any, expansion: Expansion) -> None:
    """Fill the gains: 1 for input norms; the rms of the base's gains for output norms, which no norm follows."""
    family = family_of(base.config)
    for module in expansion.modules():
        if isinstance(module, ExpansionNorm):
            nn.init.ones_(module.weight)
    for base_layer, layer in zip(base.model.layers, expansion.layers, strict=True):
        written = [after for _, after in map(family.norms_around, STEPS) if after is not None]
        made = [(base_layer, name) for name in written]
        made += [(base_layer.self_attn, name) for name in family.width_norms if name is not None]
        for owner, name in made:
            gains = family.norm_form.gains(getattr(owner, name).weight.float())
            getattr(layer, name).weight.fill_(gains.square().mean().sqrt())


def _start_codes(
    model: ScaleForCausalLM, seed: int, embedding_scale: float, generator: torch.Generator
) -> None:
    """Fill E' with random codes of their own size, and set the gains so that u has rms 1 at most after each norm."""
    stream_rms = measured_stream_rms(model.base, seed)
    embedding_rms = _rounded(embedding_scale * stream_rms["norm"])
    if not 0.0 < embedding_rms < math.inf:
        raise BaseModelError(
            f"model.base: rms(x) before its last norm is {stream_rms['norm']:g} on random tokens, but E' starts in "
            "proportion to it; set method.expansion.embedding_scale=null"
        )
    codes = model.expansion.embed_tokens.weight
    codes.copy_(_normal(codes.shape, embedding_rms, generator))
    for name, base_rms in stream_rms.items():
        size, module = (
            min(1.0, _rounded(base_rms) / embedding_rms),
            model.expansion.get_submodule(name),
        )
        assert isinstance(module, ExpansionNorm | ExpansionLinear), "what reads the stream"
        if isinstance(module, ExpansionNorm):
            module.weight.fill_(size)
        else:
            module.weight_22.mul_(size)
    model.config.expansion_embedding_rms = embedding_rms


@torch.no_grad()
def measured_stream_rms(base: PreTrainedModel, seed: int) -> dict[str, float]:
    """Return rms(x) at every norm that reads a plain base's stream, by name; without a norm, at every map that does.

    It is the median over random tokens: it needs no text, and a few extreme positions do not count.
    """
    measured: dict[str, float] = {}
    decoder, family = base.get_decoder(), family_of(base.config)
    readers = {"norm": decoder.norm}
    for index, layer in enumerate(decoder.layers):
        for step in STEPS:
            norm, _ = family.norms_around(step)
            found = (
                {name: linear_of(layer, name) for name in step.reading}
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
    """Return (1, T) random tokens of a base, on its device: a prompt that needs no text."""
    generator = torch.Generator().manual_seed(seed)
    length = min(_NUM_MEASURED, base.config.max_position_embeddings)
    return torch.randint(base.config.vocab_size, (1, length), generator=generator).to(base.device)


def _rounded(size: float) -> float:
    """Round a measured size to two digits, so that rounding on different devices does not change the start."""
    return float(f"{size:.2g}")


def _start_from(
    base_weight: Tensor, shape: torch.Size, start: str, std: float, generator: torch.Generator
) -> Tensor:
    started = _normal(shape, std, generator)
    rows = STARTS[start](base_weight, started)
    started[: len(rows)] = rows
    return started


def _normal(shape: torch.Size, std: float, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).mul_(
        std
    )  # in place: E' is the largest tensor made here


def leading_directions(weight: Tensor, count: int) -> Tensor:
    """Return `count` leading right singular directions of W (out, in), each times its singular value: S_k V_k^T.

    For more than `_OF_BLOCK` directions, W is cut into blocks of rows that give about equally many, so the cost per
    direction stays the same. The computation is in float32, a block at a time, on W's device. No decomposition is
    larger than a block's directions plus `_OVERSAMPLED`; if a block has no more than that, the result is exact. The
    random draw, the signs (the largest entry of each row is positive) and the number of threads are fixed, so on one
    machine W alone determines the bits.

    Source: Halko, Martinsson & Tropp 2011, "Finding structure with randomness"; the blocks are ours
    (docs/results/reference-size.md).
    """
    count = min(count, *weight.shape)
    num_blocks = -(-count // _OF_BLOCK)
    counts = [len(places) for places in torch.arange(count).tensor_split(num_blocks)]
    with _one_thread():
        blocks = zip(weight.tensor_split(num_blocks), counts, strict=True)
        rows = torch.cat(
            [_directions_of_block(block.float(), of_block) for block, of_block in blocks]
        )
    largest = rows.gather(1, rows.abs().argmax(dim=1, keepdim=True))
    return rows * torch.where(largest < 0, -1.0, 1.0)


def _directions_of_block(block: Tensor, count: int) -> Tensor:
    """Return S_k V_k^T of some rows of a matrix, found in a random subspace."""
    drawn = min(count + _OVERSAMPLED, *block.shape)
    is_tall = block.shape[0] > block.shape[1]
    short = block.T if is_tall else block  # fewer rows than columns
    basis = torch.eye(len(short), device=block.device)
    if drawn < len(short):
        basis = torch.randn(len(short), drawn, generator=torch.Generator().manual_seed(0)).to(
            block.device
        )
        for _ in range(_PASSES):
            basis, _ = torch.linalg.qr(short @ (short.T @ basis))
    projected = basis.T @ short
    values, vectors = torch.linalg.eigh(projected @ projected.T)
    leading = vectors[:, -count:].flip(1)
    scales = values[-count:].flip(0).clamp_min(0.0).sqrt()
    return scales[:, None] * (basis @ leading).T if is_tall else leading.T @ projected


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one CPU thread, because the number of threads decides how sums are split and so rounded."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
