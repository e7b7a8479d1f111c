"""ADEPT: LLaMA-Pro's copies, but of the layers whose bypass raises the loss on known text least (arXiv 2510.10071).

The official code bypasses a layer by setting all its weights to 0, norms included: the layer then adds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from scale_cli.errors import ConfigError
from scale_cli.methods.llama_pro import Deeper, evenly_spaced
from scale_cli.methods.recipes import Hook, Training, Update
from scale_cli.values import Section, Steps

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel


class AdeptConfig(Section):
    """Depth expansion where it hurts least; each copied tensor has a learning rate by its importance to known text."""

    num_blocks: int | None = Field(
        default=None, ge=1, le=10_000, description="copies; null: one for every four layers"
    )
    layers: list[int] | None = Field(
        default=None,
        min_length=1,
        description="layers to copy, from 0; null: upscale finds those whose bypass hurts least on known text",
    )
    probe_windows: int = Field(
        default=16,
        ge=1,
        le=10_000,
        description="windows of known text to measure on, from each source with role replay",
    )
    every_steps: Steps = Field(
        default=500, description="steps between two measurements of the rates"
    )

    @model_validator(mode="after")
    def _layers_are_distinct(self) -> AdeptConfig:
        if self.layers is not None and (
            len(set(self.layers)) < len(self.layers) or min(self.layers) < 0
        ):
            raise ValueError("layers: contains a layer twice, or a negative one")
        if self.layers is not None and self.num_blocks not in (None, len(self.layers)):
            raise ValueError(f"num_blocks: {self.num_blocks}, but layers names {len(self.layers)}")
        return self


class Adept(Deeper[AdeptConfig]):
    """The copies train, each tensor at a rate of its own."""

    name, label = "adept", "ADEPT"
    colour, mark = "#7b58b8", ("h", "⬢")
    section, settings = "adept", AdeptConfig
    is_sharded = False
    reads_known_text = has_tensor_rates = True

    def in_words(self, settings: AdeptConfig) -> str:
        return ", new blocks only, rates by importance"

    def copied(self, num_layers: int, settings: AdeptConfig) -> list[int]:
        if settings.layers is None:
            if num_layers < 2:
                raise ConfigError(
                    "method.adept.layers: the base has a single layer, which cannot be bypassed; set layers: [0]"
                )
            return evenly_spaced(num_layers, settings.num_blocks, "method.adept.num_blocks")
        if (highest := max(settings.layers)) >= num_layers:
            raise ConfigError(
                f"method.adept.layers: {highest}, but the base has {num_layers} layers, from 0"
            )
        return sorted(settings.layers)

    def probe_windows(self, settings: AdeptConfig) -> int:
        return settings.probe_windows if settings.layers is None else 0

    def find(
        self, settings: AdeptConfig, base: PreTrainedModel, probe: Sequence[Any]
    ) -> AdeptConfig:
        losses, num_layers = bypass_losses(base, probe), base.config.num_hidden_layers
        num_copies = len(self.copied(num_layers, settings))
        found = sorted(range(num_layers), key=lambda layer: (losses[layer], layer))[:num_copies]
        return settings.model_copy(update={"layers": sorted(found)})

    def found(self, settings: AdeptConfig) -> str:
        return (
            ""
            if settings.layers is None
            else f"layers copied: {', '.join(map(str, settings.layers))}"
        )

    def hooks(self, settings: AdeptConfig, training: Training) -> list[Hook]:
        return [TensorRates(settings, training)]

    def work_beside(
        self, settings: AdeptConfig, max_steps: int, global_batch_size: int, num_known_sources: int
    ) -> float:
        num_times = (max_steps - 1) // settings.every_steps
        return (
            num_times * settings.probe_windows * num_known_sources / (max_steps * global_batch_size)
        )


def bypass_losses(base: Any, probe: Sequence[Any]) -> list[float]:
    """Return, for every layer, the loss with that layer bypassed, in nats per token over the windows."""
    import torch

    from scale_cli.model.head_loss import IGNORED, plain_cross_entropy

    decoder, head = base.get_decoder(), base.get_output_embeddings().weight
    num_tokens = sum(int((window.targets != IGNORED).sum()) for window in probe)
    here = [window.to(base.device) for window in probe]
    losses = []
    for layer in decoder.layers:
        loss, bypass = 0.0, layer.register_forward_hook(lambda _layer, read, _written: read[0])
        with torch.no_grad():
            for window in here:
                states = decoder(
                    window.input_ids, position_ids=window.position_ids, use_cache=False
                ).last_hidden_state
                loss += float(plain_cross_entropy(states, head, window.targets) / num_tokens)
        bypass.remove()
        losses.append(loss)
    return losses


class TensorRates(Hook):
    """Sets each tensor's learning rate, every few steps, by the tensor's importance to known text.

    A tensor's importance I is the mean over its entries of |theta| times |g|. |g| is taken for each window of known
    text and then averaged, so that rates do not depend on how a batch is split; that is ours. The rate is `train.lr`
    times 2 (max I - I) / (max I - min I), over all tensors that train. This is the official code; the paper has
    2 (1 - I), for groups of neurons. Before the first measurement, and if all I are equal, the rate is `train.lr`.
    """

    name = "tensor_rate"

    def __init__(self, settings: AdeptConfig, training: Training) -> None:
        self._every_steps, self._training = settings.every_steps, training
        self._probe = training.probe(settings.probe_windows)
        self._rates: list[float] | None = (
            None  # one per group, which has one tensor; None: not read yet
        )

    def keeps(self, train: Any, num_steps: int) -> bool:
        return num_steps > self._every_steps

    def empty(self, parameter: Tensor) -> Tensor:
        import torch

        return torch.zeros((), dtype=torch.float64)

    def before(self, update: Update) -> None:
        import torch

        parameters, state = update.parameters, update.optimiser.state
        if update.step > 0 and update.step % self._every_steps == 0:
            self._rates = rates_by(self._importances(parameters))
            for parameter, rate in zip(parameters, self._rates, strict=True):
                state[parameter][self.name] = torch.tensor(rate, dtype=torch.float64)
        elif self._rates is None:  # a resumed run has them in its state
            self._rates = [float(state[parameter].get(self.name, 1.0)) for parameter in parameters]
        for group, rate in zip(update.optimiser.param_groups, self._rates, strict=True):
            group["lr"] *= rate

    def _importances(self, parameters: list[nn.Parameter]) -> list[float]:
        """Return each tensor's importance; the processes share the windows."""
        import torch

        accelerator = self._training.accelerator
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for window in self._probe[accelerator.process_index :: accelerator.num_processes]:
            gradients = torch.autograd.grad(self._training.loss(window), parameters)
            for total, gradient in zip(sums, gradients, strict=True):
                total += gradient.abs()
        with torch.no_grad():
            matters = [
                (parameter.abs() * accelerator.reduce(total, reduction="sum")).mean()
                for parameter, total in zip(parameters, sums, strict=True)
            ]
        importances: list[float] = (torch.stack(matters).double() / len(self._probe)).tolist()
        return importances


def rates_by(importances: Sequence[float]) -> list[float]:
    """Return each tensor's factor on the rate: 2 for the least important, 0 for the most; 1 if I does not rank them."""
    highest, lowest = max(importances), min(importances)
    if not (math.isfinite(sum(importances)) and highest > lowest):
        return [1.0] * len(importances)
    return [2.0 * (highest - importance) / (highest - lowest) for importance in importances]
