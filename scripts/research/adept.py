"""ADEPT: LLaMA-Pro's copies, but of the layers whose bypass raises the loss on known text least (arXiv 2510.10071).

    python -m scripts.research.adept CONFIG [KEY.SUB=VALUE ...]

prints those layers, to be set as `method.adept.layers`. The official code bypasses a layer by
setting all its weights to 0, norms included: the layer then adds nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from scale_cli.errors import ConfigError
from scale_cli.methods.llama_pro import copies_above, evenly_spaced
from scale_cli.methods.method import PlainTraining
from scale_cli.methods.plain import Plain
from scale_cli.methods.recipes import Hook, Training, Update
from scale_cli.values import Section, Steps

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from scale_cli.config.schema import RunConfig
    from scale_cli.data.batches import MicroBatch, PackedWindows


class AdeptConfig(Section):
    """Depth expansion where it hurts least; each copied tensor has a learning rate by its importance to known text."""

    num_blocks: int | None = Field(
        default=None, ge=1, le=10_000, description="copies; null: one for every four layers"
    )
    layers: list[int] | None = Field(
        default=None,
        min_length=1,
        description="layers to copy, from 0; null: evenly spaced",
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


class Adept(Plain[AdeptConfig]):
    """The copies train, each tensor at a rate of its own."""

    name, label = "adept", "ADEPT"
    colour, mark = "#7b58b8", ("h", "⬢")
    section, settings = "adept", AdeptConfig
    train_defaults = {"lr": 2.0e-4}

    def in_words(self, settings: AdeptConfig) -> str:
        return ", new blocks only, rates by importance"

    def plain_training(self, settings: AdeptConfig, num_layers: int) -> PlainTraining:
        copied = settings.layers
        if copied is None:
            if num_layers < 2:
                raise ConfigError(
                    "method.adept.layers: the base has a single layer, which cannot be bypassed; set layers: [0]"
                )
            copied = evenly_spaced(num_layers, settings.num_blocks, "method.adept.num_blocks")
        if (highest := max(copied)) >= num_layers:
            raise ConfigError(
                f"method.adept.layers: {highest}, but the base has {num_layers} layers, from 0"
            )
        return copies_above(copied, num_layers)

    def hooks(self, settings: AdeptConfig, training: Training) -> list[Hook]:
        if training.config.train.sharding != "none":
            raise ConfigError(
                "method.variant: adept trains unsharded only; set train.sharding to none"
            )
        return [TensorRates(settings, training)]


def known_windows(
    sources: Sequence[PackedWindows], seed: int, num_windows: int
) -> list[MicroBatch]:
    """Return random windows of each source of known text, one per micro-batch; the seed alone decides which."""
    import numpy as np

    from scale_cli.data.batches import stacked

    probe = []
    for index, source in enumerate(sources):
        order = np.random.default_rng([seed, 2, index]).permutation(len(source))
        probe += [stacked(sources, [(index, window)]) for window in order[:num_windows]]
    if not probe:
        raise ConfigError(
            "method.variant: adept measures on text that the base knows; add a source with role: replay "
            "(and weight: 0 if it is not to be trained on)"
        )
    return probe


def layers_to_copy(
    base: PreTrainedModel, probe: Sequence[MicroBatch], settings: AdeptConfig
) -> list[int]:
    """Return the layers whose bypass raises the loss least, sorted."""
    losses = bypass_losses(base, probe)
    num_copies = len(evenly_spaced(len(losses), settings.num_blocks, "method.adept.num_blocks"))
    return sorted(sorted(range(len(losses)), key=lambda layer: (losses[layer], layer))[:num_copies])


def layers_of_run(config: RunConfig) -> list[int]:
    """Return the layers that a run's base and known text ask to copy."""
    from scale_cli.data.corpora import open_sources, windows_of
    from scale_cli.processes import move_to_device
    from scale_cli.runs.opened import Run
    from scale_cli.upscale.base import load_base

    corpora = open_sources(config, config.corpus.replay, Run(config).tokenizer)
    known = [windows_of(config.corpus, corpus) for corpus in corpora]
    settings = config.method.settings
    probe = known_windows(known, config.seed, settings.probe_windows)
    return layers_to_copy(move_to_device(load_base(config.model)), probe, settings)


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
        self._settings = settings
        self._training = training
        self._rates: list[float] | None = None  # by parameter; None: not read yet
        self._before: list[Tensor] = []

    def keeps(self, num_steps: int) -> bool:
        return num_steps > self._settings.every_steps

    def empty(self, parameter: Tensor) -> Tensor:
        import torch

        return torch.zeros((), dtype=torch.float64)

    @cached_property
    def _probe(self) -> list[MicroBatch]:
        config, batches = self._training.config, self._training.batches
        known = [
            windows
            for source, windows in zip(config.corpus.sources, batches.sources, strict=True)
            if source.role == "replay"
        ]
        return known_windows(known, config.seed, self._settings.probe_windows)

    def before(self, update: Update) -> None:
        parameters, state = update.parameters, update.optimiser.state
        if update.step > 0 and update.step % self._settings.every_steps == 0:
            self._rates = rates_by(self._importances(parameters))
        elif self._rates is None:  # a resumed run has them in its state
            self._rates = [float(state[parameter].get(self.name, 1.0)) for parameter in parameters]
        self._before = [parameter.detach().clone() for parameter in parameters]

    def after(self, update: Update) -> None:
        """Stretch every tensor's change by its rate, as a rate of its own in the optimiser would."""
        import torch

        assert self._rates is not None
        for parameter, before, rate in zip(
            update.parameters, self._before, self._rates, strict=True
        ):
            parameter.detach().copy_(before.lerp(parameter.detach(), rate))
            if update.step >= self._settings.every_steps:
                rates = torch.tensor(rate, dtype=torch.float64)
                update.optimiser.state[parameter][self.name] = rates
        self._before = []

    def _loss(self, window: MicroBatch) -> Tensor:
        """Return the training loss of a window, in nats per token."""
        from scale_cli.data.batches import IGNORED
        from scale_cli.processes import autocast
        from scale_cli.training.objective import attending_by_sdpa
        from scale_cli.training.step import loss_share

        accelerator, precision = (
            self._training.accelerator,
            self._training.config.train.mixed_precision,
        )
        num_tokens = max(int((window.targets != IGNORED).sum()), 1)
        with (
            autocast(accelerator.device.type, precision),
            attending_by_sdpa(self._training.model),
        ):
            alone = accelerator.unwrap_model(self._training.wrapped)
            return loss_share(alone, window.to(accelerator.device), num_tokens)

    def _importances(self, parameters: list[nn.Parameter]) -> list[float]:
        """Return each tensor's importance; the processes share the windows."""
        import torch

        accelerator = self._training.accelerator
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for window in self._probe[accelerator.process_index :: accelerator.num_processes]:
            gradients = torch.autograd.grad(self._loss(window), parameters)
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


def main() -> None:
    """Print the layers to copy for a config."""
    import scripts.research.registered  # noqa: F401
    from scale_cli.config.load import load_config

    config = load_config(Path(sys.argv[1]), ["method.variant=adept", *sys.argv[2:]])
    print(f"method.adept.layers={layers_of_run(config)}")


if __name__ == "__main__":
    main()
