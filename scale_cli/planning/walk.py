"""Walks over the layers of what each method trains; `step.py` says what every operation adds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from scale_cli.config.schema import MethodConfig
from scale_cli.errors import ConfigError
from scale_cli.methods import METHODS
from scale_cli.methods.method import PROJECTIONS
from scale_cli.methods.widened import added_sizes, collaborating_layers
from scale_cli.planning.sizes import BaseSizes, map_widths
from scale_cli.planning.step import FLOAT32, Kind, Step, Value, Weights, add, cast

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
PLANNED = tuple(name for name, method in METHODS.items() if method.is_planned)
_MLP = PROJECTIONS[4:]
Stream = TypeVar("Stream")  # a value, or the base's value and the expansion's


@dataclass(frozen=True)
class Base:
    """A base as it is held in memory."""

    sizes: BaseSizes
    itemsize: int
    in_8_bits: bool = False


def walk(
    base: Base,
    method: MethodConfig,
    mixed_precision: str = "no",
    *,
    num_new: int = 0,
    masked: bool = False,
) -> Step:
    """Return what one training step of a method costs a token.

    Args:
        base: the sizes of the base, and how it is held.
        method: the method section of a config.
        mixed_precision: no, bf16 or fp16.
        num_new: tokens that are added to the base's vocabulary.
        masked: whether attention takes a mask, as sdpa does for isolated documents.

    Raises:
        ConfigError: the method has no closed form, or asks for what the base does not have.
    """
    if not method.definition.is_planned:
        raise ConfigError(
            f"method.variant: {method.variant} has no plan; planned are {', '.join(PLANNED)}"
        )
    if base.in_8_bits and (method.trains_base_weights or not method.definition.adapter):
        raise ConfigError(
            f"method.variant: {method.variant} trains weights of the base, or copies of them, but "
            "model.quantisation makes them read-only"
        )
    if method.trains_base_weights:
        base = replace(base, itemsize=FLOAT32)
    step = Step(2 if mixed_precision in ("bf16", "fp16") else None, masked)
    if method.definition.widens:
        _Widened(step, base, method, num_new).walk()
    else:
        _Plain(step, base, method, num_new).walk()
    return step


class _Decoder(ABC, Generic[Stream]):
    """The walk over a layer. Plain and widened decoders have their own steps."""

    def __init__(self, step: Step, base: Base, num_new: int) -> None:
        self.step = step
        self.base = base
        self.sizes = base.sizes
        self.num_new = num_new
        self.angles: dict[str, list[Value]] = {}

    def layer(self, stream: Stream, layer: int) -> Stream:
        """Return the stream after a layer, which may be a copy of `layer` of the base."""
        form = self.sizes.form
        read = self.lowered(stream) if form.normed == "after" else self.normed(stream)
        q, k, v = (self.product(name, read) for name in PROJECTIONS[:3])
        if form.width_norms:
            q, k = self.normed(q), self.normed(k)
        written = self.product("o_proj", self.attended(q, k, v, self.angles_of(layer)))
        stream = self.sum(stream, written if form.normed == "before" else self.normed(written))

        read = self.lowered(stream) if form.normed == "after" else self.normed(stream)
        gate, up = (self.product(name, read) for name in _MLP[:2])
        written = self.product("down_proj", self.gated(gate, up))
        return self.sum(stream, written if form.normed == "before" else self.normed(written))

    def angles_of(self, layer: int) -> list[Value]:
        """Return the cosines and sines of a layer's rotation."""
        form, kinds = self.sizes.form, self.sizes.layer_types
        kind = kinds[layer] if form.angles_by_kind and layer < len(kinds) else ""
        itemsize = FLOAT32 if form.rotates_in_float32 else self.base.itemsize
        of_kind = [Value(self.sizes.head_dim, itemsize, False) for _ in range(2)]
        return self.angles.setdefault(kind, of_kind)

    @abstractmethod
    def lowered(self, stream: Stream) -> Stream:
        """Return a stream as maps read it without a norm."""

    @abstractmethod
    def normed(self, stream: Stream) -> Stream: ...

    @abstractmethod
    def product(self, name: str, read: Stream) -> Stream: ...

    @abstractmethod
    def attended(self, q: Stream, k: Stream, v: Stream, angles: list[Value]) -> Stream: ...

    @abstractmethod
    def gated(self, gate: Stream, up: Stream) -> Stream: ...

    @abstractmethod
    def sum(self, stream: Stream, written: Stream) -> Stream: ...


