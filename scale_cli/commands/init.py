"""The verb `scale init`: a first config for a base and text of somebody's own, in sizes for the device at hand."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from scale_cli.config.load import checked, dump_line, json_schema_text, parse
from scale_cli.config.schema import MethodConfig, ModelConfig, RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.data.corpora import every_source
from scale_cli.errors import ConfigError, CorpusError, UsageError
from scale_cli.planning.counting import Parameters, count_flops, count_saved_tensors, training_memory
from scale_cli.planning.speed import Device, measure_device
from scale_cli.planning.texts import NewTokens, Parted, limit, look_into, offer_tokens, part
from scale_cli.storage.atomic import write_text
from scale_cli.upscale.base import base_without_weights, load_base_config
from scale_cli.upscale.method import NewPieces, build_model
from scale_cli.upscale.run import Run
from scale_cli.upscale.tokenizer import load_tokenizer

SCHEMA_FILE = "scale.schema.json"
_FIRST = {"max_documents": 32}  # of a text that is only measured on
_REPLAY_SHARE = 0.1  # of the windows, which a weight of 0.111 beside 1 gives
# Measured on bases of 5 M parameters (docs/training.md); of larger ones the paper's, which is the default.
_SMALL_HIDDEN_SIZE, _MEASURED_LR, _PAPERS_LR = 512, "5.0e-3", "1.0e-3"
_LENGTHS = (2048, 1024, 512, 256, 128, 64)
# A step of fewer tokens is noise; a schedule of fewer steps is none, where the time allows more.
_MIN_STEP_TOKENS, _MAX_STEP_TOKENS, _MIN_BATCH_SIZE = 2048, 131_072, 8
_MIN_STEPS, _WANTED_STEPS, _MAX_STEPS = 10, 100, 100_000
# Four readings of a text teach nearly what new text would (Muennighoff et al., arXiv 2305.16264).
_MOST_READINGS = 4
# The rest is for the allocator, the data, the evaluation, and whoever else uses the machine.
_SHARE_OF_HOST, _SHARE_OF_DEVICE = 0.5, 0.8


@dataclass(frozen=True)
class Sizes:
    """What fits."""

    device: Device
    mixed_precision: str
    sequence_length: int
    global_batch_size: int
    micro_batch_size: int
    max_steps: int
    minutes: float  # that its steps take, at the device's speed
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
    texts: dict[str, str]  # where their documents went
    tokens: str
    sizes: Sizes

    def lines(self) -> list[str]:
        """Return what was found, where it is, what it asks for, and what to do with it."""
        sizes = self.sizes
        step = f"{sizes.global_batch_size} x {sizes.sequence_length:,} tokens, {sizes.micro_batch_size} at once"
        return [
            *(f"{name:<15}{words}" for name, words in self.texts.items()),
            f"tokens         {self.tokens}",
            f"sizes          {sizes.max_steps:,} steps of {step}: about {sizes.minutes:.2g} min, {sizes.device.origin}",
            f"{'':<15}a run of minutes shows that everything works; to write well takes hours",
            f"written        {self.file}, and {SCHEMA_FILE} beside it, by which an editor checks it",
            f"next           scale plan {self.file}; scale run {self.file}",
        ]


def init(
    file: Path,
    base: str,
    corpus_text: str,
    language: str,
    retention_text: str,
    retention_language: str,
    held_out_text: str | None,  # None: a part of the corpus
    minutes: float,
) -> StarterSummary:
    """Write a config that `scale run` takes as it is; texts are files, or OWNER/NAME[:SUBSET[:SPLIT]]."""
    if file.exists():
        raise UsageError(f"{file}: is there already; give another name")
    model = {"base": base, "dtype": "float32"}
    named = checked(ModelConfig, model, "--base")
    base_config, tokenizer = load_base_config(named), load_tokenizer(named)
    corpus = look_into("corpus", corpus_text, language, tokenizer)
    retention = look_into("replay", retention_text, retention_language, tokenizer)
    new = offer_tokens(corpus, tokenizer, base_config.vocab_size)
    num_tokens = int(corpus.num_bytes * (new.tokens_per_byte or corpus.tokens_per_byte))
    if num_tokens < _MIN_STEP_TOKENS:
        raise CorpusError(f"--corpus {corpus_text}: about {num_tokens:,} tokens, and a step takes {_MIN_STEP_TOKENS:,}")
    sizes = fit_sizes(base_config, new.number, minutes, num_tokens)
    if held_out_text is None:
        parted = part(corpus, "held-out", file, sizes.num_tokens)
    else:
        other = look_into("held-out", held_out_text, language, tokenizer).source | _FIRST
        parted = Parted(corpus.source | limit(corpus, sizes.num_tokens), other, "all of it to train on")
    replayed = round(_REPLAY_SHARE * sizes.num_tokens)
    if _MOST_READINGS * retention.num_tokens < replayed:  # too little to train on
        kept = Parted({}, retention.source | {"name": "retention"} | _FIRST, "all of it to measure on")
    else:
        kept = part(retention, "retention", file, replayed)
    if sizes.device.type != "cpu" and base_config.dtype == torch.bfloat16:
        model["dtype"] = "bfloat16"
    lr = _MEASURED_LR if base_config.hidden_size <= _SMALL_HIDDEN_SIZE else _PAPERS_LR
    text = starter_text(file, model, parted, kept, retention_language, new, sizes, lr)
    _write(file, text, parted.files | kept.files)
    return StarterSummary(file, {"corpus": parted.words, "retention": kept.words}, new.words, sizes)


def fit_sizes(base_config: Any, num_new: int, minutes: float, num_tokens: int) -> Sizes:
    """Return the longest windows, and the most at once, that the device holds and of which there is time for many.

    Steps are as many as there is time for, and as read the text, of `num_tokens`, four times.
    """
    devices = {precision: measure_device(base_config, "float32", precision) for precision in ("no", "bf16")}
    mixed_precision = max(devices, key=lambda precision: devices[precision].flops_per_s)
    device, available = devices[mixed_precision], _memory_bytes(devices[mixed_precision].type)
    with torch.device("meta"):
        new = NewPieces.unknown(num_new) if num_new else None
        distilling = MethodConfig.model_validate({"distillation": {"weight": 4.0}})
        model = build_model(base_without_weights(base_config, "float32"), distilling, 0, new)
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
            vocab_size=base_config.vocab_size + num_new,
            num_processes=1,
            device_type=device.type,
            distils=True,
        ).total

    def tokens_of_run(length: int) -> float:
        return min(60 * minutes * device.flops_per_s / flops.total(length), _MOST_READINGS * num_tokens)

    step_tokens = min(max(tokens_of_run(_LENGTHS[-1]) / _WANTED_STEPS, _MIN_STEP_TOKENS), _MAX_STEP_TOKENS)
    longest = min(base_config.max_position_embeddings, step_tokens // _MIN_BATCH_SIZE)
    lengths = [length for length in _LENGTHS if length <= longest and memory(length, 1) <= available]
    if not lengths:
        needed = _gib(memory(_LENGTHS[-1], 1))
        raise ConfigError(f"--base: needs {needed} to be trained, and {device.type} has {_gib(available)} for it")
    length = lengths[0]
    batch_size = at_once = 2 ** int(step_tokens / length).bit_length() // 2
    while at_once > 1 and memory(length, at_once) > available:
        at_once //= 2
    steps = min(max(_MIN_STEPS, int(tokens_of_run(length) / (batch_size * length))), _MAX_STEPS)
    takes = steps * batch_size * length * flops.total(length) / device.flops_per_s / 60
    sizes = (length, batch_size, at_once, steps, takes)
    return Sizes(device, mixed_precision, *sizes, memory(length, at_once), available)


def _memory_bytes(device_type: str) -> int:
    """Return what a run may hold: a share of a CPU's whole memory, or of what is free on any other device."""
    if device_type == "cpu":
        return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _SHARE_OF_HOST)
    return int(torch.accelerator.get_memory_info()[0] * _SHARE_OF_DEVICE)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def starter_text(
    file: Path,
    model: dict[str, str],
    corpus: Parted,
    kept: Parted,
    retention_language: str,
    new: NewTokens,
    sizes: Sizes,
    lr: str,
) -> str:
    """Return the config, comments and all."""
    template = Environment(
        loader=PackageLoader("scale_cli", "report/templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    ).get_template("starter.yaml.j2")
    return template.render(
        file=file,
        output_dir=json.dumps(f"runs/{file.stem}", ensure_ascii=False),
        model=dump_line(model),
        corpus=dump_line(corpus.trained_on),
        held_out=dump_line(corpus.held_out | {"role": "acquisition"}),
        retention=dump_line(kept.held_out | {"role": "retention"}),
        replay=dump_line(kept.trained_on | {"weight": 0.111, "role": "replay"}) if kept.trained_on else None,
        retention_language=retention_language,
        new=new,
        sizes=sizes,
        lr=lr,
        memory=_gib(sizes.memory_bytes),
        available=_gib(sizes.available_bytes),
    )


def _write(file: Path, text: str, texts: dict[Path, list[str]]) -> None:
    """Write the config and the parts of texts that it names; nothing, where `scale run` would refuse it."""
    if there := next((path for path in texts if path.exists()), None):
        raise UsageError(f"{there}: is there already; give the config another name, or move that away")
    config = checked(RunConfig, parse(text, str(file)), str(file))
    try:
        for path, documents in texts.items():
            write_text(path, "".join(json.dumps({"text": of}, ensure_ascii=False) + "\n" for of in documents))
        Run(config).check(every_source(config))
    except BaseException:
        for path in texts:
            path.unlink(missing_ok=True)
        raise
    write_text(file, text)
    if not (schema := file.with_name(SCHEMA_FILE)).exists():
        write_text(schema, json_schema_text())
