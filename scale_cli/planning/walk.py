"""Walks over the layers of what each method trains; `step.py` says what every operation adds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

from scale_cli.config.schema import MethodConfig
from scale_cli.errors import ConfigError
from scale_cli.methods import METHODS
from scale_cli.methods.lora import check_targets
from scale_cli.methods.method import PROJECTIONS
from scale_cli.methods.widened import added_sizes, collaborating_layers
from scale_cli.planning.sizes import BaseSizes
from scale_cli.planning.step import FLOAT32, Kind, Step, Value, Weights

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
PLANNED = tuple(name for name, method in METHODS.items() if method.is_planned)
_IN_FLOAT32 = Weights()
_TRAINED = Weights(train=True)
_MLP = PROJECTIONS[4:]
Streams = tuple[Value, ...]  # of a plain model one, of a widened one the base's and the expansion's


def walk(
    sizes: BaseSizes,
    method: MethodConfig,
    mixed_precision: str = "no",
    *,
    base: Weights = _IN_FLOAT32,
    num_new: int = 0,
    masked: bool = False,
) -> Step:
    """Return what one training step of a method costs per token.

    Args:
        sizes: of the base.
        method: the method section of a config.
        mixed_precision: no, bf16 or fp16.
        base: how the base is held.
        num_new: tokens that are added to the base's vocabulary.
        masked: whether attention takes a mask, as sdpa does for isolated documents.

    Raises:
        ConfigError: the method has no closed form, or asks for what the base does not have.
    """
    if not method.definition.is_planned:
        raise ConfigError(
            f"method.variant: {method.variant} has no plan; planned are {', '.join(PLANNED)}"
        )
    if base.in_8_bits:
        method.check_goes_with_8_bits()
    lowered = 2 if mixed_precision in ("bf16", "fp16") else None
    step = Step(sizes, lowered, masked, num_new)
    take(step, method, base)
    return step


def take(step: Step, method: MethodConfig, base: Weights = _IN_FLOAT32) -> None:
    """Walk over the layers from the embedding to the loss, and call every operation of a step."""
    if method.trains_base_weights:
        base = _IN_FLOAT32
    decoder = _Widened if method.definition.widens else _Plain
    decoder(step, method, base).walk()


class _Decoder(ABC):
    """The walk over a layer. Plain and widened decoders have their own norms and products."""

    is_fused = False  # our own form of act(gate) up, and of the rotation

    def __init__(self, step: Step, method: MethodConfig, base: Weights) -> None:
        self.step = step
        self.sizes = step.sizes
        self.base = base
        self.weights = Weights(base.itemsize)  # of the layer's norms; not in 8 bits
        self.method = method
        self.num_rows = self.sizes.vocab_size + step.num_new
        self.angles: dict[str, Value] = {}

    def layer(self, streams: Streams, layer: int) -> Streams:
        """Return the streams after a layer, which may be a copy of `layer` of the base."""
        step = self.step
        form = self.sizes.form
        read = self.read(streams)
        q, k, v = (self.product(name, read) for name in PROJECTIONS[:3])
        if form.width_norms:
            q, k = self.normed(q), self.normed(k)
        if form.head_norms:  # added heads have the base's
            head_dim = self.sizes.head_dim
            step.hold(2 * head_dim, self.weights, "gains")
            q, k = (
                tuple(step.norm(of, self.weights, times=of.width // head_dim) for of in each)
                for each in (q, k)
            )
        angles = self.angles_of(layer)
        heads = []
        for q_of, k_of, v_of in zip(q, k, v, strict=True):
            q_of, k_of = step.rotate(q_of, k_of, angles)
            heads.append(step.attend(q_of, k_of, v_of, rotated_together=self.is_fused))
        streams = self.sum(streams, self.product("o_proj", tuple(heads)))

        read = self.read(streams)
        gate, up = (self.product(name, read) for name in _MLP[:2])
        fused = self.is_fused and self.sizes.gated_by_silu
        channels = [step.gate(*of, fused=fused) for of in zip(gate, up, strict=True)]
        return self.sum(streams, self.product("down_proj", tuple(channels)))

    def read(self, streams: Streams) -> Streams:
        """Return what a layer's maps read."""
        if self.sizes.form.normed != "after":
            return self.normed(streams)
        x, *added = streams
        return x, *(u.cast(self.step.lowered or u.itemsize) for u in added)

    def sum(self, streams: Streams, written: Streams) -> Streams:
        if self.sizes.form.normed != "before":
            written = self.normed(written)
        return tuple(x.plus(y) for x, y in zip(streams, written, strict=True))

    def angles_of(self, layer: int) -> Value:
        """Return the cosines and sines of a layer's rotation."""
        form = self.sizes.form
        kinds = self.sizes.layer_types
        kind = kinds[layer] if form.angles_by_kind and layer < len(kinds) else ""
        itemsize = FLOAT32 if form.rotates_in_float32 else self.base.itemsize
        return self.angles.setdefault(kind, Value(2 * self.sizes.head_dim, itemsize, False))

    @abstractmethod
    def walk(self) -> None:
        """Walk from the embedding to the loss."""

    @abstractmethod
    def normed(self, streams: Streams) -> Streams: ...

    @abstractmethod
    def product(self, name: str, read: Streams) -> Streams:
        """Return what a map of the layer writes."""


