"""The initial values of every added block: `STARTS` lists the ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from scale_cli.errors import RunFolderError
from scale_cli.methods.starts.codes import Codes
from scale_cli.methods.starts.difference_stream import DifferenceStream
from scale_cli.methods.starts.start import Start, TextToLearn
from scale_cli.model.configuration_scale import ScaleConfig
from scale_cli.model.expansion_scale import ExpansionNorm
from scale_cli.model.modeling_scale import ScaleForCausalLM

# The first that suits a base and its text is taken.
_ALL: tuple[Start, ...] = (DifferenceStream(), Codes())
STARTS = {start.name: start for start in _ALL}


@torch.no_grad()
def initialise_expansion(
    model: ScaleForCausalLM, seed: int, text: TextToLearn | None = None
) -> None:
    """Fill every added block; the base is only read.

    The added heads and MLP channels are copies of the base's: those with the largest weights. They
    read x as the originals do. What u is depends on whether the base knows the text (`knows`).

    If it does, u is a difference stream, u = P dx, where dx is what training changes in x. The rows
    of P are orthonormal directions in which the vocabulary head tells the text's tokens apart best.
    The copies read x + P^T u, but for the gate's, which read x. What they write is P times what they
    compute, less what the originals compute: 0 at the start. H' reads u as H reads P^T u. So from the
    first step on, the gradient is that of full fine-tuning, within P and the copied parts, but for
    what passes a gate.

    If it does not, x says little, and u begins as codes: random rows of E', as large as x becomes.
    They tell every layer which token stands where, and E' learns fast.

    | block          | reads -> writes | difference stream   | codes                                |
    |----------------|-----------------|---------------------|--------------------------------------|
    | E'             | token -> u      | 0                   | N(0, e^2), e = 1.4 rms(x) at the end |
    | W21 of q to up | x -> heads, MLP | W                   | W                                    |
    | W22 of q,k,v,up| u -> heads, MLP | W diag(g) P^T / g'  | 0                                    |
    | W21 of o, down | x -> u          | -P W                | 0                                    |
    | W22 of o, down | heads, MLP -> u | P W                 | 0                                    |
    | W12            | u -> x          | 0                   | 0                                    |
    | H'             | u -> logits     | H diag(g) P^T / g'  | 0                                    |
    | g'             | of norm k       | norms of P diag(g)  | min(1, rms(x) before norm k / e)     |

    W are the copied rows or columns; biases of rows are copied too. g are the gains of the base's
    norm before W or H. Were they folded into W22 whole, it would learn too fast by 1 / g', and u
    would grow without bound. A norm over a layer's output folds its gains g likewise: P W above
    stands for P diag(g) W / g'. So each row of P has a gain of its own: an update of W21 or W22
    moves u as far as one of that size of W moves P x. With codes g' is rms(g) there. Norms over all
    queries or keys have the copied heads' gains.

    Numbers are drawn on the CPU in float32, and each product is computed there in float64 by one
    thread, so the start does not depend on device, dtype or number of threads. The model's
    configuration keeps the start's name, and e where there are codes.

    Args:
        model: the widened model, with its new tokens' rows filled.
        seed: of the random numbers.
        text: the text to be learned; None: the base knows it, and all tokens count alike.

    Source: ours (docs/results/real-base.md). H' u = 0 and W12 = 0 keep the function, as in SCALE,
    arXiv 2511.03270.
    """
    config: Any = model.config
    for name, parameter in model.expansion.named_parameters():
        if not name.startswith("new_tokens."):
            parameter.zero_()
    for norm in model.expansion.modules():
        if isinstance(norm, ExpansionNorm):
            norm.weight.fill_(1.0)

    start = next(start for start in STARTS.values() if start.suits(model.base, text))
    config.start = {"name": start.name, **start.fill(model, seed, text)}


def start_of(config: ScaleConfig) -> Start:
    """Return how a widened model began.

    RunFolderError: its config names no start of `STARTS`, as those of earlier versions do not.
    """
    name = config.start.get("name")
    if name not in STARTS:
        raise RunFolderError(
            f"the model's config.json: start: {name} is none of {', '.join(STARTS)}; run `scale upscale` again"
        )
    return STARTS[name]


def start_rates(config: ScaleConfig, optimiser: str) -> Mapping[str, float]:
    """Return a widened model's learning rates by kind of tensor, relative to `train.lr`."""
    return start_of(config).rates(config.start, optimiser)
