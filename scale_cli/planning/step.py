"""One training step on paper: its parameters, products, and what autograd keeps, operation by operation.

A `Value` stands for a tensor of one position: its width, its bytes an element, and whether it needs a gradient. The
operations below do to values what torch's do to tensors, so a walk over the layers adds up:

| operation          | FLOPs a token                                | kept for the backward pass                       |
|--------------------|----------------------------------------------|--------------------------------------------------|
| y = W x            | 2 in out (1 + [x needs one] + [W trains])    | x if W trains; a lowered W if x needs one        |
| norm               | not counted                                  | x and 1 / rms if x needs one; x^ if gains train  |
| attention          | 2 A a key, for each of up to 6 products      | q, k, v, the result, a log-sum-exp a head        |
| act(gate) up       | not counted                                  | both factors; our fused form: gate and up        |
| cross-entropy      | of the head, as y = W x                      | the gradients of the stream and of a trained H   |

A widened map has up to four blocks. W reads and writes x; W12 reads u and writes x; W21 reads x and writes u; W22 reads
and writes u. With E = r D this is 2 D^2 (1 + 2r + 3r^2) where x needs no gradient, and 2 D^2 (2 + 6r + 3r^2) where it
does and W12 exists. x needs one above the first layer where W12 writes into it.

Attention is causal: a token sees (T + 1) / 2 keys on average. Distillation has no product of its own: the base's logits
are those of the trained head before H' u is added. Look-ups, norms, rotations and the optimiser are not counted.

Shapes: D base channels, E expansion channels, C MLP channels, V vocabulary.
Source: the blocks are SCALE's (arXiv 2511.03270). Full fine-tuning is the familiar 6 N (Kaplan et al., arXiv
2001.08361), with the head's weights and causal attention included.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from scale_cli.planning.sizes import BaseSizes

Kind = Literal["embedding", "head", "gains", "matrix"]
FLOAT32 = 4
_MUON_STEPS = 5  # each is three products: X X^T, its square, and a polynomial of it times X


@dataclass(eq=False)
class Value:
    """A tensor of one position."""

    width: int
    itemsize: int
    needs_grad: bool
    tensor: Any = None  # of all positions, if the step is computed too

    def cast(self, itemsize: int) -> Value:
        if self.itemsize == itemsize:
            return self
        return Value(self.width, itemsize, self.needs_grad, self.tensor)

    def plus(self, other: Value, itemsize: int | None = None) -> Value:
        """Return the sum, in the wider precision unless told."""
        tensor = None if self.tensor is None else self.tensor + other.tensor
        itemsize = itemsize or max(self.itemsize, other.itemsize)
        return Value(self.width, itemsize, self.needs_grad or other.needs_grad, tensor)


@dataclass(frozen=True)
class Weights:
    """How the weights of a module are held, and whether they train."""

    itemsize: int = FLOAT32
    train: bool = False
    in_8_bits: bool = False  # a byte a weight; a float32 scale and a zero point a row


@dataclass
class Step:
    """What the operations of a step on one token add up to."""

    sizes: BaseSizes
    lowered: int | None = None  # bytes of an element under autocast; None without it
    masked: bool = False  # each attention keeps a mask, as for isolated documents
    num_new: int = 0  # tokens that are added to the vocabulary
    num_frozen: int = 0
    frozen_bytes: int = 0
    trained: Counter[Kind] = field(default_factory=Counter)
    product_flops: float = 0.0  # of all maps, the head's included
    muon_flops: float = 0.0  # of an update of all matrices
    attention_per_key: float = 0.0
    kept: dict[Value, None] = field(default_factory=dict)
    copies_bytes: int = 0  # kept whatever the batch: lowered weights, the head's gradient
    bytes_per_pair: int = 0  # of masks
    keeps_logits: bool = False

    def hold(self, size: int, weights: Weights, kind: Kind) -> None:
        """Count the parameters of one tensor."""
        if weights.train:
            self.trained[kind] += size
        else:
            self.num_frozen += size
            self.frozen_bytes += size * weights.itemsize

    def keep(self, *values: Value) -> None:
        self.kept.update(dict.fromkeys(values))

    def embed(self, width: int, itemsize: int, needs_grad: bool) -> Value:
        """Return what is looked up; who trains an embedding, or adapts it, keeps the ids."""
        if needs_grad:
            self.keep(Value(1, 8, False))
        return Value(width, itemsize, needs_grad)

    def linear(
        self,
        x: Value,
        width: int,
        weights: Weights,
        *,
        bias: bool = False,
        kind: Kind | None = "matrix",
    ) -> Value:
        """Return W x; its parameters are counted as of a kind, or held by another map (None)."""
        itemsize = self.lowered or weights.itemsize
        size = x.width * width
        if weights.in_8_bits:
            self.num_frozen += size
            self.frozen_bytes += size + width * (FLOAT32 + 1)
        elif kind is not None:
            self.hold(size, weights, kind)
        if bias:
            self.hold(width, weights, "gains")
        self.product_flops += 2.0 * size * (1 + x.needs_grad + weights.train)
        if weights.train and kind == "matrix":
            shorter = min(x.width, width)
            self.muon_flops += _MUON_STEPS * 2.0 * shorter * (2 * size + shorter**2)
        if x.needs_grad and (weights.in_8_bits or itemsize != weights.itemsize):
            self.copies_bytes += size * itemsize
        if weights.train:
            self.keep(x.cast(itemsize))
        return Value(width, itemsize, x.needs_grad or weights.train)

    def norm(self, x: Value, weights: Weights, *, times: int = 1) -> Value:
        """Return x^ by transformers' RMSNorm of the family, over each of `times` parts of x."""
        is_cast_first = self.sizes.form.gain == "cast, times gain"
        if x.needs_grad:
            self.keep(x.cast(FLOAT32), Value(times, FLOAT32, False))
            if self.sizes.form.gain == "times 1 + gain, cast":
                self.copies_bytes += x.width // times * FLOAT32
        if weights.train:
            self.keep(Value(x.width, x.itemsize if is_cast_first else FLOAT32, x.needs_grad))
        itemsize = max(x.itemsize, weights.itemsize) if is_cast_first else x.itemsize
        return Value(x.width, itemsize, x.needs_grad or weights.train)

    def widened_norm(self, x: Value, u: Value, base_itemsize: int) -> tuple[Value, Value]:
        """Return x^ by the base's norm, and the added gains times u / rms(x)."""
        gain = self.sizes.form.gain
        self.keep(Value(1, FLOAT32, x.needs_grad), Value(u.width, FLOAT32, True))
        if x.needs_grad:
            self.keep(x, u.cast(FLOAT32))
            if gain == "times 1 + gain, cast":
                self.copies_bytes += x.width * FLOAT32
        itemsize = max(x.itemsize, base_itemsize) if gain == "cast, times gain" else x.itemsize
        return (
            Value(x.width, itemsize, x.needs_grad),
            Value(u.width, self.lowered or u.itemsize, True),
        )

    def rotate(self, q: Value, k: Value, angles: Value) -> tuple[Value, Value]:
        if q.needs_grad or k.needs_grad:
            self.keep(angles)
        if self.sizes.form.rotates_in_float32:
            return q, k
        return q.cast(max(q.itemsize, angles.itemsize)), k.cast(max(k.itemsize, angles.itemsize))

    def attend(self, q: Value, k: Value, v: Value, *, rotated_together: bool = False) -> Value:
        """Return the heads' sums of values; q and k are rotated already, perhaps as one tensor."""
        any_grad = q.needs_grad or k.needs_grad or v.needs_grad
        num_products = 2 + (q.needs_grad or k.needs_grad)
        num_products += q.needs_grad + k.needs_grad + v.needs_grad
        self.attention_per_key += 2.0 * num_products * q.width
        head_dim = self.sizes.head_dim
        itemsize = self.lowered or v.itemsize
        heads = Value(q.width, itemsize, any_grad)
        if not any_grad:
            return heads
        kept = [of.cast(itemsize) for of in (q, k, v)]
        if self.masked or head_dim > 256:  # the kernel then takes a key for each query
            if rotated_together and q.itemsize == itemsize and k.width > head_dim:
                self.keep(k)
            kept[1:] = [
                of
                if of.width == head_dim and of.itemsize == itemsize  # repeated as a view
                else Value(q.width, itemsize, of.needs_grad)
                for of in (k, v)
            ]
        self.keep(*kept, heads, Value(q.width // head_dim, FLOAT32, False))
        self.bytes_per_pair += self.masked * itemsize
        return heads

    def gate(self, gate: Value, up: Value, *, fused: bool) -> Value:
        """Return act(gate) up."""
        if gate.needs_grad:
            self.keep(gate, up)
        if up.needs_grad and not fused:
            self.keep(Value(gate.width, gate.itemsize, gate.needs_grad))
        return Value(gate.width, gate.itemsize, gate.needs_grad or up.needs_grad)

    def cross_entropy(self, streams: list[tuple[Value, int, Weights]]) -> None:
        """Add the loss under sum_k H_k x_k, of streams with their heads' rows and weights."""
        for x, num_rows, weights in streams:
            size = x.width * num_rows
            self.product_flops += 2.0 * size * (1 + x.needs_grad + weights.train)
            if x.needs_grad:
                self.keep(Value(x.width, x.itemsize, False))
            if weights.train:
                self.copies_bytes += size * weights.itemsize

    def flops(self, sequence_length: int) -> float:
        """Return the FLOPs of training on a token of a window: it sees (T + 1) / 2 keys on average."""
        return self.product_flops + self.attention_per_key * (sequence_length + 1) / 2

    @property
    def num_trainable(self) -> int:
        return sum(self.trained.values())

    @property
    def bytes_per_token(self) -> int:
        """Bytes that autograd keeps of every token."""
        return sum(value.width * value.itemsize for value in self.kept)
