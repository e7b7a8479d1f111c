"""What training on one token must cost in floating-point operations, by algebra from the sizes of a model.

A linear map y = W x, W (out, in), is one product per pass, each 2 in out FLOPs a token (a multiplication and an
addition for every weight):

| pass                    | product         | is needed where                                                       |
|-------------------------|-----------------|-----------------------------------------------------------------------|
| forward                 | W x             | always                                                                |
| gradient of activations | W^T dy          | x needs a gradient: something below that reaches x trains             |
| gradient of weights     | dy x^T          | W trains                                                              |

So every map costs 2 in out (1 + [x needs a gradient] + [W trains]). Over N weights in maps that is 6 N for full
fine-tuning and 4 N for LoRA. A widened map has up to four blocks; its u always needs a gradient, for E' trains:

| block | reads | writes | FLOPs                                          |
|-------|-------|--------|------------------------------------------------|
| W     | x     | x      | 2 D D (1 + [x needs a gradient])               |
| W12   | u     | x      | 2 E D 3, where it exists                       |
| W21   | x     | u      | 2 D E (2 + [x needs a gradient])               |
| W22   | u     | u      | 2 E E 3                                        |

with E = r D: 2 D^2 (1 + 2r + 3r^2) where x needs no gradient and 2 D^2 (2 + 6r + 3r^2) where it does and W12 exists.
Whether x needs one is followed map by map, bottom up: it does above the first thing that trains and writes into x.

Attention over S keys costs 2 S A FLOPs a token and head of A channels for each product: forward Q K^T and P V;
backward dP = dO V^T where q or k needs a gradient, dQ, dK and dV = P^T dO where q, k and v do. It is causal: a token
sees (T + 1) / 2 keys on average.

OSF's part of a map is two maps of its rank, beside W as LoRA's are. Its projections are a step's, not a token's.

Distillation has no product of its own: the base's logits are those of the trained head before H' u is added.

Not counted: look-ups, norms, rotations, activation functions, softmax, the optimiser. Nothing is computed twice.

Source: the blocks are SCALE's (arXiv 2511.03270). For full fine-tuning it is the familiar 6 N (Kaplan et al., arXiv
2001.08361), the head's weights included, and causal attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from scale_cli.config.schema import MethodConfig
from scale_cli.methods.method import Trains
from scale_cli.methods.widened import plan_expansion
from scale_cli.model.configuration_scale import ScaleConfig

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of training on one token, forward and backward."""

    linear: float  # the decoder's linear maps
    attention: float  # products of queries, keys and values
    head: float  # the vocabulary head
    # attention as kernels that fuse it are counted: over every key, and Q K^T once more in backward
    fused_attention: float

    @property
    def total(self) -> float:
        """All of them, each once."""
        return self.linear + self.attention + self.head

    @property
    def total_fused(self) -> float:
        """All of them, attention as kernels that fuse it are counted."""
        return self.linear + self.fused_attention + self.head


def ideal_flops_per_token(base_config: Any, method: MethodConfig, sequence_length: int) -> TokenFlops:
    """Return what a method must compute per training token: every product that is needed, once (module docstring).

    Args:
        base_config: the base's configuration, transformers' class.
        method: the method section of the config.
        sequence_length: T, tokens a window.

    Raises:
        ConfigError: the method asks for layers that the base does not have.
    """
    maps: _Maps = (
        _WidenedMaps.of(base_config, method) if method.definition.widens else _PlainMaps.of(base_config, method)
    )
    num_keys = (sequence_length + 1) / 2
    query_size = maps.base["q_proj"][1]
    linear, x_grad = maps.embedding()
    attention = fused_attention = 0.0
    for layer, trains in enumerate(maps.layers_train):
        of_gains = trains or maps.gains_train
        reads = x_grad or of_gains
        costs, (q_grad, k_grad, v_grad) = zip(
            *(maps.linear(layer, name, reads) for name in _ATTENTION[:3]), strict=True
        )
        num_products = 2 + (q_grad or k_grad) + q_grad + k_grad + v_grad
        attention += 2 * num_keys * (num_products * query_size + 6 * maps.added_query_size)
        num_fused = 7 if q_grad or k_grad or v_grad else 2
        fused_attention += 2 * sequence_length * (num_fused * query_size + 7 * maps.added_query_size)
        o_cost, o_grad = maps.linear(layer, "o_proj", q_grad or k_grad or v_grad)
        x_grad = x_grad or o_grad
        reads = x_grad or of_gains
        gate_cost, gate_grad = maps.linear(layer, "gate_proj", reads)
        up_cost, up_grad = maps.linear(layer, "up_proj", reads)
        down_cost, down_grad = maps.linear(layer, "down_proj", gate_grad or up_grad)
        x_grad = x_grad or down_grad
        linear += sum(costs) + o_cost + gate_cost + up_cost + down_cost
    return TokenFlops(linear, attention, maps.head(x_grad), fused_attention)


def _linear(inputs: int, outputs: int, *, reads_grad: bool, trains: bool) -> float:
    return 2.0 * inputs * outputs * (1 + reads_grad + trains)


