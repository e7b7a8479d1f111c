"""The initial values of every added block."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from scale_cli.errors import BaseModelError
from scale_cli.model.expansion_scale import ExpansionNorm
from scale_cli.model.family_scale import STEPS, family_of, linear_of
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.terminal import progress_bar

# The rms of the codes, relative to the base's stream before its last norm.
_CODES = 1.4
# Random tokens on which the size of the base's stream is measured.
_NUM_MEASURED = 256
# Most tokens whose rows of the head decide the directions: the most frequent ones.
_NUM_TOKENS = 4096
# Share of the MLP channels that are too large to copy.
_SHARE_OF_HUGE = 0.05
# Of the randomised SVD: extra dimensions of the random subspace, power iterations.
_OVERSAMPLED = 16
_PASSES = 4
# Layers, or pieces of the head, that are started at once: each holds its largest maps in float64.
_THREADS = 4
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class TextToLearn:
    """What the start asks of the text to be learned."""

    token_shares: Tensor  # (V,) of the new tokens too, float64
    sample_ids: Tensor  # (1, T), how it begins


@torch.no_grad()
def initialise_expansion(
    model: ScaleForCausalLM, seed: int, text: TextToLearn | None = None
) -> None:
    """Fill every added block; the base is only read.

    The added heads and MLP channels are copies of the base's: those with the largest weights. They
    read x as the originals do. What u is depends on whether the base knows the text (`knows`).

    If it does, u is a difference stream, u = P dx, where dx is what training changes in x. The rows
    of P are orthonormal directions in which the vocabulary head tells the text's tokens apart best.
    The copies read x + P^T u. What they write is P times what they compute, less what the originals
    compute: 0 at the start. H' reads u as H reads P^T u. So from the first step on, the gradient is
    that of full fine-tuning, within P and the copied parts.

    If it does not, x says little, and u begins as codes: random rows of E', as large as x becomes.
    They tell every layer which token stands where, and E' learns fast.

    | block          | reads -> writes | difference stream   | codes                                |
    |----------------|-----------------|---------------------|--------------------------------------|
    | E'             | token -> u      | 0                   | N(0, e^2), e = 1.4 rms(x) at the end |
    | W21 of q to up | x -> heads, MLP | W                   | W                                    |
    | W22 of q to up | u -> heads, MLP | W diag(g / g') P^T  | 0                                    |
    | W21 of o, down | x -> u          | -P W                | 0                                    |
    | W22 of o, down | heads, MLP -> u | P W                 | 0                                    |
    | W12            | u -> x          | 0                   | 0                                    |
    | H'             | u -> logits     | H diag(g / g') P^T  | 0                                    |
    | g'             | of norm k       | rms(g)              | min(1, rms(x) before norm k / e)     |

    W are the copied rows or columns; biases of rows are copied too. g are the gains of the base's
    norm before W or H; were they folded into W22 whole, it would learn too fast by 1 / rms(g), and
    u would grow without bound. A norm over a layer's output folds its gains g into W likewise: g'
    is the rms of g, and W above stands for diag(g / g') W. Norms over all queries or keys have the
    copied heads' gains.

    Numbers are drawn on the CPU in float32, and each product is computed there in float64 by one
    thread, so the start does not depend on device, dtype or number of threads. The model's
    configuration stores e; None: there are no codes.

    Args:
        model: the widened model, with its new tokens' rows filled.
        seed: of the random numbers.
        text: the text to be learned; None: the base knows it, and all tokens count alike.

    Source: ours (docs/results/real-base.md). H' u = 0 and W12 = 0 keep the function, as in SCALE,
    arXiv 2511.03270.
    """
    base, expansion = model.base, model.expansion
    config: Any = model.config
    for name, parameter in expansion.named_parameters():
        if not name.startswith("new_tokens."):
            parameter.zero_()
    for norm in expansion.modules():
        if isinstance(norm, ExpansionNorm):
            norm.weight.fill_(1.0)

    config.expansion_embedding_rms = None
    directions = None
    is_known = text is None or knows(base, text)
    with _one_thread():
        if is_known:
            directions = _start_head(model, text)
        start_layer = partial(_start_layer, base.config, directions)
        with ThreadPoolExecutor(_THREADS) as threads:
            started = threads.map(start_layer, base.model.layers, expansion.layers)
            for _ in progress_bar(
                iterable=started,
                total=len(expansion.layers),
                desc="filling the added blocks",
                unit=" layers",
                delay=1.0,  # most bases take less
                leave=False,
            ):
                pass
    if directions is None:
        _start_codes(model, seed)


def knows(base: Any, text: TextToLearn) -> bool:
    """Return whether a base predicts a text better than the frequencies of its tokens do.

    Text with new tokens counts as unknown: the base has no row for them.
    """
    if text.sample_ids.max() >= base.config.vocab_size:
        return False
    ids = text.sample_ids.to(base.device)
    logits = base(ids, use_cache=False).logits[0, :-1].float()
    of_base = torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item()
    return of_base < torch.special.entr(text.token_shares).sum().item()


def _start_codes(model: ScaleForCausalLM, seed: int) -> None:
    """Fill E' with random codes, and set the gains so that u has rms 1 at most after each norm."""
    expansion, stream_rms = model.expansion, measured_stream_rms(model.base, seed)
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
    config: Any = model.config
    config.expansion_embedding_rms = embedding_rms


def _start_head(model: ScaleForCausalLM, text: TextToLearn | None) -> Tensor:
    """Fill H' and the gains of its norm; return P, (count, D)."""
    base, expansion = model.base, model.expansion
    config: Any = model.config
    head_VD = base.lm_head.weight.detach().cpu()
    if expansion.new_tokens is not None:
        head_VD = torch.cat([head_VD, expansion.new_tokens.lm_head.weight.detach().cpu()])
    gains = _gains(base.config, base.model, "norm")
    size = _rms(gains)
    count = min(base.config.hidden_size, config.expansion_hidden_size)
    directions = _head_directions(head_VD, gains, text, count)

    @torch.no_grad()  # a setting of each thread
    def write(first: int) -> None:
        rows = slice(first, first + _ROWS_AT_ONCE)
        expansion.lm_head.weight[rows, :count].copy_(
            (head_VD[rows].double() * gains) @ directions.T / size
        )

    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(write, range(0, len(head_VD), _ROWS_AT_ONCE)))
    expansion.norm.weight.fill_(size)
    return directions


