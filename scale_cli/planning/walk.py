"""Walks over the layers of what each method trains; `step.py` says what every operation adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from scale_cli.config.schema import MethodConfig
from scale_cli.errors import ConfigError
from scale_cli.methods import METHODS
from scale_cli.methods.method import PROJECTIONS
from scale_cli.methods.widened import AddedSizes, added_sizes, collaborating_layers
from scale_cli.planning.sizes import BaseSizes
from scale_cli.planning.step import FLOAT32, Kind, Step, Value, Weights, add, cast

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
PLANNED = tuple(name for name, method in METHODS.items() if method.is_planned)
_ATTENTION, _MLP = PROJECTIONS[:4], PROJECTIONS[4:]


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


class _Decoder:
    """What plain and widened decoders share."""

    def __init__(self, step: Step, base: Base, num_new: int) -> None:
        self.step, self.base, self.sizes, self.num_new = step, base, base.sizes, num_new
        self.frozen = Weights(base.itemsize)
        self.frozen_map = Weights(base.itemsize, in_8_bits=base.in_8_bits)
        self.angles: dict[str, list[Value]] = {}

    def angles_of(self, layer: int) -> list[Value]:
        """Return the cosines and sines of a layer's rotation."""
        form, kinds = self.sizes.form, self.sizes.layer_types
        kind = kinds[layer] if form.angles_by_kind and layer < len(kinds) else ""
        itemsize = FLOAT32 if form.rotates_in_float32 else self.base.itemsize
        of_kind = [Value(self.sizes.head_dim, itemsize, False) for _ in range(2)]
        return self.angles.setdefault(kind, of_kind)

    def map_width(self, name: str) -> int:
        sizes = self.sizes
        return {
            "q_proj": sizes.query_size,
            "k_proj": sizes.key_value_size,
            "v_proj": sizes.key_value_size,
            "gate_proj": sizes.intermediate_size,
            "up_proj": sizes.intermediate_size,
        }.get(name, sizes.hidden_size)

    def has_bias(self, name: str) -> bool:
        if name in _MLP:
            return self.sizes.mlp_bias
        return self.sizes.o_bias if name == "o_proj" else self.sizes.qkv_bias