class _Plain(_Decoder[Value]):
    """A plain model, as transformers computes it, with PEFT's adapters for LoRA."""

    def __init__(self, step: Step, base: Base, method: MethodConfig, num_new: int) -> None:
        super().__init__(step, base, num_new)
        num_layers = base.sizes.num_hidden_layers
        self.training = method.definition.plain_training(method.settings, num_layers)
        self.place = 0  # of the layer in the model
        self.weights = Weights(base.itemsize)  # of that layer
        maps = [path_of(layer, name) for layer in range(num_layers) for name in PROJECTIONS]
        paths = ("embed_tokens", "lm_head", *maps)
        if self.training.rank and not any(map(self.has_adapter, paths)):
            raise ConfigError(
                f"method.lora.targets: the base has none of {', '.join(self.training.targets)}"
            )

    def has_adapter(self, path: str) -> bool:
        targets = self.training.targets if self.training.rank else ()
        return any(f".{path}".endswith(f".{target}") for target in targets)

    def walk(self) -> None:
        sizes, step, training = self.sizes, self.step, self.training
        itemsize = self.base.itemsize
        num_rows = sizes.vocab_size + self.num_new
        is_tied = sizes.tie_word_embeddings and not self.num_new
        x = self.embed(num_rows, Weights(itemsize, training.trains_embedding))
        for place, (layer, trains) in enumerate(training.layers):
            self.place = place
            self.weights = Weights(itemsize, trains)
            x = self.layer(x, layer)
        self.weights = Weights(itemsize, training.trains_top)
        x = self.normed(x)
        head = Weights(itemsize, training.trains_embedding if is_tied else training.trains_top)
        if not is_tied:
            step.hold(num_rows * sizes.hidden_size, head, "head")
        if self.has_adapter("lm_head"):
            before = step.linear_flops
            step.linear(x, num_rows, head, held=False)
            self.adapt(x, num_rows, "head")
            step.head_flops += step.linear_flops - before
            step.linear_flops = before
            step.keeps_logits = True
            step.keep(Value(1, 8, False))  # the labels
            step.copies_bytes += FLOAT32  # their number
            return
        if training.whole_copies:
            head = Weights(FLOAT32, True)
            if not is_tied:
                step.hold(num_rows * sizes.hidden_size, head, "head")
        step.cross_entropy([(x, num_rows, head)])

    def embed(self, num_rows: int, weights: Weights) -> Value:
        step, width = self.step, self.sizes.hidden_size
        step.hold(num_rows * width, weights, "embedding")
        if self.training.whole_copies:
            weights = Weights(FLOAT32, True)
            step.hold(num_rows * width, weights, "embedding")
        if weights.train:
            step.keep(Value(1, 8, False))  # the ids
        if not self.has_adapter("embed_tokens"):
            return Value(width, weights.itemsize, weights.train)
        adapter = Weights(FLOAT32, True)
        step.hold(num_rows * self.training.rank, adapter, "matrix")
        step.keep(Value(1, 8, False))
        step.linear(Value(self.training.rank, FLOAT32, True), width, adapter)
        return Value(width, weights.itemsize, True)

    def lowered(self, stream: Value) -> Value:
        return stream

    def normed(self, stream: Value) -> Value:
        return self.step.norm(stream, self.sizes, self.weights)

    def product(self, name: str, read: Value) -> Value:
        """Return a map's product, with A and B beside it if LoRA has them there."""
        sizes = self.sizes
        maps = Weights(self.weights.itemsize, self.weights.train, self.base.in_8_bits)
        width = sizes.map_widths[name]
        y = self.step.linear(read, width, maps, bias=name in sizes.biased)
        if not self.has_adapter(path_of(self.place, name)):
            return y
        self.adapt(read, width, "matrix")
        return Value(width, y.itemsize, True)

    def adapt(self, x: Value, width: int, kind: Kind) -> None:
        """Add B A x."""
        adapter = Weights(FLOAT32, True)
        narrow = self.step.linear(cast(x, FLOAT32), self.training.rank, adapter, kind=kind)
        self.step.linear(narrow, width, adapter, kind=kind)

    def attended(self, q: Value, k: Value, v: Value, angles: list[Value]) -> Value:
        sizes, step = self.sizes, self.step
        if sizes.form.head_norms:
            q = step.norm(q, sizes, self.weights, times=sizes.num_attention_heads)
            k = step.norm(k, sizes, self.weights, times=sizes.num_key_value_heads)
        q, k = step.rotate(q, k, sizes, angles)
        return step.attend(q, k, v, sizes)

    def gated(self, gate: Value, up: Value) -> Value:
        return self.step.gate(gate, up, fused=False)

    def sum(self, stream: Value, written: Value) -> Value:
        return add(stream, written)


Pair = tuple[Value, Value]  # what the base computes, and the expansion


