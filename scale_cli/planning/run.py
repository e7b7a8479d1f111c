"""The verb `scale plan`: what a run and its alternatives will cost, from the base's config.json alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from scale_cli.config.schema import MethodConfig, RunConfig, Variant
from scale_cli.data.corpora import cache_dir
from scale_cli.data.doubtful import num_readings, reading_warnings
from scale_cli.data.tokens import already_tokenised
from scale_cli.errors import BaseModelError, ConfigError, CorpusError, MissingExtraError
from scale_cli.planning.counting import count_flops_per_token, count_saved_tensors
from scale_cli.planning.device import Device, measured_device, stated_device
from scale_cli.planning.flops import TokenFlops, ideal_flops_per_token
from scale_cli.planning.memory import Memory, Parameters, training_memory
from scale_cli.storage.atomic import write_json
from scale_cli.upscale.base import base_without_weights, load_base_config, load_tokenizer, stage_folder
from scale_cli.upscale.method import build_model
from scale_cli.upscale.sizes import check_context, check_processes, context_warnings


@dataclass(frozen=True)
class MethodPlan:
    """What one method costs."""

    variant: str  # its name
    chosen: bool  # whether it is the config's
    parameters: Parameters  # frozen and trainable
    ideal_flops: TokenFlops  # per token, every needed product once
    counted_flops_per_token: float  # of the real model's products; attention over every key
    memory: Memory  # of one process
    time_s: float  # the run's ideal FLOPs at what the devices sustain

    def to_json(self) -> dict[str, Any]:
        """Return what `--output` holds of it."""
        totals = {
            "ideal_flops_per_token": self.ideal_flops.total,
            "memory_bytes": self.memory.total,
            "checkpoint_bytes": self.parameters.checkpoint_bytes,
        }
        return asdict(self) | totals


@dataclass(frozen=True)
class Corpus:
    """A training source, where the cache holds it tokenised already."""

    name: str  # of the source
    num_tokens: int  # in it
    num_epochs: float  # how often the run reads each of them


@dataclass(frozen=True)
class Plan:
    """The whole of it."""

    config: RunConfig  # the resolved config
    base_config: Any  # the base's, transformers' class
    num_processes: int  # that share a step
    device: Device  # what the times are computed with
    methods: list[MethodPlan]  # the config's first
    refused: dict[str, str]  # methods that cannot be had with this base, and why
    corpora: list[Corpus | None]  # one for every source; None where it is not tokenised yet
    warnings: list[str]  # what is rarely meant

    @property
    def num_tokens(self) -> int:
        """Of the run."""
        return self.config.train.max_steps * self.config.train.global_batch_size * self.config.corpus.sequence_length

    def to_json(self) -> dict[str, Any]:
        """Return what `--output` holds."""
        return {
            "base": self.config.model.base,
            "max_steps": self.config.train.max_steps,
            "num_tokens": self.num_tokens,
            "num_processes": self.num_processes,
            "device": asdict(self.device),
            "corpora": [None if corpus is None else asdict(corpus) for corpus in self.corpora],
            "methods": [method.to_json() for method in self.methods],
            "refused": self.refused,
            "warnings": self.warnings,
        }


def plan(config: RunConfig, flops: float | None, utilisation: float | None, num_processes: int) -> Plan:
    """Plan a run, and beside it every other method, without loading or downloading a weight.

    Args:
        config: the resolved config.
        flops: sustained FLOP/s of one process's device; None to measure the one at hand.
        utilisation: share of those FLOP/s that training sustains; None: 1 of stated ones, 0.4 of measured ones.
        num_processes: each on a device of its own.

    Raises:
        BaseModelError: the base's configuration is not found, or not supported.
        ConfigError: the base is widened already, or the config's own method, batch or window does not fit it or the
            processes.
    """
    if stage_folder(config.model) is not None:
        raise ConfigError(f"model.base: {config.model.base} is widened already; only plain bases are planned")
    base_config = load_base_config(config.model)
    check_context(config, base_config)
    check_processes(config, num_processes)
    if flops is None:
        device = measured_device(config.train.mixed_precision, utilisation)
    else:
        device = stated_device(flops, utilisation)
    refused: dict[str, str] = {}
    planned = [_plan_method(config, base_config, config.method, device, num_processes)]
    for method in methods_beside(config.method):
        try:
            planned.append(_plan_method(config, base_config, method, device, num_processes))
        except (
            ConfigError,
            MissingExtraError,
        ) as error:  # the config does not ask for it: the others are planned all the same
            refused[method.variant] = str(error)
    corpora = tokenised_corpora(config)
    warnings = context_warnings(config, base_config)
    for source, corpus in zip(config.corpus.sources, corpora, strict=True):
        warnings += [] if corpus is None else reading_warnings(config, source, corpus.num_tokens)
    return Plan(config, base_config, num_processes, device, planned, refused, corpora, warnings)


def methods_beside(method: MethodConfig) -> list[MethodConfig]:
    """Return every other variant at the config's sizes, collaborating where it does by default."""
    sections = method.model_dump()
    sections["collaboration"]["layers"] = None
    del sections["distillation"]  # most have no base to distil from
    variants = [variant for variant in get_args(Variant) if variant != method.variant]
    return [MethodConfig.model_validate({**sections, "variant": variant}) for variant in variants]


def write_plan(made: Plan, path: Path) -> None:
    """Write a plan as JSON."""
    write_json(path, made.to_json())


def _plan_method(
    config: RunConfig, base_config: Any, method: MethodConfig, device: Device, num_processes: int
) -> MethodPlan:
    length = config.corpus.sequence_length
    with torch.device("meta"):
        model = build_model(base_without_weights(base_config, config.model.dtype), method, config.seed)
    parameters = Parameters.of(model, config.train)
    counted = count_flops_per_token(model, length)
    memory = training_memory(
        parameters,
        count_saved_tensors(model, config.train.mixed_precision),
        config.train,
        sequence_length=length,
        vocab_size=base_config.vocab_size,
        num_processes=num_processes,
        device_type=device.type,
        distils=method.distils,
    )
    ideal = ideal_flops_per_token(base_config, method, length)
    num_tokens = config.train.max_steps * config.train.global_batch_size * length
    time_s = num_tokens * ideal.total / (device.sustained_flops_per_s * num_processes)
    return MethodPlan(method.variant, method == config.method, parameters, ideal, counted, memory, time_s)


def tokenised_corpora(config: RunConfig) -> list[Corpus | None]:
    """Return how often the run reads each training source; None for those that the cache does not hold yet."""
    folder, sources = cache_dir(config), config.corpus.sources
    if not any(any(folder.glob(f"{source.name}-*")) for source in sources):
        return [None] * len(sources)  # then neither a tokenizer nor a look at the texts is needed
    try:
        tokenizer = load_tokenizer(config.model)
        opened = [already_tokenised(source, tokenizer, folder, config.corpus) for source in sources]
    except (BaseModelError, CorpusError):
        return [None] * len(sources)
    return [
        None if corpus is None else Corpus(source.name, len(corpus.ids), num_readings(config, source, len(corpus.ids)))
        for source, corpus in zip(sources, opened, strict=True)
    ]
