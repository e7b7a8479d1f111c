"""A base and LoRA adapters on its own weights in vLLM: one pass, with the rows of a step twice.

A token's row of the base, x, and that of the trained stream, y, follow each other. Every linear
layer reads its weights once for both. Behind it each y gets what the adapter adds, (h A) B: a
quantised base stays as it is. Attention alone must keep the streams apart, so it gets them side by
side, with twice the heads; so has the KV cache, whose blocks are what they were. The last row is
[x | y].

The rows are doubled inside the trunk, behind its embedding, and so are the positions. Then vLLM
compiles it for T tokens like any other trunk, and half of 2T is T again. Half of a length that might
be odd would be a formula in every shape.

Where an adapter has an embedding or a head of its own, whole, y is read from it or multiplied by it.

vLLM's own loaders give each device its share of A and B. Where the inputs are shared, each adds its
part of (h A) B before the sum over the devices, which is linear.

Shapes: T tokens of a step, 2T rows, D channels, I inputs, O outputs; R the ranks of all adapters of
a layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.utils import set_weight_attrs
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from .head_parts import (
    HeadPart,
    Weights,
    is_readable,
    products_of_heads,
    tiles_of,
    whole_product,
)
from .stream_heads import HeadProducts, Products, trained_alone

_SETTINGS = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
# Of PEFT's names.
_PREFIX = "base_model.model."
_DOWN = ".lora_A.weight"
_UP = ".lora_B.weight"
# What an adapter may have whole instead of the base's, and its name in PEFT's files.
_WHOLE = {"embed_tokens": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}


def side_by_side(rows: Tensor) -> Tensor:
    """Return (T, 2D), from (2T, D): each token's rows of both streams."""
    return rows.reshape(len(rows) // 2, -1)


def twice(tensor: Tensor) -> Tensor:
    """Return each of a tensor's rows twice."""
    return tensor.repeat_interleave(2, dim=0)


def trained_rows(rows: Tensor) -> Tensor:
    """Return (T, D), a view: the trained stream's rows."""
    return rows.unflatten(0, (-1, 2))[:, 1]


class AdapterStreams:
    """Both streams in one pass over the base's weights."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        self.sizes: Sequence[int] = [model.config.hidden_size] * 2  # channels of x and of y
        self._model = model
        self._vllm_config = vllm_config
        self._folder = vllm_config.model_config.model
        revision = vllm_config.model_config.revision
        self._settings = get_hf_file_to_dict(_SETTINGS, self._folder, revision)
        router = model.config.scale_router
        # The folder that is served has the adapter alone; its base's weights are read after it.
        model.allow_patterns_overrides = [_WEIGHTS]
        model.secondary_weights = [DefaultModelLoader.Source(router["base"], router["revision"])]
        if vllm_config.model_config.word_embeddings_untied_by_checkpoint:
            # vLLM takes an adapter's own head for the base's, which is the embedding.
            model.config.tie_word_embeddings = True
            model.lm_head = model.lm_head.tie_weights(model.model.embed_tokens)
        model.trained = trained_whole(self._settings, model.config)
        model.model.embed_tokens.register_forward_hook(
            partial(beside_own, model.trained["embed_tokens"])
            if "embed_tokens" in model.trained
            else lambda _, __, rows_TD: twice(rows_TD)
        )
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(
                lambda _, args, named: (args, {**named, "positions": twice(named["positions"])}),
                with_kwargs=True,
            )
            layer.self_attn.attn = AttentionOfBoth.like(layer.self_attn.attn, vllm_config)

    def run(self, trunk: Callable[..., Tensor], ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Return [x | y], the trunk's last rows of both streams."""
        return side_by_side(trunk(ids_T, positions_T))

    def load(self, load: Callable[..., set[str]], weights: Weights) -> set[str]:
        """Load the base's weights by the model's own `load`, and put the adapter beside them."""
        tensors = {}

        def of_base() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name.startswith(_PREFIX):
                    tensors[name.removeprefix(_PREFIX)] = tensor
                else:
                    yield name, tensor

        loaded = load(of_base())
        loaded |= self._load_whole(tensors)
        self._put_beside(pairs_of(tensors, self._settings, self._folder))
        return loaded

    def head_products(self) -> HeadProducts:
        """Return products of x and y with the base's head, which is read once for both if the
        adapter has none of its own.
        """
        head = self._model.lm_head
        if "lm_head" in self._model.trained:
            return products_of_heads([head, self._model.trained["lm_head"]], self.sizes)
        if not is_readable(head):
            of_both = _of_both_rows(partial(whole_product, head))
            return HeadProducts(nn.ModuleList(), [of_both], None, trained_alone)
        weight = head.weight.data
        parts = [HeadPart(tile) for tile in tiles_of(weight)]
        tiles = [_of_both_rows(part) for part in parts]
        return HeadProducts(nn.ModuleList(parts), tiles, [weight, weight], trained_alone)

    def _load_whole(self, tensors: dict[str, Tensor]) -> set[str]:
        """Load what the adapter has whole, out of its tensors; return the names of the parameters."""
        config = self._model.config
        for name, module in self._model.trained.items():
            tensor = tensors.pop(_WHOLE[name], None)
            size = None if tensor is None else tuple(tensor.shape)
            if size != (config.vocab_size, config.hidden_size):
                raise ValueError(
                    f"{self._folder}: {_WEIGHTS} has {name} of size {size}, which is not the base's; "
                    "serve it with `scale serve --engine transformers`"
                )
            module.weight_loader(module.weight, tensor)
        return {f"trained.{name}.weight" for name in self._model.trained}

    def _put_beside(self, pairs: Mapping[str, Pair]) -> None:
        """Put A and B of each of the base's linear maps beside the layer that vLLM computes it in."""
        place_of = {
            part: (merged, index)
            for merged, parts in self._model.packed_modules_mapping.items()
            for index, part in enumerate(parts)
        }
        layers = dict(self._model.named_modules())
        of_layer: dict[str, dict[int | None, Pair]] = {}
        for name, pair in pairs.items():
            parent, _, last = name.rpartition(".")
            merged, index = place_of.get(last, (last, None))
            of_layer.setdefault(f"{parent}.{merged}", {})[index] = pair
        for name, parts in of_layer.items():
            layer = layers.get(name)
            if not isinstance(layer, LinearBase):
                raise ValueError(
                    f"{self._folder}: adapts {name}, which is no linear layer of vLLM's model; serve "
                    "it with `scale serve --engine transformers`"
                )
            layer.quant_method = LinearOfBoth(layer, parts)
        # vLLM finds a compiled trunk by its configuration, which knows nothing of adapters.
        ranks = {name: len(pair.down_RI) for name, pair in pairs.items()}
        adapter = {"ranks": ranks, "whole": [*self._model.trained]}
        others = self._vllm_config.additional_config
        self._vllm_config.additional_config = {**others, "scale_adapter": adapter}


def _of_both_rows(product: Callable[[Tensor], Tensor]) -> Products:
    """Return both streams' products by one call, for x and y as rows of their own."""

    def of_both(rows_TD: Tensor) -> tuple[Tensor, Tensor]:
        both = product(rows_TD.reshape(2 * len(rows_TD), -1))
        return both[::2], both[1::2]

    return of_both


def trained_whole(settings: Mapping[str, Any], config: Any) -> nn.ModuleDict:
    """Return what an adapter has whole, without weights yet: an embedding, a head, both or none."""
    asked = {name.rpartition(".")[2] for name in settings.get("modules_to_save") or []}
    if asked and config.tie_word_embeddings and settings.get("ensure_weight_tying"):
        asked |= {*_WHOLE}
    makers = {"embed_tokens": VocabParallelEmbedding, "lm_head": ParallelLMHead}
    sizes = (config.vocab_size, config.hidden_size)
    return nn.ModuleDict({name: makers[name](*sizes) for name in _WHOLE if name in asked})


def beside_own(own: nn.Module, _: nn.Module, ids: tuple[Tensor], rows_TD: Tensor) -> Tensor:
    """Return (2T, D): each token's row of the base's embedding, and that of the adapter's own."""
    return torch.stack([rows_TD, own(*ids)], dim=1).flatten(0, 1)


class AttentionOfBoth(Attention):
    """vLLM's attention, of the streams' heads side by side."""

    @classmethod
    def like(cls, one: Attention, vllm_config: Any) -> AttentionOfBoth:
        """Return it in the place of a layer of one stream."""
        del vllm_config.compilation_config.static_forward_context[one.layer_name]
        return cls(
            2 * one.num_heads,
            one.head_size,
            one.impl.scale,
            num_kv_heads=2 * one.num_kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=one.quant_config,
            logits_soft_cap=one.impl.logits_soft_cap,
            per_layer_sliding_window=one.sliding_window,
            attn_type=one.attn_type,
            prefix=one.layer_name,
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        beside_TD = super().forward(side_by_side(query), side_by_side(key), side_by_side(value))
        return beside_TD.view(query.shape)


class Pair(NamedTuple):
    """What an adapter adds to one linear map: (h A) B."""

    down_RI: Tensor
    up_OR: Tensor  # scaled


def pairs_of(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], folder: str
) -> dict[str, Pair]:
    """Return A and B of every linear map, from PEFT's files.

    ValueError: the adapter is more than these.
    """
    pairs = {}
    others = dict(tensors)
    for name in [name.removesuffix(_DOWN) for name in tensors if name.endswith(_DOWN)]:
        down_RI = others.pop(f"{name}{_DOWN}")
        rank = len(down_RI)
        of_name = (
            alpha
            for pattern, alpha in settings["alpha_pattern"].items()
            if re.match(rf"(.*\.)?({pattern})$", name)  # as PEFT matches it
        )
        alpha = next(of_name, settings["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if settings["use_rslora"] else rank)
        pairs[name] = Pair(down_RI, others.pop(f"{name}{_UP}") * scale)
    if others:
        raise ValueError(
            f"{folder}: {_WEIGHTS} has {min(others)}, which is not A or B of a linear layer; serve "
            "it with `scale serve --engine transformers`"
        )
    return pairs


class LinearOfBoth(QuantizeMethodBase):
    """A linear layer's own method, and behind it what the adapter adds to the second stream."""

    def __init__(self, layer: Any, parts: Mapping[int | None, Pair]) -> None:
        self.own = layer.quant_method
        self.requires_device_loading = self.own.requires_device_loading
        layer.adapter = _Adapter(layer, parts)

    def create_weights(self, *args: Any, **options: Any) -> None:
        """Do nothing: the layer has its weights."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the layer after its weights are loaded."""
        self.own.process_weights_after_loading(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        output = self.own.apply(layer, x, bias)
        layer.adapter.add(trained_rows(x), trained_rows(output))
        return output


class _Adapter(nn.Module):
    """This device's share of the adapters beside a layer, which may hold several linear maps."""

    down_RI: Tensor  # of all the maps

    def __init__(self, layer: Any, parts: Mapping[int | None, Pair]) -> None:
        super().__init__()
        downs = [
            _share(
                layer, down_RI, [len(down_RI), layer.input_size_per_partition], None, input_dim=1
            )
            for down_RI, _ in parts.values()
        ]
        self.register_buffer("down_RI", torch.cat(downs), persistent=False)
        self._ranks = [len(down_RI) for down_RI in downs]
        self._places = []
        for index, (_, up_OR) in parts.items():
            sizes = layer.output_partition_sizes
            whole = _share(layer, up_OR, [sum(sizes), up_OR.shape[1]], index, output_dim=0)
            start = sum(sizes[: index or 0])
            place = slice(start, start + sizes[index or 0])
            self.register_buffer(f"up_{index}", whole[place].T.contiguous(), persistent=False)
            self._places.append((f"up_{index}", place))

    def add(self, rows_TI: Tensor, output_TO: Tensor) -> None:
        """Add (h A) B to the layer's output."""
        low_TR = F.linear(rows_TI, self.down_RI).split(self._ranks, dim=-1)
        for of_map_TR, (name, place) in zip(low_TR, self._places, strict=True):
            output_TO[:, place].addmm_(of_map_TR, getattr(self, name))


def _share(
    layer: Any, whole: Tensor, sizes: Sequence[int], index: int | None, **dimension: int
) -> Tensor:
    """Return a device's share of a matrix, in zeros of some sizes, by the layer's own loader."""
    weight = next(layer.parameters())
    share = nn.Parameter(torch.zeros(sizes, dtype=layer.params_dtype, device=weight.device), False)
    set_weight_attrs(share, dimension)
    named = "qkv"[index] if index is not None and isinstance(layer, QKVParallelLinear) else index
    layer.weight_loader(share, whole, *(() if index is None else (named,)))
    return share.data
