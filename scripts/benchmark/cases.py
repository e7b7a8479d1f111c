"""The methods that are measured: what each trains, and one step of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import Batches
from scale_cli.errors import is_installed
from scale_cli.methods.recipes import trainable_parameters
from scale_cli.training.objective import for_training
from scale_cli.training.optimiser import build_optimiser
from scale_cli.training.step import train_step
from scale_cli.upscale.building import start_model
from scripts.benchmark.shapes import Shape

SEED = 0
RATIOS = (0.125, 0.25)
# Methods that are measured a second time, with `train.compile`.
COMPILED: dict[str, dict[str, Any]] = {
    "full": {"variant": "full"},
    "lora": {"variant": "lora"},
    "preserve r=0.125": {"variant": "preserve", "expansion": {"ratio": 0.125}},
    "adapt r=0.125": {"variant": "adapt", "expansion": {"ratio": 0.125}},
}
_TRL_STEPS = 64  # whose windows TRL packs before it begins; then they come again

PHASES = ("data", "forward", "backward", "optimiser")


class Clock:
    """Times the phases of a step; on a GPU with events, so that the device never waits."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []

    def start(self) -> None:
        self._marks.clear()
        self.mark("start")

    def mark(self, phase: str) -> None:
        """Count the time since the last mark to this phase."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, time.perf_counter()))

    def phases_s(self) -> dict[str, float]:
        """Return the seconds of each phase of the last step, in the order of PHASES."""
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds = dict.fromkeys(PHASES, 0.0)
        for (_, before), (phase, after) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(before, float) and isinstance(after, float):
                seconds[phase] += after - before
            elif isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event):
                seconds[phase] += before.elapsed_time(after) / 1000
        return seconds


@dataclass
class BenchmarkCase:
    """A method on a shape."""

    name: str  # in tables
    method: MethodConfig | None  # the config's method section; None if not ours
    model: Any  # the trained model
    step: Callable[
        [int], float
    ]  # takes one optimiser step on the batch with this index, and returns its loss
    clock: Clock  # marked by `step`


def cases(shape: Shape, batches: Batches, folder: Path) -> dict[str, Callable[[], BenchmarkCase]]:
    """Return a function for every method, by name, that builds its case."""

    def of_ours(name: str, **method: Any) -> Callable[[], BenchmarkCase]:
        settings = MethodConfig.model_validate(method)
        return lambda: ours(name, settings, shape, batches)

    made = {
        "full": of_ours("full", variant="full"),
        "hf full": lambda: _hf_trainer("hf full", _full_base(shape), shape, batches, folder),
        "lora": of_ours("lora", variant="lora"),
        "hf lora": lambda: _hf_lora(shape, batches),
        "hf trainer lora": lambda: _hf_trainer(
            "hf trainer lora", _peft_lora(shape), shape, batches, folder
        ),
        "llama-pro": of_ours("llama-pro", variant="llama-pro"),
    }
    if is_installed("trl"):
        made["trl lora"] = lambda: _trl_lora(shape, batches, folder)
    for ratio in RATIOS:
        expansion = {"ratio": ratio}
        for name in (f"preserve r={ratio:g}", f"adapt r={ratio:g}"):
            made[name] = of_ours(name, variant=name.split()[0], expansion=expansion)
        name, top = (
            f"route top:{shape.top_layers} r={ratio:g}",
            {"layers": f"top:{shape.top_layers}"},
        )
        made[name] = of_ours(name, variant="route", expansion=expansion, collaboration=top)
    compiling = shape.train().model_copy(update={"compile": True})
    for name, method in COMPILED.items():
        settings = MethodConfig.model_validate(method)
        made[f"{name} compiled"] = partial(
            ours, f"{name} compiled", settings, shape, batches, compiling
        )
    return made


def _mark_forward(model: nn.Module, clock: Clock) -> None:
    model.register_forward_pre_hook(lambda *_: clock.mark("data"))
    model.register_forward_hook(lambda *_: clock.mark("forward"))


def ours(
    name: str,
    method: MethodConfig,
    shape: Shape,
    batches: Batches,
    train: TrainConfig | None = None,
) -> BenchmarkCase:
    """Return a method's case as `scale train` runs it, with the shape's training settings by default."""
    model: Any = start_model(shape.base(SEED), method, SEED)
    model.to(shape.device).train()
    train, clock = train or shape.train(), Clock(shape.device)
    optimiser = build_optimiser(model, train)
    # All accelerators of a process share one state, the Trainer's too, so their precisions must agree. The accelerator
    # does not wrap the model: the step sets autocast itself.
    accelerator = Accelerator(cpu=shape.device == "cpu", mixed_precision=shape.mixed_precision)
    plain_backward = accelerator.backward

    def backward(loss: Tensor) -> None:
        plain_backward(loss)
        clock.mark("backward")

    accelerator.backward = backward
    wrapped = for_training(model, train)
    _mark_forward(wrapped, clock)

    def step(index: int) -> float:
        clock.start()
        loss = (
            train_step(accelerator, wrapped, optimiser, batches.of_step(index), train).result().loss
        )
        clock.mark("optimiser")
        return loss

    return BenchmarkCase(name, method, model, step, clock)


def _full_base(shape: Shape) -> Any:
    """Return the base with every weight trained, in float32."""
    return shape.base(SEED).float().requires_grad_(True).train()


def _peft_lora(shape: Shape) -> Any:
    """Return PEFT's LoRA of rank 16 on every projection."""
    lora = MethodConfig(variant="lora").settings
    settings = LoraConfig(
        task_type="CAUSAL_LM", r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets)
    )
    return get_peft_model(shape.base(SEED), settings).train()