class _Plain(_Decoder):
    """A plain model, as transformers computes it, with PEFT's adapters for LoRA."""

    def __init__(self, step: Step, base: Base, method: MethodConfig, num_new: int) -> None:
        super().__init__(step, base, num_new)
        settings = method.settings
        num_layers = base.sizes.num_hidden_layers
        training = method.definition.plain_training(settings, num_layers)
        self.layers = training.layers
        self.trains_embedding = training.trains_embedding
        self.trains_top = training.trains_top
        self.rank = training.rank
        self.targets = training.targets
        self.whole_copies = training.whole_copies
        modules = [
            f"layers.{layer}.{owner_of(name)}.{name}"
            for layer in range(num_layers)
            for name in PROJECTIONS
        ]
        if self.rank and not any(map(self.has_adapter, (*modules, "embed_tokens", "lm_head"))):
            raise ConfigError(
                f"method.lora.targets: the base has none of {', '.join(self.targets)}"
            )

    def has_adapter(self, path: str) -> bool:
        return self.rank > 0 and any(f".{path}".endswith(f".{target}") for target in self.targets)

    def walk(self) -> None:
        sizes, step = self.sizes, self.step
        num_rows = sizes.vocab_size + self.num_new
        is_tied = sizes.tie_word_embeddings and not self.num_new
        of_embedding = Weights(self.base.itemsize, self.trains_embedding)
        x = self.embed(num_rows, of_embedding)
        for place, (layer, trains) in enumerate(self.layers):
            x = self.layer(x, place, layer, Weights(self.base.itemsize, trains))
        top = Weights(self.base.itemsize, self.trains_top)
        x = step.norm(x, sizes, top)
        head = Weights(self.base.itemsize, self.trains_embedding if is_tied else self.trains_top)
        if not is_tied:
            step.hold(num_rows * sizes.hidden_size, head, "head")
        if self.has_adapter("lm_head"):
            before = step.linear_flops
            self.adapted(x, num_rows, "lm_head", head, held=False)
            step.head_flops += step.linear_flops - before
            step.linear_flops, step.keeps_logits = before, True
            step.keep(Value(1, 8, False))  # the labels
            step.copies_bytes += FLOAT32  # their number
            return
        if self.whole_copies:
            head = Weights(FLOAT32, True)
            if not is_tied:
                step.hold(num_rows * sizes.hidden_size, head, "head")
        step.cross_entropy([(x, num_rows, head)])

    def embed(self, num_rows: int, weights: Weights) -> Value:
        step, width = self.step, self.sizes.hidden_size
        step.hold(num_rows * width, weights, "embedding")
        if self.whole_copies:
            weights = Weights(FLOAT32, True)
            step.hold(num_rows * width, weights, "embedding")
        x = Value(width, weights.itemsize, weights.train)
        if weights.train:
            step.keep(Value(1, 8, False))  # the ids
        if self.has_adapter("embed_tokens"):
            adapter = Weights(FLOAT32, True)
            step.hold(num_rows * self.rank, adapter, "matrix")
            looked_up = Value(self.rank, FLOAT32, True)
            step.keep(Value(1, 8, False))
            step.linear(looked_up, width, adapter)
            x = Value(width, x.itemsize, True)
        return x

    def layer(self, x: Value, place: int, layer: int, weights: Weights) -> Value:
        sizes, step, form = self.sizes, self.step, self.sizes.form
        before, after = form.normed != "after", form.normed != "before"
        maps = Weights(weights.itemsize, weights.train, self.base.in_8_bits)

        def product(name: str, read: Value) -> Value:
            return self.adapted(
                read, self.map_width(name), f"layers.{place}.{owner_of(name)}.{name}", maps
            )

        read = step.norm(x, sizes, weights) if before else x
        q, k, v = (product(name, read) for name in _ATTENTION[:3])
        if form.width_norms:
            q, k = (step.norm(of, sizes, weights) for of in (q, k))
        if form.head_norms:
            heads = sizes.num_attention_heads, sizes.num_key_value_heads
            q, k = (
                step.norm(of, sizes, weights, times=times)
                for of, times in zip((q, k), heads, strict=True)
            )
        q, k = step.rotate(q, k, sizes, self.angles_of(layer))
        y = product("o_proj", step.attend(q, k, v, sizes))
        x = add(x, step.norm(y, sizes, weights) if after else y)
        read = step.norm(x, sizes, weights) if before else x
        gate, up = (product(name, read) for name in _MLP[:2])
        y = product("down_proj", step.gate(gate, up, fused=False))
        return add(x, step.norm(y, sizes, weights) if after else y)

    def adapted(
        self, x: Value, width: int, path: str, weights: Weights, *, held: bool = True
    ) -> Value:
        """Return a map's product, with A and B beside it if LoRA has them there."""
        bias = self.has_bias(path.rpartition(".")[2]) if held else False
        y = self.step.linear(x, width, weights, bias=bias, held=held)
        if not self.has_adapter(path):
            return y
        kind: Kind = "head" if path == "lm_head" else "matrix"
        adapter = Weights(FLOAT32, True)
        narrow = self.step.linear(cast(x, FLOAT32), self.rank, adapter, kind=kind)
        self.step.linear(narrow, width, adapter, kind=kind)
        return Value(width, y.itemsize, True)


