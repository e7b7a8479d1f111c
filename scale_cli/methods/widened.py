"""SCALE: every linear map of the base is widened, and the base stays inside, bit for bit (arXiv
2511.03270).
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator, model_validator

from scale_cli.errors import ConfigError
from scale_cli.methods.method import Method, MethodSection
from scale_cli.methods.stream_kinds import EXPANSION
from scale_cli.values import Accepted, Section, counted

if TYPE_CHECKING:
    from pathlib import Path

    from scale_cli.methods.starts.start import TextToLearn
    from scale_cli.model.configuration_scale import ScaleConfig
    from scale_cli.model.modeling_scale import ScaleForCausalLM


_FAR_ABOVE = 1.5  # a size that is so many times what was asked for is worth a warning
# Collaborating layers, if the config does not say.
_DEFAULT_LAYERS = {"preserve": "none", "adapt": "all", "route": "none"}


class ExpansionConfig(Section):
    """Size of the expansion."""

    ratio: float = Field(
        default=0.25,
        gt=0.0,
        le=1.0,
        description="added width, relative to the base; heads are rounded to whole key/value heads",
    )
    hidden_ratio: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        description="added width of the stream; rounded so that all heads divide it; null: `ratio`",
    )
    mlp_ratio: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        description="added width of the MLP; null: `ratio`",
    )


class CollaborationConfig(Section):
    """Where W12 exists, and so writes into the base stream (paper: collaborative adaptation)."""

    layers: str | list[int] | None = Field(
        default=None, description="none | all | top:K | [indices]; null: the variant's default"
    )
    modules: list[Literal["attention", "mlp"]] = Field(
        default=["attention", "mlp"], min_length=1, description="which modules of those layers"
    )

    @field_validator("layers", mode="before")
    @classmethod
    def _known_form(cls, layers: object) -> object:
        known = layers is None or layers in ("none", "all")
        if isinstance(layers, str):
            known = known or re.fullmatch(r"top:[1-9][0-9]{0,3}", layers) is not None
        elif isinstance(layers, list):
            known = all(type(layer) is int and layer >= 0 for layer in layers)
        if not known:
            raise ValueError(
                f"{layers!r} is none of: none, all, top:K (K >= 1), a list of layer indices"
            )
        return layers

    @property
    def is_asked_for(self) -> bool:
        return self.layers not in (None, "none", [])


class RouterConfig(Section):
    """How the router weighs the base's head and the trained head."""

    rule: Literal["posterior", "cosine"] = Field(
        default="posterior",
        description="posterior: by each head's predictions so far; cosine (the paper's): by the heads' logits",
    )
    prior: float = Field(
        default=0.5, gt=0.0, lt=1.0, description="weight of the base head at the first token"
    )
    script_prior: float | None = Field(
        default=0.02,
        gt=0.0,
        le=0.5,
        description="generate and serve: weight of the base head after a prompt in the new language's script, and of "
        "the trained head after one without it; null: `prior` for every prompt",
    )
    threshold: float = Field(default=0.5, ge=-1.0, le=1.0, description="tau of the cosine rule")


class DistillationConfig(Section):
    """Learning from the base's own predictions on text that it knows (sources of role replay)."""

    weight: Accepted[float] = Field(
        default=0.0,
        ge=0.0,
        le=1e6,
        description="training adds so many times KL(base || trained head) to the loss, on replay alone; 0: off",
    )


class WideningConfig(MethodSection):
    """The sections that say how a base is widened, and routed."""

    expansion: ExpansionConfig = ExpansionConfig()
    collaboration: CollaborationConfig = CollaborationConfig()
    router: RouterConfig | None = Field(
        default=RouterConfig(), description="null: the trained head is served alone"
    )
    distillation: DistillationConfig = DistillationConfig()

    @model_validator(mode="after")
    def _layers_go_with_the_variant(self) -> WideningConfig:
        if self.variant not in _DEFAULT_LAYERS:
            return self
        if self.variant == "preserve" and self.collaboration.is_asked_for:
            raise ValueError(
                "collaboration.layers: the variant 'preserve' has no collaborating layer; use 'adapt' or 'route'"
            )
        by_default = _DEFAULT_LAYERS[self.variant] != "none"
        if self.distils and (by_default or self.collaboration.is_asked_for):
            raise ValueError(
                "distillation.weight: with collaborating layers, training does not compute the base's predictions; "
                "use preserve, or route with collaboration.layers none"
            )
        return self

    @property
    def rules(self) -> RouterConfig:
        """Settings of both rules, which evaluations measure even if nothing is routed."""
        return self.router or RouterConfig()

    @property
    def distils(self) -> bool:
        """Whether windows of replay are also trained on the base's predictions."""
        return self.distillation.weight > 0


