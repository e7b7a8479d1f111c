"""The FLOPs that training on one token must cost, by algebra from the sizes of a model.

A linear map y = W x, W (out, in), is one product per pass. Each costs 2 in out FLOPs a token: a multiplication and an
addition for every weight.

| pass                    | product         | needed if                                                             |
|-------------------------|-----------------|-----------------------------------------------------------------------|
| forward                 | W x             | always                                                                |
| gradient of activations | W^T dy          | x needs a gradient: something below that reaches x trains             |
| gradient of weights     | dy x^T          | W trains                                                              |

So every map costs 2 in out (1 + [x needs a gradient] + [W trains]). Over N weights in maps that is 6 N for full
fine-tuning and 4 N for LoRA. A widened map has up to four blocks; its u always needs a gradient, since E' trains:

| block | reads | writes | FLOPs                                          |
|-------|-------|--------|------------------------------------------------|
| W     | x     | x      | 2 D D (1 + [x needs a gradient])               |
| W12   | u     | x      | 2 E D 3, if it exists                          |
| W21   | x     | u      | 2 D E (2 + [x needs a gradient])               |
| W22   | u     | u      | 2 E E 3                                        |

with E = r D: 2 D^2 (1 + 2r + 3r^2) if x needs no gradient, and 2 D^2 (2 + 6r + 3r^2) if it does and W12 exists.
The MLP's gate has neither W12 nor W22: 2 D^2 (1 + 2r) and 2 D^2 (2 + 3r).
Whether x needs one is followed map by map from the bottom: it does above the first thing that trains and writes into x.
The sizes and the trained parameters come from the method's model on the meta device, which is never run.

Attention over S keys costs 2 S A FLOPs for each token, product and head of A channels: forward Q K^T and P V; backward
dP = dO V^T if q or k needs a gradient; dQ, dK and dV = P^T dO if q, k or v does, respectively. It is causal: a token
sees (T + 1) / 2 keys on average.

OSF's part of a map is two maps of its rank, beside W like LoRA's. Its projections count per step, not per token.

Distillation has no product of its own: the base's logits are those of the trained head before H' u is added.

Not counted: look-ups, norms, rotations, activation functions, softmax, the optimiser. Nothing is computed twice.

Source: the blocks are SCALE's (arXiv 2511.03270). Full fine-tuning is the familiar 6 N (Kaplan et al., arXiv
2001.08361), with the head's weights and causal attention included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from scale_cli.config.schema import MethodConfig
from scale_cli.model.family_scale import OWNERS
from scale_cli.training.objective import plain_of, trained_head
from scale_cli.upscale.base import base_without_weights
from scale_cli.upscale.building import build_model


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of training on one token, forward and backward."""

    linear: float  # the decoder's linear maps
    attention: float  # products of queries, keys and values
    head: float  # the vocabulary head
    # attention as counted for fused kernels: over every key, with Q K^T once more in backward
    fused_attention: float

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.head

    @property
    def total_fused(self) -> float:
        return self.linear + self.fused_attention + self.head


