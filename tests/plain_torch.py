"""The widened decoder once more, from tensors alone: one dense matrix for every linear map, in float64, plain torch.

Nothing of the package is imported: its models, losses and exports are held to this.

Shapes: B batch, T positions, C channels of all streams, V vocabulary.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ACTIVATIONS = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_pytorch_tanh": lambda x: (
        x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    ),
}


class Norms(NamedTuple):
    """By what a layer's norms are called: before and after attention, before and after the MLP."""

    reads: str | None = "input_layernorm"
    written: str | None = None
    reads_mlp: str | None = "post_attention_layernorm"
    written_mlp: str | None = None


AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
GEMMA = Norms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
NORMS = {"gemma3_text": GEMMA, "olmo2": AFTER, "olmo3": AFTER, "exaone4": AFTER}


def logits_of(
    config: Any,
    base: Mapping[str, Tensor],
    run: Mapping[str, Tensor] | None,
    ids_BT: Tensor,
    documents_BT: Tensor | None = None,
    more_rows: Sequence[Tensor] = (),
) -> Tensor:
    """Return (B, T, V) float64 of a run's head, or of the base's, gradients and all.

    Args:
        config: of the plain base.
        base: its tensors, by transformers' names.
        run: what a run added to it, by name; None: nothing.
        ids_BT: the tokens; of new ones, those after the base's.
        documents_BT: the document of every position, which sees no other and counts its positions by itself.
        more_rows: of x, for tokens after those that the head has; in every E' there are such rows too.
    """
    base = {name: tensor.double() for name, tensor in base.items()}
    runs = [] if run is None else [{name: tensor.double() for name, tensor in run.items()}]
    here, width = _Widened(config, base, runs), config.hidden_size
    is_gemma = config.model_type == "gemma3_text"
    embedding = base["model.embed_tokens.weight"] * (
        torch.tensor(width**0.5).double() if is_gemma else 1.0
    )
    head = base.get("lm_head.weight", base["model.embed_tokens.weight"])
    for added in runs:
        if "new_tokens.lm_head.weight" in added:
            embedding = torch.cat([embedding, added["new_tokens.embed_tokens.weight"]])
            head = torch.cat([head, added["new_tokens.lm_head.weight"]])
    embedding = torch.stack([*embedding, *more_rows])
    stream_BTC = torch.cat(
        [table[ids_BT] for table in (embedding, *(run["embed_tokens.weight"] for run in runs))], -1
    )
    norms = NORMS.get(config.model_type, Norms())
    for layer, (cos, sin, mask) in enumerate(_turns_and_masks(config, ids_BT, documents_BT)):
        name = f"layers.{layer}"
        rows = here.normed(stream_BTC, name, norms.reads)
        written = here.product(name, "self_attn", "o_proj", here.heads(name, rows, cos, sin, mask))
        stream_BTC = stream_BTC + here.normed(written, name, norms.written)
        rows = here.normed(stream_BTC, name, norms.reads_mlp)
        gate, up = (here.product(name, "mlp", f"{of}_proj", rows) for of in ("gate", "up"))
        activation = ACTIVATIONS[config.hidden_activation if is_gemma else config.hidden_act]
        written = here.product(name, "mlp", "down_proj", activation(gate) * up)
        stream_BTC = stream_BTC + here.normed(written, name, norms.written_mlp)
    heads = torch.cat([head, *(run["lm_head.weight"] for run in runs)], 1)
    return F.linear(here.normed(stream_BTC, "", "norm"), heads)


