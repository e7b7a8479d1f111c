"""The widened model as a plain dense model of its family: one larger matrix for every four blocks,
no custom code.

This is exact if the base stream's RMS normalises both streams. Let x have d channels and u have d'.
Store them as one stream [a x ; b u] with powers of two a and b. Let b / a be so small that u does
not count in the joint mean square:

    rms([a x ; b u]; eps') = sqrt((a^2 |x|^2 + b^2 |u|^2) / (d + d') + eps')  ->  a sqrt(d / (d + d')) rms(x; eps)

with eps' = a^2 eps d / (d + d'). So the gains become g sqrt(d / (d + d')) for x and g' (a / b)
sqrt(d / (d + d')) for u. Every row that writes x or u into the stream is multiplied by a or by b,
which is lossless in floating point.

Every other norm is treated in the same way, with the same eps':

- A norm of what a layer writes (o, down): these rows are stored as x and u are. The output must be
  [a y ; b y'], so the gains are a g sqrt(d / (d + d')) and a g' sqrt(d / (d + d')).
- A norm of one head's queries or keys: rms(q; eps') is sqrt(eps' / eps) times rms(q; eps) if q is
  larger by the same factor. So the rows that make q are multiplied by it. The gains are the same
  for all heads.
- A norm of all queries or keys together, n of the base's and n' more: the rows of q are multiplied
  by s, those of q' by s b / a, with s^2 = (eps' / eps) (n + n') / n. The gains are those of a norm
  of the stream, with n instead of d.

Maps that read the stream without a norm have their columns divided by a and by b. Gains that a
family stores as w = g - 1 are stored so. If a family multiplies the embedding by the root of the
width, its rows are divided by that.

Source: ours (docs/serving.md). Only b / a matters for exactness; the split keeps weights in the
range of fp16 and int8.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from scale_cli.methods.starts.stream_sizes import random_ids
from scale_cli.model.expansion_scale import ExpansionLinear
from scale_cli.model.family_scale import ATTENTION, OWNERS, SUBLAYERS, Family, family_of, linear_of
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.upscale.building import MethodModel
from scale_cli.upscale.quantised_base import plain_weight
from scale_cli.upscale.stream_ratios import expansion_norms, measured_stream_ratios


@dataclass(frozen=True)
class StreamScales:
    """The powers of two by which x and u are multiplied when stored."""

    base: float
    expansion: float


# Says in config.json that some rows of a plain model are stored small.
WIDENED_KEY = "scale_widened"
SAME_SCALES = StreamScales(1.0, 1.0)
# Sizes that an expansion adds to, in the order of reports.
WIDENED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
# u adds (b/a)^2 |u|^2/|x|^2 to the joint mean square. With these scales that is below the rounding
# of the dtype, for a u of up to _COVERED times the size of x. If training makes u larger still, u
# is stored smaller by as much. In float16 a smaller b would push the rows that write u below the
# smallest normal number, 6e-5. In f16 and q8_0 that costs more than u's part of the mean square, so
# there a u that is large at few tokens may count.
_SCALES = {
    "float32": StreamScales(2.0**4, 2.0**-12),
    "bfloat16": StreamScales(2.0**2, 2.0**-6),
    "float16": StreamScales(2.0**3, 2.0**-8),
}
_COVERED = {"float32": 16.0, "bfloat16": 8.0, "float16": 256.0}
_LARGEST_GAIN = {"float32": 2.0**60, "bfloat16": 2.0**60, "float16": 2.0**15}


def dense_model(
    model: ScaleForCausalLM, dtype: str, prompts: Sequence[Tensor] = ()
) -> PreTrainedModel:
    """Return a plain model of the base's own class with the trained head's logits, computed in
    float32.

    The size of u relative to x is measured on prompts, (1, T) ids; without prompts, on random
    tokens.
    """
    measured = largest_stream_ratio(model, prompts or [random_ids(model.base, seed=0)])
    excess = max(1.0, measured / _COVERED[dtype])
    scales = _SCALES[dtype]
    expansion = scales.expansion * 2.0 ** -math.ceil(math.log2(excess))
    # The gains of u are divided by the same scale; float16 has no number beyond 65,504.
    largest_gain = max(norm.weight.abs().max().item() for norm in expansion_norms(model).values())
    smallest = scales.base * 2.0 ** math.ceil(math.log2(largest_gain / _LARGEST_GAIN[dtype]))
    scales = replace(scales, expansion=max(expansion, smallest))
    with no_init_weights():
        dense: PreTrainedModel = AutoModelForCausalLM.from_config(
            dense_config(model, scales), dtype=getattr(torch, dtype)
        )
    parameters = dict(dense.named_parameters())
    factor = float(family_of(model.base.config).embedding_factor(dense.get_input_embeddings()))
    with torch.no_grad():
        # Each tensor is made in float32, and lowered before the next one.
        for name, tensor in _dense_tensors(model, scales, factor):
            parameters.pop(name).copy_(tensor)
    assert not parameters, f"every tensor of a plain model is made: {list(parameters)}"
    dense.generation_config = model.base.generation_config
    return dense.eval()


@torch.no_grad()
def largest_stream_ratio(model: ScaleForCausalLM, prompts: Sequence[Tensor]) -> float:
    """Return the largest rms(u) / rms(x) that any norm meets on some (1, T) prompts."""
    with measured_stream_ratios(model) as ratios:
        for input_ids in prompts:
            model.final_states(input_ids, with_base_head=False)
    return max(ratio.nan_to_num(0.0, posinf=0.0).item() for ratio in ratios.values())


def plain_model(model: MethodModel, dtype: str, prompts: Sequence[Tensor] = ()) -> PreTrainedModel:
    """Return any method's trained model as a plain one: widened models made dense, LoRA merged,
    others as they are.
    """
    if isinstance(model, ScaleForCausalLM):
        return dense_model(model, dtype, prompts)
    plain = copy.deepcopy(model).float()
    if not isinstance(plain, PreTrainedModel):
        plain = plain.merge_and_unload()
    convert_parameters(plain, getattr(torch, dtype))
    return plain.eval()


def convert_parameters(model: MethodModel, dtype: torch.dtype) -> None:
    """Convert every parameter to a dtype, in place.

    Unlike `Module.to`, it does not round RoPE's frequencies: models loaded from a folder always
    have them in float32.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def dense_config(model: ScaleForCausalLM, scales: StreamScales) -> PreTrainedConfig:
    base = model.base.config.to_dict()
    for name in WIDENED:
        base[name] += getattr(model.config, f"expansion_{name}")
    base |= {
        "head_dim": model.base.model.layers[0].self_attn.head_dim,
        "rms_norm_eps": _eps_growth(model, scales) * base["rms_norm_eps"],
        "tie_word_embeddings": False,
        "vocab_size": model.config.vocab_size,
        # Whoever trains it further has to know (docs/after-training.md).
        WIDENED_KEY: True,
    }
    return AutoConfig.for_model(base.pop("model_type"), **base)


