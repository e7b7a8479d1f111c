"""The verb `scale init`: a first config for a base and text of somebody's own, in sizes for the device at hand."""

from __future__ import annotations

import glob
import json
import os
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import torch

from scale_cli.config.load import checked, json_schema_text
from scale_cli.config.safe_yaml import dump_line, parse
from scale_cli.config.schema import MethodConfig, ModelConfig, RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.data.corpora import every_source
from scale_cli.errors import ConfigError, UsageError
from scale_cli.planning.counting import count_flops, count_saved_tensors
from scale_cli.planning.device import Device, measured_device
from scale_cli.planning.memory import Parameters, training_memory
from scale_cli.storage.atomic import write_text
from scale_cli.upscale.base import base_without_weights, load_base_config
from scale_cli.upscale.method import build_model
from scale_cli.upscale.session import check_before_writing

SCHEMA_FILE = "scale.schema.json"
_HELD_OUT_DOCUMENTS = 32
_LENGTHS = (2048, 1024, 512, 256, 128, 64)
# A step of fewer tokens is noise; a schedule of fewer steps is none, where the time allows more.
_MIN_STEP_TOKENS, _MAX_STEP_TOKENS, _MIN_BATCH_SIZE = 2048, 131_072, 8
_MIN_STEPS, _WANTED_STEPS, _MAX_STEPS = 10, 100, 100_000
# The rest is for the allocator, the data, the evaluation, and whoever else uses the machine.
_MEMORY_SHARE = {"cpu": 0.5}
_MEMORY_SHARE_OF_OTHERS = 0.8
_METHOD = MethodConfig()
_FILES = re.compile(r".*\.(txt|jsonl|json|csv|parquet)(\.(gz|xz|zst))?")
_DATASET = re.compile(r"([\w.-]+/[\w.-]+)(?::([^:]*))?(?::([^:]*))?")


@dataclass(frozen=True)
class Answers:
    """What only the reader knows, by the flags of `scale init`; texts are files, or OWNER/NAME[:SUBSET[:SPLIT]]."""

    base: str
    corpus: str
    language: str
    retention: str
    retention_language: str
    held_out: str | None  # None: the first documents of the corpus
    minutes: float


@dataclass(frozen=True)
class Sizes:
    """What fits the device and the time."""

    device: Device
    mixed_precision: str
    sequence_length: int
    global_batch_size: int
    micro_batch_size: int
    max_steps: int
    memory_bytes: int
    available_bytes: int

    @property
    def num_tokens(self) -> int:
        """Of the run."""
        return self.max_steps * self.global_batch_size * self.sequence_length


@dataclass(frozen=True)
class StarterSummary:
    """What was written, for the terminal."""

    file: Path
    sizes: Sizes

    def lines(self) -> list[str]:
        """Return where it is, what it asks for, and what to do with it."""
        sizes = self.sizes
        step = f"{sizes.global_batch_size} x {sizes.sequence_length:,} tokens, {sizes.micro_batch_size} at once"
        return [
            f"sizes          {sizes.max_steps:,} steps of {step}; speed {sizes.device.origin}",
            f"written        {self.file}, and {SCHEMA_FILE} beside it, by which an editor checks it",
            f"next           scale plan {self.file}; scale run {self.file}",
        ]


def init(answers: Answers, file: Path) -> StarterSummary:
    """Write a config that passes every check that `scale run` makes before it writes anything."""
    if file.exists():
        raise UsageError(f"{file}: is there already; give another name")
    model = {"base": answers.base, "dtype": "float32"}
    base_config = load_base_config(checked(ModelConfig, model, "--base"))
    sizes = fitting_sizes(base_config, answers.minutes)
    if sizes.device.type != "cpu" and base_config.dtype == torch.bfloat16:
        model["dtype"] = "bfloat16"
    text = starter_text(answers, model, sizes, file)
    config = checked(RunConfig, parse(text, str(file)), str(file))
    check_before_writing(config, every_source(config))
    write_text(file, text)
    if not (schema := file.with_name(SCHEMA_FILE)).exists():
        write_text(schema, json_schema_text(RunConfig))
    return StarterSummary(file, sizes)


