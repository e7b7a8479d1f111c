"""A layer and a head with random weights that cost what a method's cost: a device's speed is measured on them.

They have the method's products, in the base's widths and of the run's windows, and the norms, rotations, sums and casts
between. Every product and attention counts its FLOPs, as `step.py` does on paper. A widened layer writes nothing into
x; of a plain model every layer and the head train, or have adapters.

Shapes: B batch, T positions, D base channels, E expansion channels, V vocabulary, M rows of logits at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from scale_cli.config.schema import MethodConfig
from scale_cli.methods.method import PROJECTIONS
from scale_cli.methods.widened import AddedSizes, added_sizes
from scale_cli.planning.sizes import BaseSizes, map_widths
from scale_cli.planning.step import FLOAT32

_MOST_CHANNELS = 1024
_MOST_ROWS = 1 << 14  # of the head; more cost the same each
_WEIGHTS_BYTES = 1 << 23  # of the layers, at least


def within_bounds(sizes: BaseSizes) -> BaseSizes:
    """Return sizes of a layer and a head that are as fast, but small enough to be measured on."""
    share = min(1.0, _MOST_CHANNELS / sizes.hidden_size)
    num_key_value_heads = max(1, round(share * sizes.num_key_value_heads))
    group = sizes.num_attention_heads // sizes.num_key_value_heads
    return replace(
        sizes,
        hidden_size=round(share * sizes.hidden_size),
        intermediate_size=max(1, round(share * sizes.intermediate_size)),
        num_key_value_heads=num_key_value_heads,
        num_attention_heads=num_key_value_heads * group,
        vocab_size=min(sizes.vocab_size, _MOST_ROWS),
    )


class StandIn(ABC):
    """A part of a model that computes a step, and counts its FLOPs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flops = 0.0  # so far
        self.trained: list[Tensor] = []

    @abstractmethod
    def run(self) -> None:
        """Compute outputs and gradients."""

    def weight(self, *shape: int, trains: bool) -> Tensor:
        size = torch.Size(shape).numel()
        values = torch.linspace(-0.02, 0.02, size, device=self.device)
        weight = values.view(shape).requires_grad_(trains)
        if trains:
            self.trained.append(weight)
        return weight

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        times = 1 + x.requires_grad + weight.requires_grad
        self.flops += 2.0 * times * x.shape[:-1].numel() * weight.numel()
        return F.linear(x, weight)