def _eps_growth(model: ScaleForCausalLM, scales: StreamScales) -> float:
    """Return eps' / eps: the factor by which the mean square that any norm reads grows."""
    num_base: int = model.base.config.hidden_size
    return scales.base**2 * num_base / (num_base + model.expansion.lm_head.in_features)


def _dense_tensors(
    model: ScaleForCausalLM, scales: StreamScales, embedding_factor: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the plain model; that model multiplies its embedding by `embedding_factor`."""
    base = model.base
    expansion = model.expansion
    new = expansion.new_tokens
    family = family_of(base.config)
    num_base = base.config.hidden_size

    of_x = family.token_rows(base)
    of_new = None if new is None else new.embed_tokens.weight
    embedding = _joined_rows(of_x, of_new, expansion.embed_tokens.weight)
    embedding[:, :num_base] *= scales.base / embedding_factor
    embedding[:, num_base:] *= scales.expansion / embedding_factor
    yield "model.embed_tokens.weight", embedding

    gains = _joined_gains(family, base.model.norm, expansion.norm, scales)
    yield "model.norm.weight", gains
    of_new = None if new is None else new.lm_head.weight
    yield "lm_head.weight", _joined_rows(base.lm_head.weight, of_new, expansion.lm_head.weight)

    for index, (base_layer, layer) in enumerate(
        zip(base.model.layers, expansion.layers, strict=True)
    ):
        for tensors in (_layer_norms, _layer_maps):
            for name, tensor in tensors(model, base_layer, layer, scales):
                yield f"model.layers.{index}.{name}", tensor


def _layer_norms(
    model: ScaleForCausalLM, base_layer: Any, layer: Any, scales: StreamScales
) -> Iterator[tuple[str, Tensor]]:
    family = family_of(model.base.config)
    attention = base_layer.self_attn

    def joined(owner: Any, name: str, wanted: StreamScales = SAME_SCALES) -> Tensor:
        return _joined_gains(family, getattr(owner, name), getattr(layer, name), scales, wanted)

    for sublayer in SUBLAYERS:
        before, after = family.norms_around(sublayer)
        if before is not None:
            yield f"{before}.weight", joined(base_layer, before)
        if after is not None:
            yield f"{after}.weight", joined(base_layer, after, scales)
    for name in filter(None, family.width_norms):
        yield f"self_attn.{name}.weight", joined(attention, name)
    for name in family.head_norms or ():  # over one head's channels: the same for added heads
        yield f"self_attn.{name}.weight", getattr(attention, name).weight.float()


def _layer_maps(
    model: ScaleForCausalLM, base_layer: Any, layer: Any, scales: StreamScales
) -> Iterator[tuple[str, Tensor]]:
    family = family_of(model.base.config)
    eps_growth = _eps_growth(model, scales)
    columns = dict.fromkeys(OWNERS, SAME_SCALES)
    rows = dict.fromkeys(OWNERS, SAME_SCALES)
    for sublayer in SUBLAYERS:
        before, _ = family.norms_around(sublayer)
        if before is None:  # these columns read the stream as it is stored
            as_stored = StreamScales(1.0 / scales.base, 1.0 / scales.expansion)
            columns |= dict.fromkeys(sublayer.reading, as_stored)
        rows[sublayer.writing] = scales
    queries_keys = ATTENTION.reading[:2]
    if family.head_norms is not None:
        rows |= dict.fromkeys(queries_keys, StreamScales(eps_growth**0.5, eps_growth**0.5))
    for name, norm in zip(queries_keys, family.width_norms, strict=True):
        if norm is not None:
            num_base = len(getattr(base_layer.self_attn, norm).weight)
            num_all = num_base + len(getattr(layer, norm).weight)
            size = (eps_growth * num_all / num_base) ** 0.5
            rows[name] = StreamScales(size, size * scales.expansion / scales.base)

    for name, owner in OWNERS.items():
        joined = _joined_linear(
            linear_of(base_layer, name), getattr(layer, name), columns[name], rows[name]
        )
        for kind, tensor in joined.items():
            yield f"{owner}.{name}.{kind}", tensor


def _joined_rows(of_x: Tensor, of_new: Tensor | None, of_u: Tensor) -> Tensor:
    """Return (V, channels of both streams) in float32: each token's rows, those of new tokens last."""
    num_old, num_base = of_x.shape
    whole = of_x.new_empty(len(of_u), num_base + of_u.shape[1], dtype=torch.float32)
    whole[:num_old, :num_base] = of_x
    if of_new is not None:
        whole[num_old:, :num_base] = of_new
    whole[:, num_base:] = of_u
    return whole


def _joined_gains(
    family: Family,
    frozen: Any,
    added: Any,
    scales: StreamScales,
    wanted: StreamScales = SAME_SCALES,
) -> Tensor:
    """Return the weight of a norm over both streams, stored with `scales`, whose output has the
    scales `wanted`.
    """
    num_base = len(frozen.weight)
    of_x = wanted.base * family.norm_form.gains(frozen.weight.float())
    of_u = wanted.expansion * (scales.base / scales.expansion) * added.weight.float()
    size = (num_base / (num_base + len(of_u))) ** 0.5
    return family.norm_form.weight(size * torch.cat([of_x, of_u]))


def _joined_linear(
    frozen: nn.Linear, added: ExpansionLinear, columns: StreamScales, rows: StreamScales
) -> dict[str, Tensor]:
    """Return [[W, W12], [W21, W22]] in float32, scaled, and the biases."""
    num_out = frozen.out_features
    num_in = frozen.in_features
    weight_21 = added.weight_21
    size = (num_out + len(weight_21), num_in + added.in_features)
    weight = weight_21.new_zeros(size, dtype=torch.float32)
    weight[:num_out, :num_in] = plain_weight(frozen)
    if added.weight_12 is not None:
        weight[:num_out, num_in:] = added.weight_12
    weight[num_out:, :num_in] = weight_21
    if added.weight_22 is not None:
        weight[num_out:, num_in:] = added.weight_22
    weight[:, :num_in] *= columns.base
    weight[:, num_in:] *= columns.expansion
    joined = {"weight": weight}
    if frozen.bias is not None:
        biases = [frozen.bias] if added.bias_2 is None else [frozen.bias, added.bias_2]
        joined["bias"] = torch.cat([bias.float() for bias in biases])
    for tensor in joined.values():
        tensor[:num_out] *= rows.base
        tensor[num_out:] *= rows.expansion
    return joined
