"""A run in training: everything that the loop, its checkpoints and `final/` share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm

from scale_cli.config.load import dump_config
from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.data.batches import Batches
from scale_cli.data.ledger import SourceTokens, TokenLedger
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.errors import PreservationError
from scale_cli.methods.hooks import Hook
from scale_cli.planning.speed import device_name, peak_memory_bytes
from scale_cli.processes import is_main
from scale_cli.storage.atomic import write_json, write_text
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.metrics import MetricsLog
from scale_cli.storage.records import CORPORA, BranchPoint, Cost, TrainState
from scale_cli.training.observing import Observer
from scale_cli.training.sharding import changed_parts
from scale_cli.upscale.base import changed_tensors
from scale_cli.upscale.method import MethodModel, describe_method
from scale_cli.upscale.run import MethodFolder
from scale_cli.upscale.tokenizer import copy_grown_tokenizer


@dataclass
class TrainingRun:
    """Everything that is trained with."""

    start: MethodFolder  # `upscaled/` of the run
    corpora: list[TokenisedCorpus]  # that it trains on, one for every source
    contents: list[str]  # what was read of every source, by hash
    batches: Batches  # of the whole run
    accelerator: Accelerator  # processes and devices
    model: MethodModel  # what is trained
    # the model as it is run: by Accelerate (DistributedDataParallel with several processes), or sharded
    wrapped: nn.Module
    optimiser: torch.optim.Optimizer  # over what trains
    hooks: Sequence[Hook]  # what is done around every update
    observer: Observer | None  # what measures the model on the way; None where nothing is measured
    state: TrainState  # where the run stands
    metrics: MetricsLog | None  # the log; None except on the main process
    # of all devices, would they do nothing but the method's products; None where it is not known
    peak_tokens_per_s: float | None
    branch_point: BranchPoint | None  # what it began with, where another run had trained that
    saved_step: int | None  # of the last checkpoint that is in the run's folder, or on its way there
    # hashes of what this process holds of a sharded base; empty where it is not sharded
    base_parts: dict[str, str] = field(default_factory=dict)

    @property
    def config(self) -> RunConfig:
        return self.start.run.config

    @property
    def folder(self) -> RunFolder:
        return self.start.run.folder

    @cached_property
    def method(self) -> MethodConfig:
        """The method, with what was found to upscale."""
        return self.config.method.with_settings(self.start.method.settings)

    def warn(self, line: str) -> None:
        """Print a warning above the progress bar."""
        if self.accelerator.is_main_process:
            tqdm.write(f"warning: {line}", file=sys.stderr)

    def check_base(self, step: int) -> None:
        """Check a widened model's base against its hashes: a sharded one in parts, any other on the main process."""
        if not self.method.definition.widens:
            return  # it has no such base
        model: Any = self.model
        if self.base_parts:
            changed = changed_parts(model.base, self.base_parts)
        else:
            changed = changed_tensors(model.base, self.start.record) if is_main() else []
        if changed:
            raise PreservationError(f"step {step}: the base has changed: {', '.join(changed[:3])}")

    def describe(self, folder: Path, state: TrainState) -> None:
        """Write what a checkpoint and `final/` have in common: everything but tensors."""
        describe_method(folder, self.model, self.method, self.start.record)
        copy_grown_tokenizer(self.config, folder)
        state.save(folder)
        write_json(folder / CORPORA, self.contents)
        if self.branch_point is not None:
            self.branch_point.save(folder)
        sources, trained = self.config.corpus.sources, self.batches.trained_tokens(state.step)
        ledger = {
            source.name: SourceTokens(**vars(tokens), corpus=corpus.ledger)
            for source, corpus, tokens in zip(sources, self.corpora, trained, strict=True)
        }
        TokenLedger(ledger).save(folder)
        write_text(folder / "scale.yaml", dump_config(self.config))

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
