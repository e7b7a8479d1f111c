"""OSF, orthogonal subspace fine-tuning: a matrix's largest singular directions stay fixed (PEFT; arXiv 2504.07097).

Every target matrix is split by its SVD into two parts; the part with the smaller singular values trains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from scale_cli.errors import ConfigError, require
from scale_cli.methods.lora import put_beside
from scale_cli.methods.method import PROJECTIONS, Method
from scale_cli.methods.recipes import Hook, Training, Update
from scale_cli.values import Section

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class OsfConfig(Section):
    """Fine-tuning outside each matrix's largest singular directions, which stay as they are (PEFT)."""

    kept: float = Field(
        default=0.5, gt=0.0, lt=1.0, description="share of a matrix's directions that stay"
    )
    targets: list[str] = Field(
        default=[*PROJECTIONS], min_length=1, description="projections whose matrices train"
    )


class Osf(Method[OsfConfig]):
    """Only the directions outside the kept ones train."""

    name, label = "osf", "OSF"
    colour, mark = "#8c7a00", ("X", "✖")
    section, settings = "osf", OsfConfig
    # No weight decay: it would shrink weights that training leaves as they are in the base.
    train_defaults = {"lr": 1.0e-5, "weight_decay": 0.0}

    def in_words(self, settings: OsfConfig) -> str:
        return f", {100 * settings.kept:.0f} % of directions kept"

    def build(
        self, base: PreTrainedModel, settings: OsfConfig, seed: int, new: Any = None
    ) -> PeftModel:
        require("peft", "method.variant osf")
        from peft.tuners.osf import OSFConfig as PeftOsf

        peft = PeftOsf(
            task_type="CAUSAL_LM",
            effective_rank=settings.kept,
            target_modules=list(settings.targets),
        )
        return put_beside(base, peft, "method.osf")

    def as_base(self, model: Any) -> Any:
        import copy

        return copy.deepcopy(model).float().merge_and_unload().eval()

    def hooks(self, settings: OsfConfig, training: Training) -> list[Hook]:
        if training.config.train.sharding != "none":
            raise ConfigError(
                "method.variant: osf trains unsharded only; set train.sharding to none"
            )
        return [Projection(training.model)]


class Projection(Hook):
    """Removes from the trained factors whatever an update has moved into the kept directions.

    PEFT projects the gradients, but an optimiser's update from projected gradients is not itself projected.
    """

    def __init__(self, model: Any) -> None:
        self.factors = [
            p for name, p in model.named_parameters() if name.endswith((".U_low", ".V_low"))
        ]

    def after(self, update: Update) -> None:
        import torch

        for factor in self.factors:
            projected = factor.detach()
            assert factor._backward_hooks, (
                "PEFT's own projection, which is linear: it serves for values too"
            )
            for of_gradient in factor._backward_hooks.values():
                projected = of_gradient(projected)
            factor.detach().copy_(torch.where(update.finite, projected, factor.detach()))
