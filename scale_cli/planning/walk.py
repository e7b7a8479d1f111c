"""Walks over the layers of what each method trains; `step.py` says what every operation adds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

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
Streams = tuple[Value, ...]  # of a plain model one, of a widened one the base's and the expansion's


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


class _Decoder(ABC):
    """The walk over a layer. Plain and widened decoders have their own norms and products."""

    def __init__(self, step: Step, base: Base, num_new: int) -> None:
        self.step = step
        self.base = base
        self.sizes = base.sizes
        self.num_new = num_new
        self.angles: dict[str, list[Value]] = {}
        self.weights = Weights(base.itemsize)  # of the base's layer
        self.is_fused = False  # our own form of act(gate) up, and of the rotation

    def layer(self, streams: Streams, layer: int) -> Streams:
        """Return the streams after a layer, which may be a copy of `layer` of the base."""
        form = self.sizes.form
        read = self.read(streams)
        q, k, v = (self.product(name, read) for name in PROJECTIONS[:3])
        if form.width_norms:
            q, k = self.normed(q), self.normed(k)
        written = self.product("o_proj", self.attended(q, k, v, self.angles_of(layer)))
        streams = self.sum(streams, written)

        read = self.read(streams)
        gate, up = (self.product(name, read) for name in _MLP[:2])
        fused = self.is_fused and self.sizes.gated_by_silu
        channels = [self.step.gate(*of, fused=fused) for of in zip(gate, up, strict=True)]
        return self.sum(streams, self.product("down_proj", tuple(channels)))

    def read(self, streams: Streams) -> Streams:
        """Return what a layer's maps read."""
        if self.sizes.form.normed != "after":
            return self.normed(streams)
        x, *added = streams
        return x, *(cast(u, self.step.product_itemsize(u.itemsize)) for u in added)

    def attended(self, q: Streams, k: Streams, v: Streams, angles: list[Value]) -> Streams:
        step, sizes = self.step, self.sizes
        heads: list[Value] = []
        for q_of, k_of, v_of in zip(q, k, v, strict=True):
            if sizes.form.head_norms:  # added heads have the base's
                q_of, k_of = (
                    step.norm(
                        of,
                        sizes,
                        self.weights,
                        times=of.width // sizes.head_dim,
                        held=not heads,
                    )
                    for of in (q_of, k_of)
                )
            q_of, k_of = step.rotate(q_of, k_of, sizes, angles)
            heads.append(step.attend(q_of, k_of, v_of, sizes, rotated_together=self.is_fused))
        return tuple(heads)

    def sum(self, streams: Streams, written: Streams) -> Streams:
        if self.sizes.form.normed != "before":
            written = self.normed(written)
        return tuple(add(*both) for both in zip(streams, written, strict=True))

    def angles_of(self, layer: int) -> list[Value]:
        """Return the cosines and sines of a layer's rotation."""
        form, kinds = self.sizes.form, self.sizes.layer_types
        kind = kinds[layer] if form.angles_by_kind and layer < len(kinds) else ""
        itemsize = FLOAT32 if form.rotates_in_float32 else self.base.itemsize
        of_kind = [Value(self.sizes.head_dim, itemsize, False) for _ in range(2)]
        return self.angles.setdefault(kind, of_kind)

    @abstractmethod
    def normed(self, streams: Streams) -> Streams: ...

    @abstractmethod
    def product(self, name: str, read: Streams) -> Streams:
        """Return what a map of the layer writes."""


class _Plain(_Decoder):
    """A plain model, as transformers computes it, with PEFT's adapters for LoRA."""

    def __init__(self, step: Step, base: Base, method: MethodConfig, num_new: int) -> None:
        super().__init__(step, base, num_new)
        num_layers = base.sizes.num_hidden_layers
        self.training = method.definition.plain_training(method.settings, num_layers)
        self.place = 0  # of the layer in the model
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
            (x,) = self.layer((x,), layer)
        self.weights = Weights(itemsize, training.trains_top)
        (x,) = self.normed((x,))
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

    def normed(self, streams: Streams) -> Streams:
        return tuple(self.step.norm(x, self.sizes, self.weights) for x in streams)

    def product(self, name: str, read: Streams) -> Streams:
        """Return W x, with B A x where LoRA adapts the map."""
        (x,) = read
        sizes = self.sizes
        maps = Weights(self.weights.itemsize, self.weights.train, self.base.in_8_bits)
        width = sizes.map_widths[name]
        y = self.step.linear(x, width, maps, bias=name in sizes.biased)
        if self.has_adapter(path_of(self.place, name)):
            self.adapt(x, width, "matrix")
            y = Value(width, y.itemsize, True)
        return (y,)

    def adapt(self, x: Value, width: int, kind: Kind) -> None:
        """Add B A x."""
        adapter = Weights(FLOAT32, True)
        narrow = self.step.linear(cast(x, FLOAT32), self.training.rank, adapter, kind=kind)
        self.step.linear(narrow, width, adapter, kind=kind)


class _Widened(_Decoder):
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
        self.is_fused = True
        self.trained = Weights(FLOAT32, True)

    def walk(self) -> None:
        sizes, step = self.sizes, self.step
        num_rows, width = sizes.vocab_size + self.num_new, sizes.hidden_size
        step.hold(sizes.vocab_size * width, self.weights, "embedding")
        step.hold(num_rows * self.added.hidden_size, self.trained, "embedding")
        step.keep(Value(1, 8, False))  # the ids that E' is looked up by
        x = Value(width, self.base.itemsize, False)
        u = Value(self.added.hidden_size, FLOAT32, True)
        for layer in range(sizes.num_hidden_layers):
            self.is_collaborating = layer in self.collaborating
            x, u = self.layer((x, u), layer)
        x, u = self.normed((x, u))
        if not sizes.tie_word_embeddings:
            step.hold(sizes.vocab_size * width, self.weights, "head")
        streams = [(x, sizes.vocab_size, self.weights)]
        if self.num_new:
            step.hold(self.num_new * width, Weights(FLOAT32), "embedding")
            step.hold(self.num_new * width, self.trained, "head")
            streams.append((x, self.num_new, self.trained))
        step.hold(num_rows * self.added.hidden_size, self.trained, "head")
        step.cross_entropy([*streams, (u, num_rows, self.trained)])

    def normed(self, streams: Streams) -> Streams:
        """Return x^ by the base's norm, and the added gains times u / rms(x)."""
        x, u = streams
        step, form = self.step, self.sizes.form
        step.hold(x.width, self.weights, "gains")
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

    def product(self, name: str, read: Streams) -> Streams:
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


def path_of(layer: int, name: str) -> str:
    return f"layers.{layer}.{'mlp' if name in _MLP else 'self_attn'}.{name}"
