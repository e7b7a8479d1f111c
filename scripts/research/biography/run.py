"""The benchmark: pre-train, learn Task 0, then learn Task 1 with every method, measuring both during training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scale_cli.config.load import dump_config
from scale_cli.config.schema import ModelConfig
from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import Batches
from scale_cli.errors import ConfigError, RunFolderError, StorageError, require
from scale_cli.evaluation.results import HEADS_AND_RULES
from scale_cli.model.heads import ModelPair
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.processes import move_to_device
from scale_cli.report import percent
from scale_cli.storage.atomic import new_folder, read_json, write_json, write_text
from scale_cli.upscale.base import base_without_weights, load_base
from scale_cli.upscale.building import MethodModel, build_model, start_model
from scripts.from_scratch import training_steps, write_base
from scripts.research.adept import AdeptConfig, known_windows, layers_to_copy
from scripts.research.biography.accuracy import first_token_accuracy
from scripts.research.biography.config import BiographyConfig, ComparedMethod
from scripts.research.biography.people import ATTRIBUTES
from scripts.research.biography.report import (
    MethodResult,
    served_lines,
    terminal_lines,
    write_report,
)
from scripts.research.biography.tasks import Curriculum, SequenceWindows, write_curriculum


def run_biography(config: BiographyConfig, log: Callable[[str], None]) -> list[MethodResult]:
    """Run the benchmark; keep results that exist with the same settings."""
    require("matplotlib", "the biography benchmark")
    for compared in config.methods:
        if library := compared.method.definition.streams.adapter_library:
            require(library, f"methods: variant {compared.method.variant}")
    _check_methods(config)
    folder = config.output_dir
    _claim(folder, config)
    curriculum = write_curriculum(config)
    log(
        f"people         {config.people.pretraining:,} told of, Task 0 asks about {config.people.task_0:,} of them, "
        f"Task 1 about {config.people.task_1:,} others"
    )
    base = _learn_base(config, curriculum, log)
    results = []
    for compared in config.methods:
        file = folder / "methods" / f"{compared.name}.json"
        settings = compared.model_dump(mode="json")
        result = _finished(file, settings)
        if result is None:
            result = _learn_task_1(config, curriculum, base, compared)
            write_json(file, asdict(result))
        for line in served_lines([result]):
            log(
                f"{line.label:<21}Task 0 {percent(line.task_0[0]):>7} -> {percent(line.task_0[-1]):>7}   "
                f"Task 1 {percent(line.task_1[-1]):>7}   {result.training_s:,.0f} s"
            )
        results.append(result)
    with new_folder(folder / "report") as partial:
        write_report(partial, config, results)
    for told in [*terminal_lines(results), f"report: {folder / 'report' / 'report.md'}"]:
        log(told)
    return results


def _check_methods(config: BiographyConfig) -> None:
    """Raise ConfigError if a method does not fit the base, before the base is trained."""
    sizes = LlamaConfig(**config.model.model_dump(), tie_word_embeddings=True)
    for compared in config.methods:
        base = base_without_weights(sizes, "float32")
        try:
            with torch.device("meta"):
                build_model(base, compared.method, config.seed)
        except ConfigError as error:
            raise ConfigError(f"methods: {compared.name}: {error}") from None


def _claim(folder: Path, config: BiographyConfig) -> None:
    """Write the settings that decide every result; RunFolderError if the folder has others. Methods may be added."""
    deciding = config.model_dump(mode="json", exclude={"output_dir", "methods"})
    file = folder / "settings.json"
    if file.is_file():
        before = read_json(file)
        changed = sorted(
            key for key in deciding.keys() | before.keys() if deciding.get(key) != before.get(key)
        )
        if changed:
            raise RunFolderError(
                f"{folder}: was made with other settings ({', '.join(changed)}); choose another"
            )
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise RunFolderError(f"{folder}: holds something else; choose another output_dir")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(file, deciding)
    write_text(folder / "biography.yaml", dump_config(config))


def _finished(file: Path, settings: dict[str, Any]) -> MethodResult | None:
    if not file.is_file():
        return None
    try:
        result = MethodResult(**read_json(file))
    except TypeError:
        raise StorageError(f"{file}: damaged, not a method's result; remove it") from None
    return result if result.settings == settings else None


def _learn_base(
    config: BiographyConfig, curriculum: Curriculum, log: Callable[[str], None]
) -> ModelConfig:
    """Return the base that Task 1 starts from: pre-trained on biographies, then taught Task 0."""
    base = ModelConfig(base=str(config.output_dir / "base"))
    if Path(base.base).is_dir():
        log(f"base           {base.base}, done already")
        return base
    torch.manual_seed(config.seed)
    model = LlamaForCausalLM(_architecture(config, curriculum))
    stages = (
        ("pre-training on biographies", config.pretraining, curriculum.biographies),
        ("learning Task 0", config.task_0, curriculum.sequences(curriculum.task_0)),
    )
    for description, stage, sequences in stages:
        train = stage.train_config(config.mixed_precision)
        for _ in training_steps(
            model, _batches([sequences], [1.0], config.seed, train), train, description
        ):
            pass
    write_base(Path(base.base), model, curriculum.tokenizer)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    log(f"base           {num_parameters:,} parameters, written to {base.base}")
    return base


def _architecture(config: BiographyConfig, curriculum: Curriculum) -> LlamaConfig:
    sizes, tokenizer = config.model.model_dump(exclude={"vocab_size"}), curriculum.tokenizer
    longest = max(
        map(len, [*curriculum.biographies, *(a.prompt + a.answer for a in curriculum.task_1)])
    )
    return LlamaConfig(
        **sizes,
        vocab_size=len(tokenizer),
        max_position_embeddings=2 * longest,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _batches(
    tasks: list[list[list[int]]], weights: list[float], seed: int, train: TrainConfig
) -> Batches:
    return Batches(
        SequenceWindows.alike(tasks),
        weights,
        num_steps=train.max_steps,
        seed=seed,
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.global_batch_size,
    )


def _learn_task_1(
    config: BiographyConfig, curriculum: Curriculum, base: ModelConfig, compared: ComparedMethod
) -> MethodResult:
    num_measured = (
        None if config.people.measured is None else config.people.measured * len(ATTRIBUTES)
    )
    observed: Any = None
    steps: list[int] = []
    accuracy: dict[str, dict[str, list[float]]] = {
        task: {name: [] for name in HEADS_AND_RULES} for task in ("task_0", "task_1")
    }
    training_s, resumed_s, num_trainable = 0.0, time.monotonic(), 0
    for model, step in _learning(config, curriculum, base, compared):
        if step % config.measure_every_steps and step != config.task_1.max_steps:
            continue
        training_s += time.monotonic() - resumed_s
        model.eval()
        if observed is None:
            observed = (
                model
                if isinstance(model, ScaleForCausalLM)
                else ModelPair(load_base(base), model).to(model.device).eval()
            )
            num_trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        steps.append(step)
        for task, measured in accuracy.items():
            asked = getattr(curriculum, task)[:num_measured]
            shares = first_token_accuracy(
                observed, asked, compared.method.rules, config.mixed_precision
            )
            for name, share in shares.items():
                measured[name].append(share)
        resumed_s = time.monotonic()
    return MethodResult(
        name=compared.name,
        variant=compared.method.variant,
        settings=compared.model_dump(mode="json"),
        trainable_parameters=num_trainable,
        training_s=round(training_s, 1),
        steps=steps,
        **accuracy,
    )


def _learning(
    config: BiographyConfig, curriculum: Curriculum, base: ModelConfig, compared: ComparedMethod
) -> Iterator[tuple[MethodModel, int]]:
    """Yield the model that learns Task 1 and its number of steps: 0, and then after each step."""
    known, asked = (
        curriculum.sequences(questions) for questions in (curriculum.task_0, curriculum.task_1)
    )
    train, method = compared.training(config.task_1, config.mixed_precision), compared.method
    plain = move_to_device(load_base(base))
    if isinstance(method.settings, AdeptConfig) and method.settings.layers is None:
        probe = known_windows([SequenceWindows(known)], config.seed, method.settings.probe_windows)
        layers = layers_to_copy(plain, probe, method.settings)
        settings = method.settings.model_copy(update={"layers": layers})
        method = method.model_copy(update={"adept": settings})
    model = start_model(plain, method, config.seed)
    batches = _batches([asked, known], [1.0 - compared.replay, compared.replay], config.seed, train)
    roles = [SimpleNamespace(role="new"), SimpleNamespace(role="replay")]
    of_hooks = SimpleNamespace(
        train=train, method=method, seed=config.seed, corpus=SimpleNamespace(sources=roles)
    )
    for step in training_steps(
        model, batches, train, f"learning Task 1: {compared.name}", of_hooks
    ):
        yield model, step
