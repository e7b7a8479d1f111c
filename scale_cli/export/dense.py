"""The widened model as a plain dense model of its family: one larger matrix for every four blocks, no custom code.

This is exact if the base stream's RMS normalises both streams. Let x have d channels and u have d'. Store them as one
stream [a x ; b u] with powers of two a and b. Let b / a be so small that u does not count in the joint mean square:

    rms([a x ; b u]; eps') = sqrt((a^2 |x|^2 + b^2 |u|^2) / (d + d') + eps')  ->  a sqrt(d / (d + d')) rms(x; eps)

with eps' = a^2 eps d / (d + d'). So the gains become g sqrt(d / (d + d')) for x and g' (a / b) sqrt(d / (d + d')) for
u. Every row that writes x or u into the stream is multiplied by a or by b, which is lossless in floating point.
Stacked or parallel expansions are stored one after another; d' is the channels of all of them.

Every other norm is treated in the same way, with the same eps':

- A norm of what a layer writes (o, down): these rows are stored as x and u are. The output must be [a y ; b y'], so the
  gains are a g sqrt(d / (d + d')) and a g' sqrt(d / (d + d')).
- A norm of one head's queries or keys: rms(q; eps') is sqrt(eps' / eps) times rms(q; eps) if q is larger by the same
  factor. So the rows that make q are multiplied by it. The gains are the same for all heads.
- A norm of all queries or keys together, n of the base's and n' more: the rows of q are multiplied by s, those of q' by
  s b / a, with s^2 = (eps' / eps) (n + n') / n. The gains are those of a norm of the stream, with n instead of d.

Maps that read the stream without a norm have their columns divided by a and by b. Gains that a family stores as
w = g - 1 are stored so. If a family multiplies the embedding by the root of the width, its rows are divided by that.

Source: ours (docs/serving.md). Only b / a matters for exactness; the split keeps weights in the range of fp16 and int8.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from scale_cli.methods.starts import random_ids
from scale_cli.model.dense_blocks import dense_embedding, dense_weight, widened_linears
from scale_cli.model.expansion_scale import ExpansionLayer, ExpansionLinear, ExpansionNorm
from scale_cli.model.family_scale import OWNERS, READ_BY_ATTENTION, READ_BY_MLP, Family, family_of
from scale_cli.model.modeling_scale import WidenedModel
from scale_cli.upscale.building import MethodModel
from scale_cli.upscale.stream_ratios import expansion_norms, measured_stream_ratios


@dataclass(frozen=True)
class StreamScales:
    """The powers of two by which x and u are multiplied when stored."""

    base: float
    expansion: float


_ONCE = StreamScales(1.0, 1.0)
# u adds (b/a)^2 |u|^2/|x|^2 to the joint mean square. With these scales that is below the rounding of the dtype, for a
# u of up to _COVERED times the size of x. If training makes u larger still, u is stored smaller by as much.
# In float16 a smaller b would push the rows that write u below the smallest normal number, 6e-5. In f16 and q8_0 that
# costs more than u's part of the mean square, so there a u that is large at few tokens may count.
_SCALES = {
    "float32": StreamScales(2.0**4, 2.0**-12),
    "bfloat16": StreamScales(2.0**2, 2.0**-6),
    "float16": StreamScales(2.0**3, 2.0**-8),
}
_COVERED = {"float32": 16.0, "bfloat16": 8.0, "float16": 256.0}
_LARGEST_GAIN = {"float32": 2.0**60, "bfloat16": 2.0**60, "float16": 2.0**15}


def dense_model(model: WidenedModel, dtype: str, prompts: Sequence[Tensor] = ()) -> PreTrainedModel:
    """Return a plain model of the base's own class with the trained head's logits, computed in float32.

    Parallel expansions have no joint trained head: the logits are the base's plus what each expansion adds. The size of
    u relative to x is measured on prompts, (1, T) ids; without prompts, on random tokens.
    """
    measured = largest_stream_ratio(model, prompts or [random_ids(model.root, seed=0)])
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
    factor = float(family_of(model.root.config).embedding_factor(dense.get_input_embeddings()))
    with torch.no_grad():
        # Each tensor is made in float32, and lowered before the next one.
        for name, tensor in _dense_tensors(model, scales, factor):
            parameters.pop(name).copy_(tensor)
    assert not parameters, f"every tensor of a plain model is made: {list(parameters)}"
    dense.generation_config = model.root.generation_config
    return dense.eval()


@torch.no_grad()
def largest_stream_ratio(model: WidenedModel, prompts: Sequence[Tensor]) -> float:
    """Return the largest rms(u) / rms(x) that any norm meets on some (1, T) prompts."""
    with measured_stream_ratios(model) as ratios:
        for input_ids in prompts:
            model.final_states(input_ids, preserved=False)
    return max(ratio.nan_to_num(0.0, posinf=0.0).item() for ratio in ratios.values())


def plain_model(model: MethodModel, dtype: str, prompts: Sequence[Tensor] = ()) -> PreTrainedModel:
    """Return any method's trained model as a plain one: widened models made dense, LoRA merged, others as they are."""
    if isinstance(model, WidenedModel):
        return dense_model(model, dtype, prompts)
    plain = copy.deepcopy(model).float()
    if not isinstance(plain, PreTrainedModel):
        plain = plain.merge_and_unload()
    lower_weights(plain, getattr(torch, dtype))
    return plain.eval()