class LayersStandIn(StandIn):
    """Some decoder layers, with what a method adds to their maps.

    There are as many as a cache does not hold, so weights and activations come from memory, as a model's do.
    """

    def __init__(
        self, sizes: BaseSizes, method: MethodConfig, device: torch.device, batch: tuple[int, int]
    ) -> None:
        super().__init__(device)
        self.batch = batch  # windows, and tokens of each
        self.head_dim = sizes.head_dim
        # Of a rotation, whose result has their precision, as a base's has.
        self.angles = torch.full((batch[1], sizes.head_dim), 0.7, device=device)
        streams: list[BaseSizes | AddedSizes] = [sizes]
        rank = 0
        targets: Sequence[str] = ()
        if method.definition.widens:
            streams.append(added_sizes(sizes, method.expansion))
        else:
            training = method.definition.plain_training(method.settings, sizes.num_hidden_layers)
            rank = training.rank
            targets = training.targets

        self.widths = [of.hidden_size for of in streams]
        self.trains = [len(streams) == 1 and not rank, True]
        written = [map_widths(of, sizes.head_dim) for of in streams]
        shapes: dict[str, list[tuple[int, int]]] = {}  # by map: of W, and of what is added
        for name in PROJECTIONS:
            source = {"o_proj": "q_proj", "down_proj": "gate_proj"}.get(name)
            read = self.widths if source is None else [of[source] for of in written]
            shapes[name] = [(written[0][name], read[0])]
            if len(streams) == 2:
                shapes[name] += [(written[1][name], width) for width in read]
            elif name in targets:
                shapes[name] += [(rank, read[0]), (written[0][name], rank)]

        of_layer = FLOAT32 * sum(rows * columns for of in shapes.values() for rows, columns in of)
        num_layers = min(sizes.num_hidden_layers, -(-_WEIGHTS_BYTES // of_layer))
        self.layers = [
            {
                name: [
                    self.weight(*shape, trains=self.trains[place > 0])
                    for place, shape in enumerate(of)
                ]
                for name, of in shapes.items()
            }
            for _ in range(num_layers)
        ]
        self.gains = [
            self.weight(width, trains=trains)
            for width, trains in zip(self.widths, self.trains, strict=False)
        ]

    def run(self) -> None:
        streams = [torch.ones(*self.batch, width, device=self.device) for width in self.widths]
        streams[-1].requires_grad_()
        for maps in self.layers:
            read = self._normed(streams)
            queries, keys, values = (self._mapped(maps[name], read) for name in PROJECTIONS[:3])
            heads = [self._attended(*of) for of in zip(queries, keys, values, strict=True)]
            written = self._mapped(maps["o_proj"], heads)
            streams = [stream + of for stream, of in zip(streams, written, strict=True)]

            read = self._normed(streams)
            gates, ups = (self._mapped(maps[name], read) for name in ("gate_proj", "up_proj"))
            channels = [F.silu(gate) * up for gate, up in zip(gates, ups, strict=True)]
            written = self._mapped(maps["down_proj"], channels)
            streams = [stream + of for stream, of in zip(streams, written, strict=True)]
        streams[-1].sum().backward()
        for weight in self.trained:
            weight.grad = None

    def _normed(self, streams: list[Tensor]) -> list[Tensor]:
        x_BTD = streams[0]
        inverse_BT1 = torch.rsqrt(x_BTD.pow(2).mean(-1, keepdim=True) + 1e-6)
        return [
            stream * inverse_BT1 * gain for stream, gain in zip(streams, self.gains, strict=True)
        ]

    def _mapped(self, weights: list[Tensor], read: list[Tensor]) -> list[Tensor]:
        weight, *added = weights
        y = self.product(read[0], weight)
        if len(read) == 2:
            of_x, of_u = (self.product(*of) for of in zip(read, added, strict=True))
            return [y, of_x + of_u]
        if added:
            down, up = added
            y = y + self.product(self.product(read[0].float(), down), up) * 2.0  # as PEFT does
        return [y]

    def _attended(self, *projected: Tensor) -> Tensor:
        q, k, v = (of.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for of in projected)
        half = self.head_dim // 2
        q, k = (
            of * self.angles + torch.cat([-of[..., half:], of[..., :half]], -1) * self.angles
            for of in (q, k)
        )
        num_products = 6 if q.requires_grad else 2
        self.flops += num_products * q.numel() * (q.shape[2] + 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).flatten(2)


class HeadStandIn(StandIn):
    """A vocabulary head with its loss and gradients, of a chunk of tokens, as `model/head_loss.py` computes them."""

    def __init__(
        self, sizes: BaseSizes, method: MethodConfig, device: torch.device, num_rows: int
    ) -> None:
        super().__init__(device)
        definition = method.definition
        if definition.widens:
            added = added_sizes(sizes, method.expansion)
            streams = [(sizes.hidden_size, False, False), (added.hidden_size, True, True)]
        else:
            training = definition.plain_training(method.settings, sizes.num_hidden_layers)
            tied = sizes.tie_word_embeddings
            trains = training.trains_embedding if tied else training.trains_top
            streams = [(sizes.hidden_size, True, trains or training.whole_copies)]
        # Streams and weights in the precision of the products; gradients of weights in float32.
        of_products = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if of_products else torch.float32
        self.streams = []
        for width, needs_grad, trains in streams:
            x_MD = torch.ones(num_rows, width, device=device, dtype=dtype)
            weight_VD = self.weight(sizes.vocab_size, width, trains=False).to(dtype)
            total_VD = torch.zeros(sizes.vocab_size, width, device=device) if trains else None
            self.streams.append((x_MD.requires_grad_(needs_grad), weight_VD, total_VD))
        self.said_MV = torch.empty(num_rows, sizes.vocab_size, device=device)
        self.grad_MV = torch.empty_like(self.said_MV, dtype=dtype)

    @torch.no_grad()
    def run(self) -> None:
        logits_MV, *added = [self.product(x, weight) for x, weight, _ in self.streams]
        for of_u_MV in added:
            logits_MV += of_u_MV
        torch.log_softmax(logits_MV, dim=1, dtype=torch.float32, out=self.said_MV)
        torch.exp(self.said_MV, out=self.grad_MV)
        for x_MD, weight_VD, total_VD in self.streams:
            if x_MD.requires_grad:
                self.grad_MV @ weight_VD
            if total_VD is not None:
                self.flops += 2.0 * len(x_MD) * weight_VD.numel()
                total_VD += self.grad_MV.T @ x_MD
