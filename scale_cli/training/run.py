"""A run in training: everything that the loop, its checkpoints and `final/` share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from accelerate import Accelerator
from torch import nn

from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.data.ledger import SourceTokens, TokenLedger
from scale_cli.methods.hooks import Hook
from scale_cli.planning.device import device_name, peak_memory_bytes
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.metrics import MetricsLog
from scale_cli.storage.records import BranchPoint, Cost, TrainState
from scale_cli.training.observing import Observer
from scale_cli.training.text import RunText
from scale_cli.upscale.folder import MethodModel
from scale_cli.upscale.run import MethodFolder


@dataclass
class TrainingRun:
    """Everything that is trained with."""

    start: MethodFolder  # `upscaled/` of the run
    text: RunText  # that it trains on, and measures itself on
    accelerator: Accelerator  # processes and devices
    model: MethodModel  # what is trained
    # the model as it is run: by Accelerate (DistributedDataParallel with several processes), or sharded
    wrapped: nn.Module
    optimiser: torch.optim.Optimizer  # over what trains
    observer: Observer | None  # what measures the model on the way; None where nothing is measured
    state: TrainState  # where the run stands
    metrics: MetricsLog | None  # the log; None except on the main process
    # of all devices, would they do nothing but the method's products; None where it is not known
    peak_tokens_per_s: float | None = None
    hooks: Sequence[Hook] = ()  # what is done around every update
    branch_point: BranchPoint | None = None  # what it began with, where another run had trained that
    # hashes of what this process holds of a sharded base; empty where it is not sharded
    base_parts: dict[str, str] = field(default_factory=dict)
    saved_step: int | None = None  # of the last checkpoint that is in the run's folder, or on its way there

    @property
    def config(self) -> RunConfig:
        """The resolved config."""
        return self.start.run.config

    @property
    def folder(self) -> RunFolder:
        """Where the run lands."""
        return self.start.run.folder

    @cached_property
    def method(self) -> MethodConfig:
        """The method, with what was found to upscale."""
        return self.config.method.with_settings(self.start.method.settings)

    def token_ledger(self, num_steps: int) -> TokenLedger:
        """Return, for every source, what was read, and what the first steps have trained and left for later."""
        trained = self.text.batches.trained_tokens(num_steps)
        return TokenLedger(
            {
                source.name: SourceTokens(**vars(tokens), corpus=corpus.ledger)
                for source, corpus, tokens in zip(self.config.corpus.sources, self.text.corpora, trained, strict=True)
            }
        )

    def cost(self) -> Cost:
        """Return what a run that has just ended cost; `final/cost.json`, for `scale compare`."""
        parameters = list(self.model.parameters())
        return Cost(
            trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
            total_parameters=sum(p.numel() for p in parameters),
            tokens_per_s=self.state.tokens_per_s,
            peak_memory_bytes=peak_memory_bytes(self.accelerator.device),
            device=device_name(self.accelerator.device),
            num_processes=self.accelerator.num_processes,
            saving_s=round(self.state.saving_s, 4),
        )