def _hf_lora(shape: Shape, batches: Batches) -> BenchmarkCase:
    """Return PEFT's LoRA in a plain loop, with transformers' loss."""
    model, train, clock = _peft_lora(shape), shape.train(), Clock(shape.device)
    parameters = list(trainable_parameters(model).values())
    optimiser = torch.optim.AdamW(parameters, lr=train.peak_lr, fused=True)
    _mark_forward(model, clock)

    def step(index: int) -> float:
        clock.start()
        (batch,) = batches.of_step(index).micro_batches
        inputs, targets = batch.input_ids.to(shape.device), batch.targets.to(shape.device)
        with torch.autocast(shape.device, torch.bfloat16, enabled=shape.mixed_precision == "bf16"):
            loss = model(
                input_ids=inputs, labels=targets, shift_labels=targets, use_cache=False
            ).loss
        loss.backward()
        clock.mark("backward")
        torch.nn.utils.clip_grad_norm_(parameters, train.max_grad_norm)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        value: float = loss.item()
        clock.mark("optimiser")
        return value

    return BenchmarkCase("hf lora", None, model, step, clock)


class _Windows(Dataset[dict[str, Tensor]]):
    """The run's sequences in order, in the form that transformers' Trainer takes."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        step, row = divmod(sample, self._batches.global_batch_size)
        (batch,) = self._batches.of_step(step).micro_batches
        return {
            "input_ids": batch.input_ids[row],
            "labels": batch.targets[row],
            "shift_labels": batch.targets[row],
        }


def _hf_trainer(
    name: str, model: Any, shape: Shape, batches: Batches, folder: Path
) -> BenchmarkCase:
    """Return a model's training by transformers' Trainer."""
    arguments = TrainingArguments(remove_unused_columns=False, **_settings(shape, folder))
    trainer = Trainer(model=model, args=arguments, train_dataset=_Windows(batches))
    return _steps_of(trainer, name, shape)


def _trl_lora(shape: Shape, batches: Batches, folder: Path) -> BenchmarkCase:
    """Return the training of PEFT's LoRA by TRL's SFTTrainer, which packs windows as long as ours."""
    from datasets import Dataset as Table
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from trl import SFTConfig, SFTTrainer

    windows = [
        ids.tolist()
        for step in range(_TRL_STEPS)
        for batch in batches.of_step(step).micro_batches
        for ids in batch.input_ids
    ]
    arguments = SFTConfig(
        packing=True,
        packing_strategy="wrapped",
        max_length=shape.sequence_length,
        gradient_checkpointing=False,  # as the others
        **_settings(shape, folder),
    )
    # It asks for a tokenizer, and does not use it on ids.
    words = Tokenizer(WordLevel({"<end>": 0}, unk_token="<end>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", pad_token="<end>"
    )
    trainer = SFTTrainer(
        model=_peft_lora(shape),
        args=arguments,
        train_dataset=Table.from_dict({"input_ids": windows}),
        processing_class=tokenizer,
    )
    return _steps_of(trainer, "trl lora", shape)


def _settings(shape: Shape, folder: Path) -> dict[str, Any]:
    """Return what transformers' Trainer and those made from it are told alike."""
    train: TrainConfig = shape.train()
    return {
        "output_dir": str(folder / "trainer"),
        "per_device_train_batch_size": shape.batch_size,
        "max_steps": train.max_steps,
        "learning_rate": train.peak_lr,
        "lr_scheduler_type": "constant",
        "weight_decay": train.weight_decay,
        "use_cpu": shape.device == "cpu",
        "bf16": shape.mixed_precision == "bf16",
        "report_to": [],
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
    }


def _steps_of(trainer: Trainer, name: str, shape: Shape) -> BenchmarkCase:
    """Return the case of transformers' Trainer, or of one made from it: its data loader and its step."""
    train: TrainConfig = shape.train()
    model: Any = trainer.model
    trainer.create_optimizer_and_scheduler(train.max_steps)
    clock, loader = Clock(shape.device), _endless(trainer)
    optimiser: Any = trainer.optimizer
    scheduler: Any = trainer.lr_scheduler
    _mark_forward(model, clock)

    def step(_index: int) -> float:
        clock.start()
        (inputs,), num_items = trainer.get_batch_samples(loader, 1, trainer.args.device)
        loss = trainer.training_step(model, inputs, num_items)
        clock.mark("backward")
        trainer._clip_grad_norm(model)
        optimiser.step()
        scheduler.step()
        model.zero_grad()
        value: float = loss.item()
        clock.mark("optimiser")
        return value

    return BenchmarkCase(name, None, model, step, clock)


def _endless(trainer: Trainer) -> Iterator[Any]:
    while True:
        yield from trainer.get_train_dataloader()