class _Widened(_Decoder[Pair]):
    """A widened model: a frozen base, and blocks that read it."""

    def __init__(self, step: Step, base: Base, method: MethodConfig, num_new: int) -> None:
        super().__init__(step, base, num_new)
        sizes, settings = base.sizes, method.settings
        self.added = added_sizes(sizes, settings.expansion)
        self.added_widths = map_widths(self.added, sizes.head_dim)
        collaboration = settings.collaboration
        self.collaborating = set(
            collaborating_layers(collaboration, method.variant, sizes.num_hidden_layers)
        )
        # Maps whose W12 exists in those layers.
        self.written_by = {
            *(PROJECTIONS[:4] if "attention" in collaboration.modules else ()),
            *(_MLP if "mlp" in collaboration.modules else ()),
        }
        self.is_collaborating = False  # the layer
        self.frozen = Weights(base.itemsize)
        self.trained = Weights(FLOAT32, True)

    def walk(self) -> None:
        sizes, step = self.sizes, self.step
        num_rows, width = sizes.vocab_size + self.num_new, sizes.hidden_size
        step.hold(sizes.vocab_size * width, self.frozen, "embedding")
        step.hold(num_rows * self.added.hidden_size, self.trained, "embedding")
        step.keep(Value(1, 8, False))  # the ids that E' is looked up by
        x = Value(width, self.base.itemsize, False)
        u = Value(self.added.hidden_size, FLOAT32, True)
        for layer in range(sizes.num_hidden_layers):
            self.is_collaborating = layer in self.collaborating
            x, u = self.layer((x, u), layer)
        x, u = self.normed((x, u))
        if not sizes.tie_word_embeddings:
            step.hold(sizes.vocab_size * width, self.frozen, "head")
        streams = [(x, sizes.vocab_size, self.frozen)]
        if self.num_new:
            step.hold(self.num_new * width, Weights(FLOAT32), "embedding")
            step.hold(self.num_new * width, self.trained, "head")
            streams.append((x, self.num_new, self.trained))
        step.hold(num_rows * self.added.hidden_size, self.trained, "head")
        step.cross_entropy([*streams, (u, num_rows, self.trained)])

    def lowered(self, stream: Pair) -> Pair:
        x, u = stream
        return x, cast(u, self.step.product_itemsize(u.itemsize))

    def normed(self, stream: Pair) -> Pair:
        """Return x^ by the base's norm, and the added gains times u / rms(x)."""
        x, u = stream
        step, form = self.step, self.sizes.form
        step.hold(x.width, self.frozen, "gains")
        step.hold(u.width, self.trained, "gains")
        inverse = Value(1, FLOAT32, x.needs_grad)
        step.keep(inverse, Value(u.width, FLOAT32, True))
        if x.needs_grad:
            step.keep(x, cast(u, FLOAT32))
            if form.gain == "times 1 + gain, cast":
                step.copies_bytes += x.width * FLOAT32
        of_gain = self.base.itemsize if form.gain == "cast, times gain" else 0
        return (
            Value(x.width, max(x.itemsize, of_gain), x.needs_grad),
            Value(u.width, step.product_itemsize(u.itemsize), True),
        )

    def product(self, name: str, read: Pair) -> Pair:
        """Return W x, with W12 u where the expansion writes into x, and W21 x + W22 u."""
        x, u = read
        linear, bias = self.step.linear, name in self.sizes.biased
        width, added_width = self.sizes.map_widths[name], self.added_widths[name]
        maps = Weights(self.base.itemsize, in_8_bits=self.base.in_8_bits)
        y = linear(x, width, maps, bias=bias)
        if self.is_collaborating and name in self.written_by:
            linear(u, width, self.trained)
            y = Value(width, y.itemsize, True)
        linear(x, added_width, self.trained, bias=bias)
        return y, linear(u, added_width, self.trained)

    def attended(self, q: Pair, k: Pair, v: Pair, angles: list[Value]) -> Pair:
        step, sizes = self.step, self.sizes
        heads = []
        for is_added, (q_of, k_of, v_of) in enumerate(zip(q, k, v, strict=True)):
            if sizes.form.head_norms:
                q_of, k_of = (
                    step.norm(
                        of,
                        sizes,
                        self.frozen,
                        times=of.width // sizes.head_dim,
                        held=not is_added,
                    )
                    for of in (q_of, k_of)
                )
            q_of, k_of = step.rotate(q_of, k_of, sizes, angles)
            heads.append(step.attend(q_of, k_of, v_of, sizes, rotated_together=True))
        return heads[0], heads[1]

    def gated(self, gate: Pair, up: Pair) -> Pair:
        fused = self.sizes.gated_by_silu
        of_base, of_added = (
            self.step.gate(*both, fused=fused) for both in zip(gate, up, strict=True)
        )
        return of_base, of_added

    def sum(self, stream: Pair, written: Pair) -> Pair:
        x, u = (add(*both) for both in zip(stream, written, strict=True))
        return x, u


def path_of(layer: int, name: str) -> str:
    return f"layers.{layer}.{'mlp' if name in _MLP else 'self_attn'}.{name}"
