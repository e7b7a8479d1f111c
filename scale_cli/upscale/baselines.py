"""The baselines: what a base model becomes under a method that widens nothing, and which of its weights train.

| variant   | added                                        | trains                                            |
|-----------|----------------------------------------------|---------------------------------------------------|
| full      | nothing                                      | everything                                        |
| freeze    | nothing                                      | all but the input embedding and the bottom layers |
| lora      | low-rank A and B beside target projections   | A and B; embedding and head too, where asked for  |
| osf       | every target matrix as its SVD, in two parts | that part which has the smaller singular values   |
| llama-pro | copied layers, their o_proj and down_proj 0  | the copies                                        |
| adept     | the same, of the layers whose bypass hurts   | the copies, each tensor at a rate of its own      |
|           | least on what the base knows                 | (`training/tensor_rates.py`)                      |
| elo       | nothing                                      | first and last layer, over none between; then     |
|           |                                              | everything                                        |

LoRA (B = 0), LLaMA-Pro and ADEPT (a layer that adds nothing) start as the base model, bit for bit; OSF when merged.

Sources: SCALE, arXiv 2511.03270 (freeze: the bottom three layers and the input embedding); LoRA, arXiv 2106.09685, by
PEFT; OSF, orthogonal subspace fine-tuning, arXiv 2504.07097, by PEFT; LLaMA-Pro, arXiv 2401.02415; ADEPT, arXiv
2510.10071; ELO, arXiv 2601.03648.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from scale_cli.config.schema import MethodConfig
from scale_cli.errors import ConfigError
from scale_cli.extras import require

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

# Of a model that trains some layers over none in between: which (`upscale/objective.py`).
TRAINED_ALONE = "layers_trained_alone"


def prepare_baseline(base: PreTrainedModel, method: MethodConfig, seed: int) -> PreTrainedModel | PeftModel:
    """Return the model that a baseline trains, trainability decided; `base` may become a part of it.

    What trains is held in float32, whatever the base's dtype: it is the master copy that the optimiser updates.
    """
    if method.trains_base_weights:
        base.float()
    if method.variant == "lora":
        return _lora(base, method, seed)
    if method.variant == "osf":
        return _osf(base, method)
    if method.variant in ("llama-pro", "adept"):
        return _deeper(base, method)
    if method.variant == "elo" and method.elo.phase == "layers":
        return _ends_alone(base)
    base.requires_grad_(True)
    if method.variant == "freeze":
        return _freeze(base, method)
    assert method.variant in ("full", "elo"), method.variant
    return base


def _freeze(base: PreTrainedModel, method: MethodConfig) -> PreTrainedModel:
    layers, count = base.model.layers, method.freeze.num_layers
    if count > len(layers):
        raise ConfigError(f"method.freeze.num_layers: {count}, but the base has {len(layers)} layers")
    # Where the embeddings are tied this freezes the head too: they are one tensor.
    for frozen in (base.model.embed_tokens, *layers[:count]):
        frozen.requires_grad_(False)
    return base


def _lora(base: PreTrainedModel, method: MethodConfig, seed: int) -> PeftModel:
    require("peft", "method.variant lora")
    from peft import LoraConfig  # takes a moment, and only this needs it

    lora = method.lora
    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rank_stabilised,
        target_modules=list(lora.targets),
        lora_dropout=0.0,
        modules_to_save=["embed_tokens", "lm_head"] if lora.embeddings else None,
        ensure_weight_tying=lora.embeddings and base.config.tie_word_embeddings,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _by_peft(base, settings, "method.lora.targets")


def _osf(base: PreTrainedModel, method: MethodConfig) -> PeftModel:
    require("peft", "method.variant osf")
    from peft.tuners.osf import OSFConfig

    settings = OSFConfig(task_type="CAUSAL_LM", effective_rank=method.osf.kept, target_modules=list(method.osf.targets))
    return _by_peft(base, settings, "method.osf")


def _by_peft(base: PreTrainedModel, settings: PeftConfig, key: str) -> PeftModel:
    from peft import get_peft_model

    try:
        return get_peft_model(base, settings)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


def _ends_alone(base: PreTrainedModel) -> PreTrainedModel:
    """Let the first and the last layer train, and a training step compute no other."""
    ends = ends_of(len(base.model.layers))
    for layer in ends:
        base.model.layers[layer].requires_grad_(True)
    setattr(base, TRAINED_ALONE, ends)
    return base


def ends_of(num_layers: int) -> list[int]:
    """Return the first and the last of some layers."""
    return sorted({0, num_layers - 1})


def _deeper(base: PreTrainedModel, method: MethodConfig) -> PreTrainedModel:
    order = deeper_order(base.config.num_hidden_layers, copied_layers(base.config.num_hidden_layers, method))
    sizes: dict[str, Any] = {"num_hidden_layers": len(order)}
    if kinds := getattr(base.config, "layer_types", None):
        sizes["layer_types"] = [kinds[source] for source, _ in order]
    config = type(base.config).from_dict({**base.config.to_dict(), **sizes})
    deeper: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=base.dtype)
    weights = base.state_dict()
    tensors = {name: tensor for name, tensor in weights.items() if not name.startswith("model.layers.")}
    for place, (source, added) in enumerate(order):
        prefix = f"model.layers.{source}."
        for name, tensor in weights.items():
            if name.startswith(prefix):
                silent = added and ("o_proj." in name or "down_proj." in name)
                tensors[f"model.layers.{place}.{name.removeprefix(prefix)}"] = tensor * 0 if silent else tensor
    deeper.load_state_dict(tensors, strict=True)
    deeper.generation_config = base.generation_config
    deeper.requires_grad_(False)
    for layer, (_, added) in zip(deeper.model.layers, order, strict=True):
        layer.requires_grad_(added)
    return deeper


def copied_layers(num_layers: int, method: MethodConfig) -> list[int]:
    """Return the base's layers that LLaMA-Pro or ADEPT copies; of ADEPT, before they are found, as many of them.

    Where the method leaves their number open it is one in four, as in the papers; at even spacing.
    """
    given, section = (method.adept, "adept") if method.variant == "adept" else (method.llama_pro, "llama_pro")
    if method.variant == "adept" and method.adept.layers is not None:
        if (highest := max(method.adept.layers)) >= num_layers:
            raise ConfigError(f"method.adept.layers: {highest}, but the base has {num_layers} layers, from 0")
        return sorted(method.adept.layers)
    if method.variant == "adept" and num_layers < 2:
        raise ConfigError("method.adept.layers: the base has a single layer, which cannot be done without; name it")
    num_blocks = max(1, num_layers // 4) if given.num_blocks is None else given.num_blocks
    if num_blocks > num_layers:
        raise ConfigError(f"method.{section}.num_blocks: {num_blocks}, but the base has {num_layers} layers")
    return [round((index + 1) * num_layers / num_blocks) - 1 for index in range(num_blocks)]


def deeper_order(num_layers: int, copied: Collection[int]) -> list[tuple[int, bool]]:
    """Return the layers of a deeper model, bottom up: which base layer each comes from, and whether it is a copy.

    A copy is right above the layer that it is of.
    """
    return [(layer, added) for layer in range(num_layers) for added in ([False, True] if layer in copied else [False])]