def _rms(gains: Tensor) -> float:
    return gains.square().mean().sqrt().item()


def _gains(config: Any, owner: Any, norm: str | None) -> Tensor:
    """Return the gains of a module's norm, in float64 on the CPU; without a norm, one 1."""
    if norm is None:
        return torch.ones(1, dtype=torch.float64)
    weight = getattr(owner, norm).weight.detach()
    return family_of(config).norm_form.gains(weight).double().cpu()


def _head_directions(
    head_VD: Tensor, gains: Tensor, text: TextToLearn | None, count: int
) -> Tensor:
    """Return (count, D) orthonormal directions in which the rows of H diag(g) differ most, weighted
    by frequency.

    The mean row does not count: what all logits share, no probability shows.
    """
    shares = torch.ones(len(head_VD)) if text is None else text.token_shares
    most = min(_NUM_TOKENS, len(head_VD))
    shares, chosen = shares.double().sort(descending=True, stable=True)
    shares, rows = shares[:most], head_VD[chosen[:most]].double() * gains
    shares = (shares / shares.sum())[:, None]
    return leading_directions((rows - (shares * rows).sum(dim=0)) * shares.sqrt(), count)


@torch.no_grad()  # a setting of each thread
def _start_layer(config: Any, directions: Tensor | None, base_layer: Any, layer: Any) -> None:
    """Fill one layer's maps, and the gains of what it writes; without directions, nothing of u."""
    family, attention = family_of(config), base_layer.self_attn
    queries, keys = _copied_heads(base_layer, len(layer.k_proj.weight_22))
    channels = _copied_channels(base_layer, len(layer.gate_proj.weight_22))
    copied = {"q_proj": queries, "o_proj": queries, "k_proj": keys, "v_proj": keys}

    for step in STEPS:
        before, after = family.norms_around(step)
        gains = _gains(config, base_layer, before)
        size = _rms(gains)
        if before is not None and directions is not None:
            getattr(layer, before).weight.fill_(size)
        for name in step.reading:
            places, added = copied.get(name, channels), getattr(layer, name)
            rows = _numbers(base_layer, name)[places]
            added.weight_21.copy_(rows)
            if added.bias_2 is not None:
                added.bias_2.copy_(linear_of(base_layer, name).bias.cpu()[places])
            if directions is not None:
                added.weight_22[:, : len(directions)].copy_((rows * gains / size) @ directions.T)

        gains = _gains(config, base_layer, after)
        size = _rms(gains)
        if after is not None:
            getattr(layer, after).weight.fill_(size)
        if directions is not None:
            places, added = copied.get(step.writing, channels), getattr(layer, step.writing)
            columns = _numbers(base_layer, step.writing)[:, places]
            written = (directions * gains / size) @ columns
            added.weight_22[: len(directions)].copy_(written)
            subtracted = torch.zeros(len(directions), added.weight_21.shape[1]).double()
            subtracted.index_add_(1, places, -written)
            added.weight_21[: len(directions)].copy_(subtracted)

    for width_norm, places in zip(family.width_norms, (queries, keys), strict=True):
        if width_norm is not None:
            gains = _gains(config, attention, width_norm)
            getattr(layer, width_norm).weight.copy_(gains[places])