def fitting_sizes(base_config: Any, minutes: float) -> Sizes:
    """Return the longest windows, and the most at once, that the device holds and of which there is time for many."""
    devices = {precision: measured_device(precision, None) for precision in ("no", "bf16")}
    mixed_precision = max(devices, key=lambda precision: devices[precision].flops_per_s)
    device, available = devices[mixed_precision], _memory_bytes(devices[mixed_precision].type)
    with torch.device("meta"):
        model = build_model(base_without_weights(base_config, "float32"), _METHOD, seed=0)
    settings = {"max_steps": 1, "mixed_precision": mixed_precision}
    parameters = Parameters.of(model, TrainConfig.model_validate(settings))
    flops, saved = count_flops(model, _LENGTHS[-1]), count_saved_tensors(model, mixed_precision)

    def memory(length: int, at_once: int) -> int:
        batch = {"global_batch_size": at_once, "micro_batch_size": at_once}
        return training_memory(
            parameters,
            saved,
            TrainConfig.model_validate(settings | batch),
            sequence_length=length,
            vocab_size=base_config.vocab_size,
            num_processes=1,
            device_type=device.type,
        ).total

    def tokens_in_time(length: int) -> float:
        return 60 * minutes * device.sustained_flops_per_s / flops.total(length)

    step_tokens = min(max(tokens_in_time(_LENGTHS[-1]) / _WANTED_STEPS, _MIN_STEP_TOKENS), _MAX_STEP_TOKENS)
    longest = min(base_config.max_position_embeddings, step_tokens // _MIN_BATCH_SIZE)
    lengths = [length for length in _LENGTHS if length <= longest and memory(length, 1) <= available]
    if not lengths:
        needed = memory(_LENGTHS[-1], 1)
        raise ConfigError(f"--base: needs {_gib(needed)} to be trained, and {device.type} has {_gib(available)} for it")
    length = lengths[0]
    batch_size = 2 ** int(step_tokens / length).bit_length() // 2
    at_once = batch_size
    while at_once > 1 and memory(length, at_once) > available:
        at_once //= 2
    steps = min(max(_MIN_STEPS, int(tokens_in_time(length) / (batch_size * length))), _MAX_STEPS)
    return Sizes(device, mixed_precision, length, batch_size, at_once, steps, memory(length, at_once), available)


def _memory_bytes(device_type: str) -> int:
    """Return what a run may hold: a share of a CPU's whole memory, or of what is free on any other device."""
    if device_type == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        memory, _ = torch.accelerator.get_memory_info()
    return int(memory * _MEMORY_SHARE.get(device_type, _MEMORY_SHARE_OF_OTHERS))


def starter_text(answers: Answers, model: dict[str, str], sizes: Sizes, file: Path) -> str:
    """Return the config, comments and all."""
    corpus = _source("corpus", answers.corpus, answers.language)
    some = {"max_documents": _HELD_OUT_DOCUMENTS}
    if answers.held_out is None:
        held_out = {"split": "train"} | corpus | some if "dataset" in corpus else corpus | some
        corpus = corpus | {"skip_documents": _HELD_OUT_DOCUMENTS}
    else:
        held_out = _source("held-out", answers.held_out, answers.language) | some
    retention = _source("retention", answers.retention, answers.retention_language) | some
    values: dict[str, Any] = {
        "file": file,
        "device": sizes.device.origin,
        "output_dir": json.dumps(f"runs/{file.stem}", ensure_ascii=False),
        "model": dump_line(model),
        "corpus": dump_line(corpus),
        "held_out": dump_line(held_out | {"name": "held-out", "role": "acquisition"}),
        "retention": dump_line(retention | {"role": "retention"}),
        "retention_language": answers.retention_language,
        "sequence_length": sizes.sequence_length,
        "max_steps": sizes.max_steps,
        "num_tokens": f"{sizes.num_tokens:,}",
        "minutes": f"{answers.minutes:g}",
        "global_batch_size": sizes.global_batch_size,
        "micro_batch_size": sizes.micro_batch_size,
        "memory": _gib(sizes.memory_bytes),
        "available": _gib(sizes.available_bytes),
        "warmup_steps": max(1, sizes.max_steps // 5),  # a short run leaps where its rate is raised fast
        "save_every_steps": max(1, sizes.max_steps // 4),
        "mixed_precision": sizes.mixed_precision,
    }
    return Template(files("scale_cli").joinpath("starter.yaml").read_text(encoding="utf-8")).substitute(values)


def _source(name: str, given: str, language: str) -> dict[str, Any]:
    """Return what the config calls a text: files where there are any, or a name like one; else a dataset on the hub."""
    dataset = _DATASET.fullmatch(given)
    if dataset is None or _FILES.fullmatch(given) or glob.glob(os.path.expanduser(given)):  # noqa: PTH111
        return {"name": name, "path": given, "language": language}
    place = zip(("dataset", "subset", "split"), dataset.groups(), strict=True)
    return {"name": name, **{key: value for key, value in place if value}, "language": language}


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
