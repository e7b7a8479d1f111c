"""The formats of exports: what each writes, and every way in which what was written is served."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from scale_cli.config.schema import RunConfig
from scale_cli.errors import ConfigError
from scale_cli.export.dense import lower_weights, plain_model
from scale_cli.export.parity import Logits, served_logits
from scale_cli.export.plain_folder import copy_tokenizer, frame_prompts, routed_class, router_keys, write_plain
from scale_cli.model.modeling_scale import ScaleForCausalLM, WidenedModel
from scale_cli.upscale.base import load_written
from scale_cli.upscale.method import MethodModel, describe_method, load_onto_base, write_peft, write_trained
from scale_cli.upscale.preservation import trained_logits
from scale_cli.upscale.run import MethodFolder, tokenizer_place


class Format:
    """A kind of folder, of a run's model."""

    name: ClassVar[str]  # as `export.format`
    description: ClassVar[str]  # for the terminal

    def __init__(self, config: RunConfig) -> None:
        self.config, self.method = config, config.method.definition
        self.is_had = True  # whether the method's models can be written so
        self.loaded_as = self.name  # the part of the card that says how it is loaded (`card_loading.md.j2`)
        self.answers_as_served = False  # whether it answers as the run is served, or with the trained head alone

    def check(self) -> None:
        """Refuse what the format does not have."""

    def write(self, folder: Path, model: MethodModel, trained: MethodFolder, prompts: list[Tensor]) -> None:
        """Write weights, configuration and tokenizer of the model in `trained`; `prompts` are (1, T) ids."""
        raise NotImplementedError

    def load(self, folder: Path) -> Iterator[tuple[MethodModel, Logits]]:
        """Yield what is served from a folder, and what it stands for of the trained model; a router's way second."""
        raise NotImplementedError


class Llama(Format):
    """A plain model of the base's own class; it may carry a router."""

    name = "llama"
    description = "plain dense model, no custom code: loads wherever the base model does"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.answers_as_served = self.method.routes_plainly(config.method.settings)
        self.loaded_as = "routed" if self.answers_as_served else self.name

    def write(self, folder: Path, model: MethodModel, trained: MethodFolder, prompts: list[Tensor]) -> None:
        grown_in = None if self.config.method.vocabulary is None else trained.path
        plain = plain_model(model, self.config.export.dtype, prompts)
        write_plain(plain, trained.tokenizer, self.config.model, folder, router_keys(model), grown_in)

    def load(self, folder: Path) -> Iterator[tuple[MethodModel, Logits]]:
        yield load_written(AutoModelForCausalLM, folder), trained_logits
        if (routed := routed_class(folder)) is not None:
            yield load_written(routed, folder), served_logits


def write_self_contained(model: WidenedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write weights, configuration, code and tokenizer; it loads with trust_remote_code=True, and here without."""
    # Not the base's own files: which class reads those may hang on the family, which this configuration does not name.
    tokenizer.save_pretrained(folder)
    frame_prompts(folder, tokenizer)
    # Registered here and not where the classes are defined: only this folder carries its own code.
    classes: tuple[Any, Any] = (type(model).config_class, type(model))
    classes[0].register_for_auto_class()
    classes[1].register_for_auto_class("AutoModelForCausalLM")
    try:
        model.save_pretrained(str(folder))
    finally:
        for registered in classes:
            registered._auto_class = None


class Transformers(Format):
    """A widened model with its own code."""

    name = "transformers"
    description = "self-contained, loads with trust_remote_code=True, router included"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.is_had, self.answers_as_served = self.method.widens, True

    def write(self, folder: Path, model: MethodModel, trained: MethodFolder, prompts: list[Tensor]) -> None:
        lowered = copy.deepcopy(model)
        lower_weights(lowered, getattr(torch, self.config.export.dtype))
        assert isinstance(lowered, ScaleForCausalLM), "is_had"
        write_self_contained(lowered, trained.tokenizer, folder)

    def load(self, folder: Path) -> Iterator[tuple[MethodModel, Logits]]:
        yield load_written(ScaleForCausalLM, folder), served_logits


class Adapter(Format):
    """What was trained, to be put onto the base: PEFT's own folder where it is PEFT's."""

    name = "adapter"
    description = "what was trained, alone; loads onto the base it was trained on, and no other"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.is_had, self.answers_as_served = bool(self.method.adapter), True
        self.loaded_as = "peft" if self.method.adapter == "peft" else self.name

    def check(self) -> None:
        if (dtype := self.config.export.dtype) != "float32":
            raise ConfigError(f"export.dtype: {dtype}: an adapter keeps what was trained, in float32")

    def write(self, folder: Path, model: MethodModel, trained: MethodFolder, prompts: list[Tensor]) -> None:
        if self.method.adapter != "peft":
            trained.tokenizer.save_pretrained(folder)
            write_trained(folder, model, self.config.method, trained.record)
            return
        describe_method(folder, model, self.config.method, trained.record)
        copy_tokenizer(trained.tokenizer, tokenizer_place(self.config.model), folder)
        write_peft(folder, model, self.config.model)

    def load(self, folder: Path) -> Iterator[tuple[MethodModel, Logits]]:
        yield load_onto_base(folder, self.config.model), served_logits


FORMATS: dict[str, type[Format]] = {one.name: one for one in (Llama, Transformers, Adapter)}