class _Widened(_Decoder):
    """A widened model: a frozen base, and blocks that read it."""

    def __init__(self, step: Step, base: Base, method: MethodConfig, num_new: int) -> None:
        super().__init__(step, base, num_new)
        settings = method.settings
        self.added: AddedSizes = added_sizes(base.sizes, settings.expansion)
        layers = collaborating_layers(
            settings.collaboration, method.variant, base.sizes.num_hidden_layers
        )
        modules = settings.collaboration.modules
        self.writing: Mapping[str, set[int]] = {
            module: set(layers) if module in modules else set() for module in ("attention", "mlp")
        }
        self.trained = Weights(FLOAT32, True)

    def added_width(self, name: str) -> int:
        added, head_dim = self.added, self.sizes.head_dim
        return {
            "q_proj": added.num_attention_heads * head_dim,
            "k_proj": added.num_key_value_heads * head_dim,
            "v_proj": added.num_key_value_heads * head_dim,
            "gate_proj": added.intermediate_size,
            "up_proj": added.intermediate_size,
        }.get(name, added.hidden_size)

    def walk(self) -> None:
        sizes, step = self.sizes, self.step
        num_rows, width = sizes.vocab_size + self.num_new, sizes.hidden_size
        step.hold(sizes.vocab_size * width, self.frozen, "embedding")
        step.hold(num_rows * self.added.hidden_size, self.trained, "embedding")
        step.keep(Value(1, 8, False))  # the ids that E' is looked up by
        x = Value(width, self.base.itemsize, False)
        u = Value(self.added.hidden_size, FLOAT32, True)
        for layer in range(sizes.num_hidden_layers):
            x, u = self.layer(x, u, layer)
        x, inverse = self.frozen_norm(x)
        u = self.norm(u, inverse)
        if not sizes.tie_word_embeddings:
            step.hold(sizes.vocab_size * width, self.frozen, "head")
        streams = [(x, sizes.vocab_size, self.frozen)]
        if self.num_new:
            step.hold(self.num_new * width, Weights(FLOAT32), "embedding")
            step.hold(self.num_new * width, self.trained, "head")
            streams.append((x, self.num_new, self.trained))
        step.hold(num_rows * self.added.hidden_size, self.trained, "head")
        step.cross_entropy([*streams, (u, num_rows, self.trained)])

    def layer(self, x: Value, u: Value, layer: int) -> tuple[Value, Value]:
        sizes, step, form = self.sizes, self.step, self.sizes.form
        before, after = form.normed != "after", form.normed != "before"
        read, own = self.read(x, u, normed=before)
        writes = layer in self.writing["attention"]
        q, k, v = (self.product(name, read, own, writes=writes) for name in _ATTENTION[:3])
        own_q, own_k, own_v = (self.block(name, read, own) for name in _ATTENTION[:3])
        if form.width_norms:
            q, of_q = self.frozen_norm(q)
            k, of_k = self.frozen_norm(k)
            own_q, own_k = self.norm(own_q, of_q), self.norm(own_k, of_k)
        heads = self.heads(q, k, v, layer, held=True)
        own_heads = self.heads(own_q, own_k, own_v, layer, held=False)
        written = self.product("o_proj", heads, own_heads, writes=writes)
        x, u = self.written(x, u, written, self.block("o_proj", heads, own_heads), normed=after)

        read, own = self.read(x, u, normed=before)
        writes = layer in self.writing["mlp"]
        fused = sizes.gated_by_silu
        gate, up = (self.product(name, read, own, writes=writes) for name in _MLP[:2])
        own_gate, own_up = (self.block(name, read, own) for name in _MLP[:2])
        channels = step.gate(gate, up, fused=fused)
        own_channels = step.gate(own_gate, own_up, fused=fused)
        written = self.product("down_proj", channels, own_channels, writes=writes)
        added = self.block("down_proj", channels, own_channels)
        return self.written(x, u, written, added, normed=after)

    def read(self, x: Value, u: Value, *, normed: bool) -> tuple[Value, Value]:
        """Return x^ and u^, which a layer's maps read."""
        if not normed:
            return x, cast(u, self.step.product_itemsize(u.itemsize))
        read, inverse = self.frozen_norm(x)
        return read, self.norm(u, inverse)

    def written(
        self, x: Value, u: Value, of_x: Value, of_u: Value, *, normed: bool
    ) -> tuple[Value, Value]:
        if normed:
            of_x, inverse = self.frozen_norm(of_x)
            of_u = self.norm(of_u, inverse)
        return add(x, of_x), add(u, of_u)

    def frozen_norm(self, x: Value) -> tuple[Value, Value]:
        """Return x^ by the base's norm, and 1 / rms(x)."""
        step, form = self.step, self.sizes.form
        step.hold(x.width, self.frozen, "gains")
        inverse = Value(1, FLOAT32, x.needs_grad)
        if x.needs_grad:
            step.keep(x, inverse)
            if form.gain == "times 1 + gain, cast":
                step.copies_bytes += x.width * FLOAT32
        of_gain = self.base.itemsize if form.gain == "cast, times gain" else 0
        return Value(x.width, max(x.itemsize, of_gain), x.needs_grad), inverse

    def norm(self, u: Value, inverse: Value) -> Value:
        """Return u^: the added gains times u / rms(x)."""
        self.step.hold(u.width, self.trained, "gains")
        self.step.keep(inverse, Value(u.width, FLOAT32, True))
        if inverse.needs_grad:
            self.step.keep(cast(u, FLOAT32))
        return Value(u.width, self.step.product_itemsize(u.itemsize), True)

    def product(self, name: str, x: Value, u: Value, *, writes: bool) -> Value:
        """Return W x, with W12 u added where the expansion writes into x."""
        bias = self.has_bias(name)
        y = self.step.linear(x, self.map_width(name), self.frozen_map, bias=bias)
        if writes:
            self.step.linear(u, self.map_width(name), self.trained)
            y = Value(y.width, y.itemsize, True)
        return y

    def block(self, name: str, x: Value, u: Value) -> Value:
        """Return W21 x + W22 u."""
        self.step.linear(x, self.added_width(name), self.trained, bias=self.has_bias(name))
        return self.step.linear(u, self.added_width(name), self.trained)

    def heads(self, q: Value, k: Value, v: Value, layer: int, *, held: bool) -> Value:
        step, sizes = self.step, self.sizes
        if sizes.form.head_norms:
            q, k = (
                step.norm(of, sizes, self.frozen, times=of.width // sizes.head_dim, held=held)
                for of in (q, k)
            )
        q, k = step.rotate(q, k, sizes, self.angles_of(layer))
        return step.attend(q, k, v, sizes, rotated_together=True)


def owner_of(name: str) -> str:
    return "mlp" if name in _MLP else "self_attn"