class _Widened(Method[WideningConfig]):
    settings = WideningConfig
    train_defaults = {"optimiser": "muon"}
    usual_lr = 1.0e-3  # each kind of tensor has a multiple of it, by the start
    first_run = {"distillation": {"weight": 4.0}}
    streams = EXPANSION
    takes_new_tokens = True
    advice = (
        "{:,.2g} tokens per parameter of the base. Full fine-tuning and LoRA learned more for the "
        "same work on SmolLM2-135M from the start (docs/results/real-base.md), and full fine-tuning "
        "on small bases from about 0.5 on. Either, routed with the untouched base, forgets as little. "
        "A token of LoRA then takes one pass of twice the rows, and full fine-tuning a second model."
    )

    def in_words(self, settings: WideningConfig) -> str:
        expansion = settings.expansion
        words = f", ratio {expansion.ratio:g}"
        for part, ratio in (("stream", expansion.hidden_ratio), ("MLP", expansion.mlp_ratio)):
            words += "" if ratio is None else f", {part} ratio {ratio:g}"
        return words + (
            f", distilled on replay (weight {settings.distillation.weight:g})"
            if settings.distils
            else ""
        )

    def trains_base_weights(self, settings: WideningConfig) -> bool:
        return False

    def build(
        self, base: Any, settings: WideningConfig, seed: int, new: Any = None
    ) -> ScaleForCausalLM:
        from scale_cli.model.modeling_scale import ScaleForCausalLM

        return ScaleForCausalLM(plan_expansion(base.config, settings, new), base)

    def restore(
        self, folder: Path, base: Any, settings: WideningConfig, seed: int
    ) -> ScaleForCausalLM:
        from scale_cli.model.configuration_scale import ScaleConfig
        from scale_cli.model.modeling_scale import ScaleForCausalLM

        return ScaleForCausalLM(ScaleConfig.from_pretrained(folder), base)

    def start(
        self, model: Any, settings: WideningConfig, seed: int, text: TextToLearn | None = None
    ) -> None:
        from scale_cli.methods.starts import initialise_expansion

        initialise_expansion(model, seed, text)

    def highest_lr(self, settings: WideningConfig) -> float:
        return 1.0e-2

    def first_update_tells(self, model: Any) -> bool:
        from scale_cli.methods.starts import start_of

        return start_of(model.config).first_update_tells


class Preserve(_Widened):
    """The expansion never writes into the base stream."""

    name = "preserve"
    label = "SCALE (preserve)"
    colour = "#3a9bd9"
    mark = ("v", "▼")
    head = "trained"


class Adapt(_Widened):
    """The expansion writes into the base stream in collaborating layers."""

    first_run = {}  # its collaborating layers keep it from distilling
    name = "adapt"
    label = "SCALE (adapt)"
    colour = "#00866a"
    mark = ("P", "✚")
    head = "trained"


class Route(_Widened):
    """Preserve or Adapt, served as a mixture with the untouched base."""

    name = "route"
    label = "SCALE (route)"
    colour = "#0063a8"
    mark = ("*", "★")

    def routes_plainly(self, settings: WideningConfig) -> bool:
        is_posterior = settings.router is not None and settings.router.rule == "posterior"
        return is_posterior and not settings.collaboration.is_asked_for


@dataclass(frozen=True)
class AddedSizes:
    """The sizes of an expansion, in whole heads."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int


def added_sizes(base: Any, expansion: ExpansionConfig) -> AddedSizes:
    """Return what an expansion adds to a base, of which only the sizes are read.

    Whole key/value heads are added, at the base's head_dim and query to key/value ratio, so their
    ratio is rounded to a multiple of 1 / num_key_value_heads (at least one head). Stream and MLP
    grow by the ratio itself, or by ratios of their own.
    """
    num_key_value_heads = max(1, round(expansion.ratio * base.num_key_value_heads))
    num_heads = num_key_value_heads * (base.num_attention_heads // base.num_key_value_heads)
    # All heads divide all channels, as Llama requires.
    num_all_heads = base.num_attention_heads + num_heads
    num_channels = (1 + (expansion.hidden_ratio or expansion.ratio)) * base.hidden_size
    multiples = max(round(num_channels / num_all_heads), base.hidden_size // num_all_heads + 1)
    # Channels beyond the base's would start as nothing that a gradient reaches.
    while multiples * num_all_heads > 2 * base.hidden_size and (
        (multiples - 1) * num_all_heads > base.hidden_size
    ):
        multiples -= 1
    of_mlp = (expansion.mlp_ratio or expansion.ratio) * base.intermediate_size
    return AddedSizes(
        hidden_size=multiples * num_all_heads - base.hidden_size,
        intermediate_size=max(1, round(of_mlp)),
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
    )


def far_from_asked(base: Any, expansion: ExpansionConfig) -> list[str]:
    """Return a warning for each size that rounding made far larger than was asked for."""
    added = added_sizes(base, expansion)
    parts = (
        ("ratio", "num_key_value_heads", "key/value heads", "heads are added whole"),
        ("hidden_ratio", "hidden_size", "channels", "all heads divide the channels"),
        ("mlp_ratio", "intermediate_size", "MLP channels", "channels are added whole"),
    )
    lines = []
    for key, name, what, why in parts:
        ratio = getattr(expansion, key) or expansion.ratio
        asked = ratio * getattr(base, name)
        size = getattr(added, name)
        if size > _FAR_ABOVE * asked:
            lines.append(
                f"method.expansion.{key}: {ratio:g} asks for {asked:.3g} more {what}, but it is {size:,}, "
                f"{size / asked:.2g} times as many: {why}"
            )
    return lines


def plan_expansion(base_config: Any, settings: WideningConfig, new: Any = None) -> ScaleConfig:
    """Return the configuration of the widened model; `new` are tokens that it adds (`NewPieces`)."""
    from scale_cli.model.configuration_scale import ScaleConfig

    modules = settings.collaboration.modules
    layers = collaborating_layers(
        settings.collaboration, settings.variant, base_config.num_hidden_layers
    )
    added = asdict(added_sizes(base_config, settings.expansion))
    return ScaleConfig(
        base_config=base_config.to_diff_dict(),
        variant=settings.variant,
        **{f"expansion_{name}": size for name, size in added.items()},
        attention_collaboration_layers=layers if "attention" in modules else [],
        mlp_collaboration_layers=layers if "mlp" in modules else [],
        **{f"router_{name}": value for name, value in settings.rules},
        **({} if new is None else asdict(new)),
    )


def collaborating_layers(
    collaboration: CollaborationConfig, variant: str, num_layers: int
) -> list[int]:
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
        raise ConfigError(
            f"method.collaboration.layers: {layers!r}, but the base has {counted(num_layers, 'layer')}"
        )
    return chosen