class _Widened(NamedTuple):
    """The tensors of a plain base and of what is added to it; a layer is given by its name, `layers.3`."""

    config: Any
    base: Mapping[str, Tensor]
    runs: Sequence[Mapping[str, Tensor]]

    def normed(self, rows: Tensor, layer: str, norm: str | None, owner: str = "") -> Tensor:
        """Divide what all streams have by the rms of the base's part, and multiply by the gains of those read."""
        if norm is None:
            return rows
        gain = self._gains(".".join(filter(None, (layer, owner, norm))))
        name = ".".join(filter(None, (layer, norm, "weight")))
        size = (
            rows[..., : len(gain)].pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps
        ).sqrt()
        gains = torch.cat([gain, *(run[name] for run in self.runs if name in run)])
        return rows[..., : len(gains)] / size * gains

    def product(self, layer: str, owner: str, name: str, rows: Tensor) -> Tensor:
        """Multiply what all streams have by [[W, W12], [W21, W22]]."""
        weight = self.base[f"model.{layer}.{owner}.{name}.weight"]
        biases = [self.base.get(f"model.{layer}.{owner}.{name}.bias")]
        for run in self.runs:
            across, own, back = (
                run.get(f"{layer}.{name}.weight_{of}") for of in ("21", "22", "12")
            )
            assert across is not None
            if own is None:
                own = across.new_zeros(len(across), rows.shape[-1] - weight.shape[1])
            back = own.new_zeros(0, own.shape[1]) if back is None else back
            back = F.pad(back, (0, 0, 0, len(weight) - len(back)))
            weight = torch.cat([torch.cat([weight, back], 1), torch.cat([across, own], 1)])
            biases.append(run.get(f"{layer}.{name}.bias_2"))
        bias = None if biases[0] is None else torch.cat([one for one in biases if one is not None])
        return F.linear(rows, weight, bias)

    def heads(self, layer: str, rows: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Return what all heads read, one after another."""
        kind, channels = self.config.model_type, _channels_of_a_head(self.config)
        q, k, v = (self.product(layer, "self_attn", f"{name}_proj", rows) for name in "qkv")
        if kind in ("olmo2", "olmo3"):
            q, k = (
                self.normed(q, layer, "q_norm", "self_attn"),
                self.normed(k, layer, "k_norm", "self_attn"),
            )
        q, k, v = (states.unflatten(-1, (-1, channels)).transpose(1, 2) for states in (q, k, v))
        if kind in ("qwen3", "gemma3_text", "exaone4"):
            q, k = (
                self._normed_head(states, f"{layer}.self_attn.{of}_norm")
                for states, of in ((q, "q"), (k, "k"))
            )
        q, k = (_turned(states, cos, sin) for states in (q, k))
        k, v = (states.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for states in (k, v))
        size = math.sqrt(self.config.query_pre_attn_scalar if kind == "gemma3_text" else channels)
        scores = (q @ k.transpose(-1, -2) / size).masked_fill(~mask, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def _normed_head(self, states: Tensor, name: str) -> Tensor:
        return (
            states
            * (states.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
            * self._gains(name)
        )

    def _gains(self, name: str) -> Tensor:
        return self.base[f"model.{name}.weight"] + (self.config.model_type == "gemma3_text")


def _turns_and_masks(
    config: Any, ids_BT: Tensor, documents_BT: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield of every layer cosines and sines of its positions' angles, and which positions each one sees."""
    documents_BT = torch.zeros_like(ids_BT) if documents_BT is None else documents_BT
    places = torch.arange(ids_BT.shape[1])
    back = places[:, None] - places
    seen_BTT = (documents_BT[:, :, None] == documents_BT[:, None, :]) & (back >= 0)
    since_BT = seen_BTT.sum(-1) - 1
    channels, window = _channels_of_a_head(config), getattr(config, "sliding_window", None)
    for kind in (
        getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    ):
        factor, of_kind = 1.0, "full_attention" in config.rope_parameters
        rope = config.rope_parameters[kind] if of_kind else config.rope_parameters
        turned = int(channels * rope.get("partial_rotary_factor", 1.0))
        rates = rope["rope_theta"] ** -(torch.arange(0, turned, 2).double() / turned)
        if rope["rope_type"] == "linear":
            rates = rates / rope["factor"]
        elif rope["rope_type"] != "default":
            named = {"layer_type": kind} if of_kind else {}
            rates, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](
                config, None, int(since_BT.max()) + 1, **named
            )
        angles = (since_BT[:, None, :, None] * rates).repeat(1, 1, 1, 2)
        if config.model_type == "exaone4" and window and kind == "full_attention":
            angles = torch.zeros_like(angles)
        seen = (window or len(places)) if kind == "sliding_attention" else len(places)
        yield angles.cos() * factor, angles.sin() * factor, (seen_BTT & (back < seen))[:, None]


def _channels_of_a_head(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _turned(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn as many of the first channels as there are angles for."""
    turned, rest = states[..., : cos.shape[-1]], states[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)


def composed_rows(rows_VC: Tensor, pieces: Sequence[Sequence[int]]) -> Tensor:
    """Return rows of tokens that are made of others: their pieces' mean, as long as a piece's row is in the median."""
    rows_VC = rows_VC.double()
    lengths = torch.stack(
        [
            rows_VC[piece].norm()
            for piece in sorted({one for of_token in pieces for one in of_token})
        ]
    )
    means = torch.stack([rows_VC[list(of_token)].mean(0) for of_token in pieces])
    return means / means.norm(dim=1, keepdim=True) * lengths.median()


def shared_with_new_tokens(logits: Tensor, first: Sequence[int], own: Collection[int]) -> Tensor:
    """Return the probabilities of all tokens by a head that lacks the last ones, piece by piece.

    A piece shares evenly with the new tokens that begin with it where it is one of `own`; any other keeps its
    probability, and the new tokens that begin with it have 2^-20 of it together.
    """
    said = logits.softmax(-1)
    whole = torch.cat([said, said.new_zeros(*said.shape[:-1], len(first))], -1)
    for piece in set(first):
        sharing = [said.shape[-1] + at for at, one in enumerate(first) if one == piece]
        kept = 1 / (1 + len(sharing)) if piece in own else 1.0
        of_each = kept if piece in own else 2.0**-20 / len(sharing)
        whole[..., sharing] = said[..., piece, None] * of_each
        whole[..., piece] = said[..., piece] * kept
    return whole / whole.sum(-1, keepdim=True)