class _Maps(Protocol):
    """The linear maps of a model in training; each tells its FLOPs and whether what it writes needs a gradient."""

    @property
    def base(self) -> dict[str, tuple[int, int]]: ...

    @property
    def added_query_size(self) -> int: ...

    @property
    def layers_train(self) -> Sequence[bool]: ...

    @property
    def gains_train(self) -> bool: ...

    def embedding(self) -> tuple[float, bool]: ...

    def linear(self, layer: int, name: str, reads_grad: bool) -> tuple[float, bool]: ...

    def head(self, reads_grad: bool) -> float: ...


def _sizes(
    hidden_size: int, intermediate_size: int, query_size: int, key_value_size: int
) -> dict[str, tuple[int, int]]:
    """Return (in, out) of every linear map of a decoder layer."""
    return {
        "q_proj": (hidden_size, query_size),
        "k_proj": (hidden_size, key_value_size),
        "v_proj": (hidden_size, key_value_size),
        "o_proj": (query_size, hidden_size),
        "gate_proj": (hidden_size, intermediate_size),
        "up_proj": (hidden_size, intermediate_size),
        "down_proj": (intermediate_size, hidden_size),
    }


def _base_sizes(config: Any) -> dict[str, tuple[int, int]]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    return _sizes(config.hidden_size, config.intermediate_size, *heads)


@dataclass(frozen=True)
class _WidenedMaps:
    """A frozen decoder and its expansion."""

    config: ScaleConfig
    base: dict[str, tuple[int, int]]
    added: dict[str, tuple[int, int]]
    layers_train: list[bool]
    added_query_size: int
    gains_train: bool = False

    @classmethod
    def of(cls, base_config: Any, method: MethodConfig) -> _WidenedMaps:
        config = plan_expansion(base_config, method)
        base = _base_sizes(base_config)
        head_dim = base["q_proj"][1] // base_config.num_attention_heads
        query_size = config.expansion_num_attention_heads * head_dim
        key_value_size = config.expansion_num_key_value_heads * head_dim
        added = _sizes(config.expansion_hidden_size, config.expansion_intermediate_size, query_size, key_value_size)
        return cls(config, base, added, [False] * base_config.num_hidden_layers, query_size)

    def embedding(self) -> tuple[float, bool]:
        return 0.0, False

    def linear(self, layer: int, name: str, reads_grad: bool) -> tuple[float, bool]:
        (inputs, outputs), (more_inputs, more_outputs) = self.base[name], self.added[name]
        in_attention = name in _ATTENTION
        config = self.config
        collaborating = config.attention_collaboration_layers if in_attention else config.mlp_collaboration_layers
        flops = _linear(inputs, outputs, reads_grad=reads_grad, trains=False)
        flops += _linear(inputs, more_outputs, reads_grad=reads_grad, trains=True)
        flops += _linear(more_inputs, more_outputs, reads_grad=True, trains=True)
        if layer in collaborating:
            flops += _linear(more_inputs, outputs, reads_grad=True, trains=True)
        return flops, reads_grad or layer in collaborating

    def head(self, reads_grad: bool) -> float:
        vocab_size, hidden_size = self.config.vocab_size, self.base["q_proj"][0]
        frozen = _linear(hidden_size, vocab_size, reads_grad=reads_grad, trains=False)
        return frozen + _linear(self.config.expansion_hidden_size, vocab_size, reads_grad=True, trains=True)


@dataclass(frozen=True)
class _PlainMaps:
    """A decoder that nothing widens: whole layers train, or low-rank adapters beside frozen maps do."""

    config: Any
    base: dict[str, tuple[int, int]]
    trains: Trains
    added_query_size: int = 0

    @property
    def layers_train(self) -> Sequence[bool]:
        return self.trains.layers

    @property
    def gains_train(self) -> bool:
        return self.trains.gains

    @classmethod
    def of(cls, config: Any, method: MethodConfig) -> _PlainMaps:
        return cls(config, _base_sizes(config), method.definition.trains(config, method.settings))

    def embedding(self) -> tuple[float, bool]:
        """A look-up; an adapter on it is a look-up and one product, from its rank to the stream."""
        if self._is_target("model.embed_tokens"):
            rank = self.trains.rank(self.config.hidden_size)
            return _linear(rank, self.config.hidden_size, reads_grad=True, trains=True), True
        return 0.0, self.trains.embedding

    def linear(self, layer: int, name: str, reads_grad: bool) -> tuple[float, bool]:
        module = "self_attn" if name in _ATTENTION else "mlp"
        path = f"model.layers.{layer}.{module}.{name}"
        return self._adapted(path, self.base[name], reads_grad, self.layers_train[layer])

    def head(self, reads_grad: bool) -> float:
        sizes = self.config.hidden_size, self.config.vocab_size
        return self._adapted("lm_head", sizes, reads_grad or self.trains.final_norm, self.trains.head)[0]

    def _adapted(self, path: str, sizes: tuple[int, int], reads_grad: bool, trains: bool) -> tuple[float, bool]:
        flops = _linear(*sizes, reads_grad=reads_grad, trains=trains)
        if not self._is_target(path):
            return flops, reads_grad or trains
        inputs, outputs = sizes
        rank = self.trains.rank(min(sizes))
        flops += _linear(inputs, rank, reads_grad=reads_grad, trains=True)
        return flops + _linear(rank, outputs, reads_grad=True, trains=True), True

    def _is_target(self, path: str) -> bool:
        """PEFT's own rule for a list of names."""
        return any(path == target or path.endswith(f".{target}") for target in self.trains.targets)