def lower_weights(model: MethodModel, dtype: torch.dtype) -> None:
    """Convert every weight to a dtype, in place.

    Unlike `Module.to`, it does not round RoPE's frequencies: models loaded from a folder always have them in float32.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def dense_config(model: WidenedModel, scales: StreamScales) -> PreTrainedConfig:
    base = model.root.config.to_dict()
    widened = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes = {
        name: base[name]
        + sum(getattr(stage, f"expansion_{name}") for stage in model.config.stages())
        for name in widened
    }
    base |= {
        "head_dim": model.root.model.layers[0].self_attn.head_dim,
        "rms_norm_eps": _eps_growth(model, scales) * base["rms_norm_eps"],
        "tie_word_embeddings": False,
        "vocab_size": model.config.vocab_size,
        **sizes,
    }
    return AutoConfig.for_model(base.pop("model_type"), **base)


def _eps_growth(model: WidenedModel, scales: StreamScales) -> float:
    """Return eps' / eps: the factor by which the mean square that any norm reads grows."""
    num_base: int = model.root.config.hidden_size
    num_added = sum(stage.expansion_hidden_size for stage in model.config.stages())
    return scales.base**2 * num_base / (num_base + num_added)


def _dense_tensors(
    model: WidenedModel, scales: StreamScales, embedding_factor: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the plain model; that model multiplies its embedding by `embedding_factor`."""
    base, stages = model.root, [branch.expansion for branch in model.branches]
    decoder, family, num_base = base.model, family_of(base.config), base.config.hidden_size
    embedding = dense_embedding(base, stages)
    embedding[:, :num_base] *= scales.base / embedding_factor
    embedding[:, num_base:] *= scales.expansion / embedding_factor
    yield "model.embed_tokens.weight", embedding
    yield (
        "model.norm.weight",
        _joined_gains(family, decoder.norm, [stage.norm.weight for stage in stages], scales),
    )
    yield "lm_head.weight", _joined_head(model)
    for index, (base_layer, *layers) in enumerate(
        zip(decoder.layers, *(s.layers for s in stages), strict=True)
    ):
        norms, maps = (
            _layer_norms(family, base_layer, layers, scales),
            _layer_maps(model, base_layer, layers, scales),
        )
        for name, tensor in family.packed(chain(norms, maps)):
            yield f"model.layers.{index}.{name}", tensor


def _layer_norms(
    family: Family, base_layer: Any, layers: Sequence[ExpansionLayer], scales: StreamScales
) -> Iterator[tuple[str, Tensor]]:
    def joined(owner: Any, name: str, wanted: StreamScales = _ONCE) -> Tensor:
        return _joined_gains(
            family, getattr(owner, name), [_gains(layer, name) for layer in layers], scales, wanted
        )

    for name in family.norms_of_read:
        yield f"{name}.weight", joined(base_layer, name)
    for name in family.norms_of_written:
        yield f"{name}.weight", joined(base_layer, name, scales)
    attention = base_layer.self_attn
    for name in filter(None, family.width_norms):
        yield f"self_attn.{name}.weight", joined(attention, name)
    for name in family.head_norms or ():  # over one head's channels: the same for added heads
        yield f"self_attn.{name}.weight", getattr(attention, name).weight.float()


def _layer_maps(
    model: WidenedModel, base_layer: Any, layers: Sequence[ExpansionLayer], scales: StreamScales
) -> Iterator[tuple[str, Tensor]]:
    family, parents = family_of(model.root.config), [branch.parent for branch in model.branches]
    eps_growth = _eps_growth(model, scales)
    as_stored = StreamScales(
        1.0 / scales.base, 1.0 / scales.expansion
    )  # columns that read the stream without a norm
    columns = dict.fromkeys(OWNERS, _ONCE)
    columns |= dict.fromkeys(READ_BY_ATTENTION, _ONCE if family.before_attention else as_stored)
    columns |= dict.fromkeys(READ_BY_MLP, _ONCE if family.before_mlp else as_stored)
    rows = dict.fromkeys(OWNERS, _ONCE) | {
        "o_proj": scales,
        "down_proj": scales,
    }  # those two write into the stream
    if family.head_norms is not None:
        rows |= dict.fromkeys(("q_proj", "k_proj"), StreamScales(eps_growth**0.5, eps_growth**0.5))
    for name, norm in zip(("q_proj", "k_proj"), family.width_norms, strict=True):
        if norm is not None:
            num_base, num_all = _widths(
                getattr(base_layer.self_attn, norm), [_gains(layer, norm) for layer in layers]
            )
            size = (eps_growth * num_all / num_base) ** 0.5
            rows[name] = StreamScales(size, size * scales.expansion / scales.base)
    for name, frozen, added in widened_linears(family, base_layer, layers):
        for kind, tensor in _joined_linear(
            frozen, added, parents, columns[name], rows[name]
        ).items():
            yield f"{OWNERS[name]}.{name}.{kind}", tensor
    if not layers[0].has_mlp:  # experts and their gate read only x, and write only into x
        mlp, num_added = (
            base_layer.mlp,
            sum(stage.expansion_hidden_size for stage in model.config.stages()),
        )
        yield "mlp.gate.weight", F.pad(mlp.gate.weight.float(), (0, num_added))
        yield "mlp.experts.gate_up_proj", F.pad(mlp.experts.gate_up_proj.float(), (0, num_added))
        yield (
            "mlp.experts.down_proj",
            F.pad(scales.base * mlp.experts.down_proj.float(), (0, 0, 0, num_added)),
        )


def _joined_head(model: WidenedModel) -> Tensor:
    """Return [H, H'_1, ...], with the rows of new tokens below H."""
    base: Tensor = model.root.lm_head.weight
    added = [branch.expansion.lm_head.weight for branch in model.branches]
    widths = [base.shape[1], *(weight.shape[1] for weight in added)]
    whole = base.new_zeros(model.config.vocab_size, sum(widths), dtype=torch.float32)
    of_x, *of_stages = whole.split(widths, dim=1)
    of_x[: len(base)] = base
    for head, (branch, columns) in enumerate(zip(model.branches, of_stages, strict=True), start=1):
        weight, new = branch.expansion.lm_head.weight, branch.expansion.new_tokens
        knows_all = len(weight) == len(whole)
        ids = torch.tensor(
            range(len(whole)) if knows_all else model.config.token_ids(head)[: len(weight)]
        )
        columns[ids] = weight.float()
        if new is not None:
            of_x[ids[len(base) :]] += new.lm_head.weight.float()
    return whole


def _gains(layer: ExpansionLayer, name: str) -> Tensor:
    """Return the added gains of a norm; zeros for the norm before a sparse MLP, which does not read u."""
    norm: ExpansionNorm | None = getattr(layer, name, None)
    return torch.zeros(len(layer.o_proj.weight_22)) if norm is None else norm.weight.float()


def _widths(frozen: Any, added: Sequence[Tensor]) -> tuple[int, int]:
    num_base = len(frozen.weight)
    return num_base, num_base + sum(map(len, added))


def _joined_gains(
    family: Family,
    frozen: Any,
    added: Sequence[Tensor],
    scales: StreamScales,
    wanted: StreamScales = _ONCE,
) -> Tensor:
    """Return the weight of a norm over all streams, stored with `scales`, whose output has the scales `wanted`."""
    num_base, num_all = _widths(frozen, added)
    of_base = wanted.base * family.norm_form.gains(frozen.weight.float())
    of_added = [wanted.expansion * (scales.base / scales.expansion) * gains for gains in added]
    return family.norm_form.weight((num_base / num_all) ** 0.5 * torch.cat([of_base, *of_added]))


def _joined_linear(
    frozen: nn.Linear,
    added: Sequence[ExpansionLinear],
    parents: Sequence[int],
    columns: StreamScales,
    rows: StreamScales,
) -> dict[str, Tensor]:
    joined = {"weight": dense_weight(frozen, added, parents)}
    joined["weight"][:, : frozen.in_features] *= columns.base
    joined["weight"][:, frozen.in_features :] *= columns.expansion
    if frozen.bias is not None:
        biases = [linear.bias_2 for linear in added if linear.bias_2 is not None]
        joined["bias"] = torch.cat([frozen.bias.float(), *(bias.float() for bias in biases)])
    for tensor in joined.values():
        tensor[: frozen.out_features] *= rows.base
        tensor[frozen.out_features :] *= rows.expansion
    return joined