def ideal_flops_per_token(
    base_config: Any, method: MethodConfig, sequence_length: int
) -> TokenFlops:
    """Return the FLOPs a method needs per training token: every necessary product, once (module docstring).

    Args:
        base_config: the base's configuration, transformers' class.
        method: the method section of the config.
        sequence_length: T, tokens per window.

    Raises:
        ConfigError: the method asks for layers that the base does not have.
    """
    with torch.device("meta"):
        model: Any = build_model(base_without_weights(base_config, "float32"), method, 0)
    root = model.base if method.definition.widens else plain_of(model)
    decoder, expansion = root.get_decoder(), model.expansion if method.definition.widens else None
    head_dim, num_keys = decoder.layers[0].self_attn.head_dim, (sequence_length + 1) / 2
    query_size = base_config.num_attention_heads * head_dim
    added_query_size = expansion.layers[0].q_proj.weight_21.shape[0] if expansion is not None else 0
    linear, x_grad = _embedding(decoder.embed_tokens)
    attention = fused_attention = 0.0
    for index, layer in enumerate(decoder.layers):
        added = None if expansion is None else expansion.layers[index]

        def product(
            name: str, reads_grad: bool, layer: Any = layer, added: Any = added
        ) -> tuple[float, bool]:
            module = getattr(getattr(layer, OWNERS[name]), name)
            return _product(module, None if added is None else getattr(added, name), reads_grad)

        gains_train = any(
            p.requires_grad for name, p in layer.named_parameters() if name.endswith("norm.weight")
        )
        reads = x_grad or gains_train
        costs, (q_grad, k_grad, v_grad) = zip(
            *(product(f"{name}_proj", reads) for name in "qkv"), strict=True
        )
        num_products = 2 + (q_grad or k_grad) + q_grad + k_grad + v_grad
        attention += 2 * num_keys * (num_products * query_size + 6 * added_query_size)
        num_fused = 7 if q_grad or k_grad or v_grad else 2
        fused_attention += 2 * sequence_length * (num_fused * query_size + 7 * added_query_size)
        o_cost, o_grad = product("o_proj", q_grad or k_grad or v_grad)
        x_grad = x_grad or o_grad
        gate_cost, gate_grad = product("gate_proj", x_grad or gains_train)
        up_cost, up_grad = product("up_proj", x_grad or gains_train)
        down_cost, down_grad = product("down_proj", gate_grad or up_grad)
        x_grad = x_grad or down_grad
        linear += sum(costs) + o_cost + gate_cost + up_cost + down_cost
    reads = x_grad or decoder.norm.weight.requires_grad
    head = _product(trained_head(root), None, reads)[0]
    if expansion is not None:
        head += _linear(*expansion.lm_head.weight.shape, reads_grad=True, trains=True)
    return TokenFlops(linear, attention, head, fused_attention)


def _linear(one: int, other: int, *, reads_grad: bool, trains: bool) -> float:
    return 2.0 * one * other * (1 + reads_grad + trains)


def _product(module: Any, added: Any, reads_grad: bool) -> tuple[float, bool]:
    """Return the FLOPs of a map, and whether its output into x needs a gradient.

    `module` is a plain map, or PEFT's with two trained matrices beside the frozen one; `added` widens it.
    """
    weight = getattr(module, "base_layer", module).weight
    flops = _linear(*weight.shape, reads_grad=reads_grad, trains=weight.requires_grad)
    writes_grad, rank = reads_grad or weight.requires_grad, _rank(module)
    if rank:
        outputs, inputs = weight.shape
        flops += _linear(inputs, rank, reads_grad=reads_grad, trains=True)
        flops += _linear(rank, outputs, reads_grad=True, trains=True)
        writes_grad = True
    if added is not None:
        flops += _linear(*added.weight_21.shape, reads_grad=reads_grad, trains=True)
        if added.weight_22 is not None:
            flops += _linear(*added.weight_22.shape, reads_grad=True, trains=True)
        if added.weight_12 is not None:
            flops += _linear(*added.weight_12.shape, reads_grad=True, trains=True)
            writes_grad = True
    return flops, writes_grad


def _embedding(module: Any) -> tuple[float, bool]:
    """Return the same for the embedding: a look-up, and with an adapter one product from its rank to the stream."""
    rank, trains = _rank(module), any(parameter.requires_grad for parameter in module.parameters())
    flops = (
        _linear(rank, module.base_layer.weight.shape[1], reads_grad=True, trains=True)
        if rank
        else 0.0
    )
    return flops, trains


def _rank(module: Any) -> int:
    """Return the rank of PEFT's matrices beside a module's weight; 0 if there are none."""
    if hasattr(module, "osf_svd_params"):  # the trained part, and its value at the start
        return 2 * int(module.osf_svd_params["default"]["U_low"].shape[1])
    return int(getattr(module, "r", {}).get("default", 0))
