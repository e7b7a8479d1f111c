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
from typing import Literal

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


@dataclass(frozen=True)
class Weights:
    """How the weights of a module are held, and whether they train."""

    itemsize: int
    train: bool = False
    in_8_bits: bool = False  # a byte a weight; a float32 scale and a zero point a row


@dataclass
class Step:
    """What the operations of a step on one token add up to."""

    lowered: int | None  # bytes of an element under autocast; None without it
    masked: bool = False  # each attention keeps a mask, as for isolated documents
    num_frozen: int = 0
    frozen_bytes: int = 0
    trained: Counter[Kind] = field(default_factory=Counter)
    linear_flops: float = 0.0
    head_flops: float = 0.0
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

    def product_itemsize(self, itemsize: int) -> int:
        return self.lowered or itemsize

    def linear(
        self,
        x: Value,
        width: int,
        weights: Weights,
        *,
        bias: bool = False,
        held: bool = True,
        kind: Kind = "matrix",
    ) -> Value:
        """Return W x; the parameters are counted unless another map holds them."""
        itemsize = self.product_itemsize(weights.itemsize)
        size = x.width * width
        if held and weights.in_8_bits:
            self.num_frozen += size
            self.frozen_bytes += size + width * (FLOAT32 + 1)
        elif held:
            self.hold(size, weights, kind)
        if held and bias:
            self.hold(width, weights, "gains")
        self.linear_flops += 2.0 * size * (1 + x.needs_grad + weights.train)
        if held and weights.train and kind == "matrix":
            shorter = min(x.width, width)
            self.muon_flops += _MUON_STEPS * 2.0 * shorter * (2 * size + shorter**2)
        if x.needs_grad and (weights.in_8_bits or itemsize != weights.itemsize):
            self.copies_bytes += size * itemsize
        if weights.train:
            self.keep(cast(x, itemsize))
        return Value(width, itemsize, x.needs_grad or weights.train)

    def norm(
        self, x: Value, base: BaseSizes, weights: Weights, *, times: int = 1, held: bool = True
    ) -> Value:
        """Return x^ by transformers' RMSNorm of a family, over each of `times` parts of x."""
        width = x.width // times
        if held:
            self.hold(width, weights, "gains")
        wide = cast(x, FLOAT32)
        if x.needs_grad:
            self.keep(wide, Value(times, FLOAT32, False))
        normed = Value(x.width, FLOAT32, x.needs_grad)
        needs_grad = x.needs_grad or weights.train
        if base.form.gain == "cast, times gain":
            normed = cast(normed, x.itemsize)
            itemsize = max(x.itemsize, weights.itemsize)
        else:
            itemsize = x.itemsize
        if weights.train:
            self.keep(normed)
        if base.form.gain == "times 1 + gain, cast" and x.needs_grad:
            self.copies_bytes += width * FLOAT32
        return Value(x.width, itemsize, needs_grad)

    def rotate(self, q: Value, k: Value, base: BaseSizes, angles: list[Value]) -> list[Value]:
        if q.needs_grad or k.needs_grad:
            self.keep(*angles)
        in_own = base.form.rotates_in_float32
        return [
            Value(
                of.width,
                of.itemsize if in_own else max(of.itemsize, angles[0].itemsize),
                of.needs_grad,
            )
            for of in (q, k)
        ]

    def attend(
        self, q: Value, k: Value, v: Value, base: BaseSizes, *, rotated_together: bool = False
    ) -> Value:
        """Return the heads' sums of values; q and k are rotated already, perhaps as one tensor."""
        num_products = 2 + (q.needs_grad or k.needs_grad)
        num_products += q.needs_grad + k.needs_grad + v.needs_grad
        any_grad = q.needs_grad or k.needs_grad or v.needs_grad
        self.attention_per_key += 2.0 * num_products * q.width
        itemsize = self.product_itemsize(v.itemsize)
        heads = Value(q.width, itemsize, any_grad)
        if any_grad:
            kept = [cast(of, itemsize) for of in (q, k, v)]
            if self.masked or base.head_dim > 256:  # the kernel then takes a key for each query
                if rotated_together and q.itemsize == itemsize and k.width > base.head_dim:
                    self.keep(k)
                kept[1:] = [
                    of
                    if of.width == base.head_dim and of.itemsize == itemsize  # repeated as a view
                    else Value(q.width, itemsize, of.needs_grad)
                    for of in (k, v)
                ]
            self.keep(*kept, heads, Value(q.width // base.head_dim, FLOAT32, False))
            self.bytes_per_pair += self.masked * itemsize
        return heads

    def gate(self, gate: Value, up: Value, *, fused: bool) -> Value:
        """Return act(gate) up."""
        acted = Value(gate.width, gate.itemsize, gate.needs_grad)
        kept = {gate: gate.needs_grad, up: gate.needs_grad, acted: up.needs_grad and not fused}
        self.keep(*(value for value, is_kept in kept.items() if is_kept))
        return Value(gate.width, gate.itemsize, gate.needs_grad or up.needs_grad)

    def cross_entropy(self, streams: list[tuple[Value, int, Weights]]) -> None:
        """Add the loss under sum_k H_k x_k, of streams with their heads' rows and weights."""
        for x, num_rows, weights in streams:
            size = x.width * num_rows
            self.head_flops += 2.0 * size * (1 + x.needs_grad + weights.train)
            if x.needs_grad:
                self.keep(Value(x.width, x.itemsize, False))
            if weights.train:
                self.copies_bytes += size * weights.itemsize

    def flops(self, sequence_length: int) -> float:
        """Return the FLOPs of training on a token of a window: it sees (T + 1) / 2 keys on average."""
        of_attention = self.attention_per_key * (sequence_length + 1) / 2
        return self.linear_flops + self.head_flops + of_attention

    @property
    def num_trainable(self) -> int:
        return sum(self.trained.values())

    @property
    def bytes_per_token(self) -> int:
        """Bytes that autograd keeps of every token."""
        return sum(value.width * value.itemsize for value in self.kept)


def cast(value: Value, itemsize: int) -> Value:
    if value.itemsize == itemsize:
        return value
    return Value(value.width, itemsize, value.needs_grad)


def add(x: Value, y: Value) -> Value:
    return Value(x.width, max(x.itemsize, y.itemsize), x.needs_grad or y.needs_grad)