def _numbers(base_layer: Any, name: str) -> Tensor:
    """Return a map's W in float64 on the CPU; of a quantised one, the numbers that it stands for."""
    return linear_of(base_layer, name).weight.detach().dequantize().double().cpu()


def _copied_heads(base_layer: Any, num_added: int) -> tuple[Tensor, Tensor]:
    """Return the channels of the copied query heads and of the copied key/value heads.

    A key/value head is copied with the query heads that share it: first those whose maps v and o
    are largest. `num_added` counts channels of keys.
    """
    head_dim = base_layer.self_attn.head_dim
    values = _numbers(base_layer, "v_proj").unflatten(0, (-1, head_dim))
    outputs = _numbers(base_layer, "o_proj").unflatten(1, (len(values), -1))
    sizes = values.square().sum(dim=(1, 2)) * outputs.square().sum(dim=(0, 2))
    heads = _largest(sizes, num_added // head_dim)[:, None]
    of_one = outputs.shape[2]  # channels of the queries that share a head
    return (
        (heads * of_one + torch.arange(of_one)).flatten(),
        (heads * head_dim + torch.arange(head_dim)).flatten(),
    )


def _copied_channels(base_layer: Any, count: int) -> Tensor:
    """Return the MLP channels to copy: those whose gate, up and down are largest, but for the very
    largest.

    Those make the huge values of a first token's stream. Copies of them would feed a change of that
    token's stream back to itself, layer after layer.
    """
    gate, up, down = (_numbers(base_layer, name) for name in ("gate_proj", "up_proj", "down_proj"))
    sizes = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    left_out = min(round(_SHARE_OF_HUGE * len(sizes)), max(0, len(sizes) - count))
    return _largest(sizes, count + left_out, left_out)


def _largest(sizes: Tensor, count: int, left_out: int = 0) -> Tensor:
    """Return the places of the largest sizes up to `count`; if there are fewer, all again and
    again.
    """
    order = sizes.argsort(descending=True, stable=True)
    return order.repeat(-(-count // len(order)))[left_out:count].sort().values


@torch.no_grad()
def measured_stream_rms(base: PreTrainedModel, seed: int) -> dict[str, float]:
    """Return rms(x) at every norm that reads a plain base's stream, by name; without a norm, at
    every map that does.

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
    """Round a measured size to two digits, so that rounding on different devices does not change
    the start.
    """
    return float(f"{size:.2g}")


def leading_directions(weight: Tensor, count: int) -> Tensor:
    """Return `count` leading right singular directions of a float64 matrix (rows, D): orthonormal
    rows, largest first.

    They are found in a random subspace, whose draw is fixed; the largest entry of each is positive.

    Source: Halko, Martinsson & Tropp 2011, "Finding structure with randomness".
    """
    num_drawn = min(count + _OVERSAMPLED, weight.shape[1])
    drawn = torch.randn(
        weight.shape[1],
        num_drawn,
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float64,
    )
    basis, _ = torch.linalg.qr(drawn)
    for _ in range(_PASSES if num_drawn < weight.shape[1] else 0):
        basis, _ = torch.linalg.qr(weight.T @ (weight @ basis))
    projected = weight @ basis
    _, vectors = torch.linalg.eigh(projected.T @ projected)
    found = (basis @ vectors[:, -count:].flip(1)).T
    largest = found.gather(1, found.abs().argmax(dim=1, keepdim=True))
    return found * torch.where(largest < 0, -1.0, 1.0)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one CPU thread, because the number of threads decides how sums are split and so
    rounded.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
