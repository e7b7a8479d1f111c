"""The formats of exports: what each writes, and the comparison of each way to serve it with the
trained model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from scale_cli.config.schema import RunConfig
from scale_cli.errors import ConfigError, ExportParityError
from scale_cli.export.cached_decoding import check_cached_decoding
from scale_cli.export.dense import convert_parameters, plain_model
from scale_cli.export.learned import Learned, Retained
from scale_cli.export.parity import Tolerance, coarser, measure_parity, served_logits
from scale_cli.export.plain_folder import (
    can_name_base,
    copy_tokenizer,
    frame_prompts,
    name_ends,
    routed_class,
    router_keys,
    write_plain,
)
from scale_cli.export.records import Losses, Parity
from scale_cli.methods.stream_kinds import ADAPTER, EXPANSION
from scale_cli.model.configuration_scale import ScaleConfig
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.processes import move_to_device
from scale_cli.report import percent
from scale_cli.runs.folder import RunFolder
from scale_cli.runs.method_folder import describe_method, write_peft, write_trained
from scale_cli.runs.opened import MethodFolder, Run
from scale_cli.upscale.base import dtype_of_files, load_written
from scale_cli.upscale.base_tokenizer import tokenizer_place
from scale_cli.upscale.building import MethodModel
from scale_cli.upscale.preservation import trained_logits

LEAST_KEPT = 0.95  # of what was learned


class Format:
    """A kind of folder in which a run's model is written."""

    name: ClassVar[str]  # its value of `export.format`
    description: ClassVar[str]  # for the terminal
    library: ClassVar[str] = "transformers"  # that loads it, as a card names it

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.method = config.method.definition
        self.fits_method = True  # whether the method's models can be written in this format
        self.loaded_as = self.name  # `kind` in `card.md.j2`, which says how it is loaded
        self.answers_as_served = False  # False: it answers with the trained head alone
        self.needs_base = False  # it is routed with its base, a second model

    @cached_property
    def dtype(self) -> str:
        """The dtype of the written weights: the one asked for, or that of the base's own files."""
        return self.config.export.dtype or dtype_of_files(self.config.model)

    @property
    def folder(self) -> Path:
        """The folder of this export."""
        return RunFolder(self.config.output_dir).export(self.name, self.config.export.dtype)

    def write(
        self, folder: Path, model: MethodModel, trained: MethodFolder, prompts: list[Tensor]
    ) -> None:
        """Write weights, tokenizer and config.json of `model`, which was loaded from the folder
        `trained`.

        `prompts` are (1, T) ids: text on which a format may measure the model.
        """
        raise NotImplementedError

    def load(self, folder: Path) -> Iterator[tuple[MethodModel, str]]:
        """Yield the model for each way to load the folder, with the head or the routing rule of the
        trained model that it must match.

        If the folder can also be served routed, that way comes second.
        """
        raise NotImplementedError

    def prove(
        self,
        folder: Path,
        model: MethodModel,
        prompts: list[Tensor],
        learned: Learned | None,
        retained: Retained | None,  # None: such text is not at hand
    ) -> Parity:
        """Load a folder in every way in which it is served, and check that it computes what the
        trained model does.

        Cached decoding is compared with one pass without a cache too. Where the trained model
        computes in float32, the export then does too: its weights are what is judged.
        """
        parities = []
        for loaded, head in self.load(folder):
            move_to_device(loaded).eval()
            check_cached_decoding(loaded, prompts)
            tolerance = coarser(loaded, model)
            if model.dtype == torch.float32:
                loaded.float()
            expected = trained_logits if head == "trained" else served_logits
            nats = measure_parity(loaded, model, expected, prompts, tolerance)
            num_positions = sum(ids.shape[1] for ids in prompts)
            losses = None if learned is None else learned.losses(loaded, head)
            self.check_kept(losses)
            if retained is not None and head != "trained":
                self.check_base_head(loaded, tolerance, retained)
            parities.append(Parity(nats=nats, num_positions=num_positions, losses=losses))
            del loaded  # freed before the next is loaded
        return replace(parities[0], routed=parities[1] if len(parities) > 1 else None)

    def check_base_head(self, loaded: Any, tolerance: Tolerance, retained: Retained) -> None:
        """Raise ExportParityError if a routed export's base head is not the base; most formats hold
        the base as it is.
        """

    def check_kept(self, losses: Losses | None) -> None:
        """Raise ExportParityError, which names a remedy, if too little of what was learned is kept."""
        if losses is None or losses.kept is None or losses.kept >= LEAST_KEPT:
            return
        remedies = []
        if self.dtype != "float32":
            remedies.append("export.dtype=float32")
        if self.method.streams.adapter_library and self.name != Adapter.name:
            without = " export.dtype=null" if self.config.export.dtype else ""
            remedies.append(f"export.format={Adapter.name}{without}")
        remedy = f"; set {' or '.join(remedies)}" if remedies else ""
        raise ExportParityError(
            f"the export ({self.name}, {self.dtype}) {losses}, less than "
            f"{percent(LEAST_KEPT, 0)}: held-out text costs {losses.export:.4f} nats a token, by the run "
            f"{losses.run:.4f}, by the base {losses.base:.4f}{remedy}"
        )


