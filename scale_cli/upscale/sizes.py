"""How much is added where: from a ratio and a choice of layers to the sizes of an expansion."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from scale_cli.config.schema import CollaborationConfig, MethodConfig, RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.errors import ConfigError
from scale_cli.model.configuration_scale import ScaleConfig
from scale_cli.upscale.vocabulary import NewPieces

# Where a config leaves collaboration.layers out.
_DEFAULT_LAYERS = {"preserve": "none", "adapt": "all", "route": "none"}


def plan_expansion(base_config: Any, method: MethodConfig, new: NewPieces | None = None) -> ScaleConfig:
    """Return the configuration of the widened model.

    A widened base is widened by a share of the plain model at its bottom, whatever was added before.

    Whole key/value heads are added, at the base's head_dim and query to key/value ratio, so a ratio is rounded to a
    multiple of 1 / num_key_value_heads (at least one head); stream and MLP grow in the same proportion as the heads,
    or as they are told to.
    """
    root = base_config.root() if isinstance(base_config, ScaleConfig) else base_config
    expansion = method.expansion
    num_key_value_heads = max(1, round(expansion.ratio * root.num_key_value_heads))
    num_heads = num_key_value_heads * (root.num_attention_heads // root.num_key_value_heads)
    ratio_of_heads = num_key_value_heads / root.num_key_value_heads
    layers = collaborating_layers(method.collaboration, method.variant, root.num_hidden_layers)
    if layers and root is not base_config:
        raise ConfigError(
            f"method.collaboration.layers: {method.variant} writes into layers {', '.join(map(str, layers))}, but the "
            "base is widened already, and what stands upon it may only read: none (the variants preserve and route)"
        )
    modules = method.collaboration.modules
    return ScaleConfig(
        base_config=base_config.to_diff_dict(),
        variant=method.variant,
        expansion_hidden_size=_added_channels(base_config, num_heads, expansion.hidden_ratio or ratio_of_heads),
        expansion_intermediate_size=max(1, round(root.intermediate_size * (expansion.mlp_ratio or ratio_of_heads))),
        expansion_num_attention_heads=num_heads,
        expansion_num_key_value_heads=num_key_value_heads,
        attention_collaboration_layers=layers if "attention" in modules else [],
        mlp_collaboration_layers=layers if "mlp" in modules else [],
        router_rule=method.router.rule,
        router_prior=method.router.prior,
        router_switch_rate=method.router.switch_rate,
        router_threshold=method.router.threshold,
        **({} if new is None else asdict(new)),
    )


def _added_channels(base_config: Any, num_added_heads: int, ratio: float) -> int:
    """Return the share of the plain model's channels with which all heads divide all channels, as Llama requires."""
    root, stages = base_config, []
    if isinstance(base_config, ScaleConfig):
        root, stages = base_config.root(), base_config.stages()
    below = root.hidden_size + sum(stage.expansion_hidden_size for stage in stages)
    num_heads = root.num_attention_heads + sum(stage.expansion_num_attention_heads for stage in stages)
    num_heads += num_added_heads
    channels_per_head = max(round((below + ratio * root.hidden_size) / num_heads), below // num_heads + 1)
    return int(channels_per_head * num_heads - below)


def check_context(config: RunConfig, model_config: Any) -> None:
    """Refuse windows longer than the base was made for."""
    for key, length in _lengths(config).items():
        if length > model_config.max_position_embeddings:
            raise ConfigError(f"{key}: {length}, but the base has {model_config.max_position_embeddings} positions")


def _lengths(config: RunConfig) -> dict[str, int]:
    asked = config.evaluation.continuations
    return {
        "corpus.sequence_length": config.corpus.sequence_length,
        "evaluation.sequence_length": config.evaluation.sequence_length or 0,
        "evaluation.continuations": 0 if asked is None else asked.prompt_tokens + asked.new_tokens,
    }


def context_warnings(config: RunConfig, base_config: Any) -> list[str]:
    """Return a line where windows are longer than those the base was trained on, as far as its RoPE tells."""
    rope = getattr(base_config, "rope_parameters", None) or {}
    kind, trained = rope.get("rope_type"), rope.get("original_max_position_embeddings")
    # A llama3 base was trained on after its RoPE had been stretched; the others are stretched for serving.
    if trained is None or kind == "llama3":
        return []
    return [
        f"{key}: {length:,}, but the base was trained on {trained:,} positions, its RoPE stretched beyond ({kind})"
        for key, length in _lengths(config).items()
        if length > trained
    ]


def check_processes(sizes: TrainConfig, num_processes: int) -> None:
    """Refuse a batch that does not divide among the processes."""
    at_once = sizes.sequences_at_once(num_processes)
    if sizes.global_batch_size % (at_once * num_processes):
        share, rest = divmod(sizes.global_batch_size, num_processes)
        remedy = f"divides {share}" if not rest else f"and processes divide it: {num_processes} processes cannot"
        raise ConfigError(
            f"train.global_batch_size {sizes.global_batch_size} is not a multiple of train.micro_batch_size "
            f"{at_once} x {num_processes} processes; choose a train.micro_batch_size that {remedy}"
        )
    if sizes.attention == "flash_attention_2" and sizes.compile and at_once == 1:
        raise ConfigError(
            f"train.compile: flash_attention_2 cannot be compiled with one sequence a process ({num_processes} "
            "processes); take another train.attention"
        )


def collaborating_layers(collaboration: CollaborationConfig, variant: str, num_layers: int) -> list[int]:
    """Return the indices of the layers in which W12 exists, in order."""
    layers = _DEFAULT_LAYERS[variant] if collaboration.layers is None else collaboration.layers
    if layers == "none":
        return []
    if layers == "all":
        return list(range(num_layers))
    if isinstance(layers, str):
        count = int(layers.removeprefix("top:"))
        chosen = list(range(num_layers - count, num_layers))
    else:
        chosen = sorted(set(layers))
    if chosen and (chosen[0] < 0 or chosen[-1] >= num_layers):
        raise ConfigError(f"method.collaboration.layers: {layers!r}, but the base has {num_layers} layers")
    return chosen
