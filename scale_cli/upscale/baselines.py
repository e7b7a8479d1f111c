"""The baselines: what a base model becomes under a method that widens nothing, and which of its weights train.

| variant   | added                                        | trains                                            |
|-----------|----------------------------------------------|---------------------------------------------------|
| full      | nothing                                      | everything                                        |
| freeze    | nothing                                      | all but the input embedding and the bottom layers |
| lora      | low-rank A and B beside target projections   | A and B; embedding and head too, where asked for  |
| osf       | every target matrix as its SVD, in two parts | that part which has the smaller singular values   |
| llama-pro | copied layers, their o_proj and down_proj 0  | the copies                                        |

LoRA (B = 0) and LLaMA-Pro (a layer that adds nothing) start as the base model, bit for bit; OSF does when merged.

Sources: SCALE, arXiv 2511.03270 (freeze: the bottom three layers and the input embedding); LoRA, arXiv 2106.09685, by
PEFT; OSF, orthogonal subspace fine-tuning, arXiv 2504.07097, by PEFT; LLaMA-Pro, arXiv 2401.02415.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from scale_cli.config.schema import MethodConfig
from scale_cli.errors import ConfigError
from scale_cli.extras import require

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


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
    if method.variant == "llama-pro":
        return _llama_pro(base, method)
    base.requires_grad_(True)
    return _freeze(base, method) if method.variant == "freeze" else base


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


def _llama_pro(base: PreTrainedModel, method: MethodConfig) -> PreTrainedModel:
    order = deeper_order(base.config.num_hidden_layers, method.llama_pro.num_blocks)
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


def deeper_order(num_layers: int, num_blocks: int | None) -> list[tuple[int, bool]]:
    """Return the layers of a LLaMA-Pro model, bottom up: which base layer each comes from, and whether it is a copy.

    Args:
        num_layers: of the base.
        num_blocks: copies, at even spacing, each above the layer it copies; None for one in four, as in the paper.
    """
    num_blocks = max(1, num_layers // 4) if num_blocks is None else num_blocks
    if num_blocks > num_layers:
        raise ConfigError(f"method.llama_pro.num_blocks: {num_blocks}, but the base has {num_layers} layers")
    copied = {round((index + 1) * num_layers / num_blocks) - 1 for index in range(num_blocks)}
    order = []
    for layer in range(num_layers):
        order.append((layer, False))
        if layer in copied:
            order.append((layer, True))
    return order