class Plain(Format):
    """A plain model of the base's own class, of whatever family; it may carry a router."""

    name = "plain"
    description = "plain dense model, no custom code: loads wherever the base model does"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        routes_plainly = self.method.routes_plainly(config.method.settings)
        self.loaded_as = "routed" if routes_plainly else self.name
        # Adapters are merged here, for other runtimes.
        self.needs_base = not self.method.streams.shares_weights and can_name_base(config)
        self.answers_as_served = routes_plainly or self.needs_base

    def write(
        self, folder: Path, model: MethodModel, trained: MethodFolder, prompts: list[Tensor]
    ) -> None:
        grown_in = None if self.config.method.vocabulary is None else trained.path
        plain = plain_model(model, self.dtype, prompts)
        write_plain(
            plain, trained.tokenizer, self.config.model, folder, router_keys(model), grown_in
        )

    def load(self, folder: Path) -> Iterator[tuple[MethodModel, str]]:
        yield load_written(AutoModelForCausalLM, folder), "trained"
        if (routed := routed_class(folder)) is not None:
            yield load_written(routed, folder), self.config.method.served

    def check_base_head(self, loaded: Any, tolerance: Tolerance, retained: Retained) -> None:
        if not self.method.routes_plainly(self.config.method.settings):
            return
        finer = "" if self.dtype == "float32" else "export.dtype=float32 or "
        remedy = f"set {finer}export.format={Transformers.name}, or train again at a lower train.lr"
        retained.check(loaded, tolerance.base_head, remedy)


def write_self_contained(
    model: ScaleForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write weights, configuration, code and tokenizer; loads with trust_remote_code=True, and in
    scale without.
    """
    # Not the base's own files: the class to read them may depend on the family, which this
    # configuration does not name.
    tokenizer.save_pretrained(folder)
    frame_prompts(folder, tokenizer)
    # Registered here and not where the classes are defined: only this folder carries its own code.
    ScaleConfig.register_for_auto_class()
    ScaleForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    try:
        model.save_pretrained(str(folder))
    finally:
        ScaleConfig._auto_class = None
        ScaleForCausalLM._auto_class = None
    name_ends(folder, tokenizer)


class Transformers(Format):
    """A widened model with its own code."""

    name = "transformers"
    description = "self-contained, loads with trust_remote_code=True, router included"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.fits_method = self.method.widens
        self.answers_as_served = True

    def write(
        self, folder: Path, model: MethodModel, trained: MethodFolder, prompts: list[Tensor]
    ) -> None:
        lowered = copy.deepcopy(model)
        convert_parameters(lowered, getattr(torch, self.dtype))
        assert isinstance(lowered, ScaleForCausalLM), "fits_method"
        write_self_contained(lowered, trained.tokenizer, folder)

    def load(self, folder: Path) -> Iterator[tuple[MethodModel, str]]:
        yield load_written(ScaleForCausalLM, folder), self.config.method.served


class Adapter(Format):
    """An expansion's tensors, to load onto the base."""

    name = "adapter"
    description = "only what was trained; loads onto the base of this training, and onto no other"
    library = "scale"
    streams = EXPANSION

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.fits_method = self.method.streams is self.streams
        self.answers_as_served = True  # `scale generate` also finds its config and base

    def write(
        self, folder: Path, model: MethodModel, trained: MethodFolder, prompts: list[Tensor]
    ) -> None:
        trained.tokenizer.save_pretrained(folder)
        write_trained(folder, model, self.config.method, trained.record)

    def load(self, folder: Path) -> Iterator[tuple[MethodModel, str]]:
        head = self.config.method.served if self.method.widens else "trained"
        yield MethodFolder(folder, Run(self.config)).load(), head


class PeftAdapter(Adapter):
    """An adapter in PEFT's own folder."""

    library = "peft"
    streams = ADAPTER

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.loaded_as = self.library
        self.needs_base = can_name_base(config)

    def write(
        self, folder: Path, model: MethodModel, trained: MethodFolder, prompts: list[Tensor]
    ) -> None:
        describe_method(folder, model, self.config.method, trained.record)
        copy_tokenizer(trained.tokenizer, tokenizer_place(self.config.model), folder)
        write_peft(folder, model, self.config.model)
        settings: Any = model.generation_config  # PEFT leaves them to the base
        settings.save_pretrained(folder)
        name_ends(folder, trained.tokenizer)


# Of one name, only one fits a method.
FORMATS: tuple[type[Format], ...] = (Plain, Transformers, Adapter, PeftAdapter)


def fitting_formats(config: RunConfig) -> dict[str, Format]:
    """Return the formats that can hold a run's model, by name."""
    made = [of_kind(config) for of_kind in FORMATS]
    return {one.name: one for one in made if one.fits_method}


def routed_formats(config: RunConfig) -> list[str]:
    """Return the formats that answer as a run is served."""
    return [name for name, one in fitting_formats(config).items() if one.answers_as_served]


def formats_of(config: RunConfig) -> list[Format]:
    """Return the formats that a config asks for, each with a copy of the config that asks for it
    alone.

    Raises:
        ConfigError: one of the formats cannot hold a model of this method.
    """
    made = []
    for name in config.export.format:
        alone = config.export.model_copy(update={"format": [name]})
        fitting = fitting_formats(config.model_copy(update={"export": alone}))
        if name not in fitting:
            raise ConfigError(
                f"export.format: {name}: a model of the variant {config.method.variant} can only be exported as "
                f"{' or '.join(fitting)}"
            )
        made.append(fitting[name])
    return made