class _Plain(_Decoder):
    """A plain model, as transformers computes it, with PEFT's adapters for LoRA."""

    def walk(self) -> None:
        sizes = self.sizes
        step = self.step
        num_layers = sizes.num_hidden_layers
        training = self.method.definition.plain_training(self.method.settings, num_layers)
        self.rank = training.rank
        self.targets = training.targets if training.rank else ()
        self.place = 0  # of the layer in the model
        maps = [path_of(layer, name) for layer in range(num_layers) for name in PROJECTIONS]
        check_targets("method.lora.targets", self.targets, ["embed_tokens", "lm_head", *maps])

        itemsize = self.base.itemsize
        size = self.num_rows * sizes.hidden_size
        copies = [_TRAINED] if training.whole_copies else []  # used instead of their originals
        embeddings = [Weights(itemsize, training.trains_embedding), *copies]
        heads = [Weights(itemsize, training.trains_top), *copies]
        for weights in embeddings:
            step.hold(size, weights, "embedding")
        x = step.embed(sizes.hidden_size, embeddings[-1].itemsize, embeddings[-1].train)
        if self.has_adapter("embed_tokens"):
            step.hold(self.num_rows * self.rank, _TRAINED, "matrix")
            narrow = step.embed(self.rank, FLOAT32, True)
            x = x.plus(step.linear(narrow, sizes.hidden_size, _TRAINED), x.itemsize)

        for self.place, (layer, trains) in enumerate(training.layers):
            self.weights = Weights(itemsize, trains)
            (x,) = self.layer((x,), layer)
        self.weights = Weights(itemsize, training.trains_top)
        (x,) = self.normed((x,))

        if sizes.tie_word_embeddings and not step.num_new:
            heads = embeddings
        else:
            for weights in heads:
                step.hold(size, weights, "head")
        if self.has_adapter("lm_head"):
            self.adapted(x, step.linear(x, self.num_rows, heads[0], kind=None), "head")
            step.keeps_logits = True
            step.keep(Value(1, 8, False))  # the labels
            step.copies_bytes += FLOAT32  # the number of labels
        else:
            step.cross_entropy([(x, self.num_rows, heads[-1])])

    def has_adapter(self, path: str) -> bool:
        return any(f".{path}".endswith(f".{target}") for target in self.targets)

    def normed(self, streams: Streams) -> Streams:
        (x,) = streams
        self.step.hold(x.width, self.weights, "gains")
        return (self.step.norm(x, self.weights),)

    def product(self, name: str, read: Streams) -> Streams:
        """Return W x, with B A x where LoRA adapts the map."""
        (x,) = read
        maps = replace(self.weights, in_8_bits=self.base.in_8_bits)
        bias = name in self.sizes.biased
        y = self.step.linear(x, self.sizes.map_widths[name], maps, bias=bias)
        if self.has_adapter(path_of(self.place, name)):
            y = self.adapted(x, y, "matrix")
        return (y,)

    def adapted(self, x: Value, y: Value, kind: Kind) -> Value:
        """Return y + B A x."""
        narrow = self.step.linear(x.cast(FLOAT32), self.rank, _TRAINED, kind=kind)
        return y.plus(self.step.linear(narrow, y.width, _TRAINED, kind=kind), y.itemsize)


class _Widened(_Decoder):
    """A widened model: a frozen base, and blocks that read it."""

    is_fused = True

    def walk(self) -> None:
        sizes, step, settings = self.sizes, self.step, self.method.settings
        added = replace(sizes, **vars(added_sizes(sizes, settings.expansion)))
        self.added_widths = added.map_widths
        collaboration = settings.collaboration
        num_layers = sizes.num_hidden_layers
        collaborating = collaborating_layers(collaboration, self.method.variant, num_layers)
        maps = {"attention": PROJECTIONS[:4], "mlp": _MLP}

        width, added_width = sizes.hidden_size, added.hidden_size
        step.hold(sizes.vocab_size * width, self.weights, "embedding")
        step.hold(self.num_rows * added_width, _TRAINED, "embedding")
        x = step.embed(width, self.base.itemsize, False)
        u = step.embed(added_width, FLOAT32, True)
        for layer in range(num_layers):
            modules = collaboration.modules if layer in collaborating else ()
            self.with_w12 = [name for module in modules for name in maps[module]]
            x, u = self.layer((x, u), layer)
        x, u = self.normed((x, u))

        if not sizes.tie_word_embeddings:
            step.hold(sizes.vocab_size * width, self.weights, "head")
        step.hold(self.num_rows * added_width, _TRAINED, "head")
        streams = [(x, sizes.vocab_size, self.weights)]
        if step.num_new:
            step.hold(step.num_new * width, _IN_FLOAT32, "embedding")
            step.hold(step.num_new * width, _TRAINED, "head")
            streams.append((x, step.num_new, _TRAINED))
        step.cross_entropy([*streams, (u, self.num_rows, _TRAINED)])

    def normed(self, streams: Streams) -> Streams:
        x, u = streams
        self.step.hold(x.width, self.weights, "gains")
        self.step.hold(u.width, _TRAINED, "gains")
        return self.step.widened_norm(x, u, self.base.itemsize)

    def product(self, name: str, read: Streams) -> Streams:
        """Return W x, with W12 u where the expansion writes into x, and W21 x + W22 u."""
        x, u = read
        linear, bias = self.step.linear, name in self.sizes.biased
        y = linear(x, self.sizes.map_widths[name], self.base, bias=bias)
        if name in self.with_w12:
            y = y.plus(linear(u, y.width, _TRAINED), y.itemsize)
        width = self.added_widths[name]
        return y, linear(x, width, _TRAINED, bias=bias).plus(linear(u, width, _TRAINED))


def path_of(layer: int, name: str) -> str:
    return f"layers.{layer}.{'mlp' if name in _MLP else 'self_attn'}.{name}"
