"""The formats of exports: what each writes, and the comparison of each way to serve it with the
trained model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from scale_cli.config.schema import RunConfig
from scale_cli.errors import ConfigError, ExportParityError
from scale_cli.export.cached_decoding import check_cached_decoding
from scale_cli.export.dense import convert_parameters, plain_model
from scale_cli.export.plain_folder import (
    copy_tokenizer,
    frame_prompts,
    name_ends,
    routed_class,
    router_keys,
    write_plain,
)
from scale_cli.export.records import Parity
from scale_cli.model.configuration_scale import ScaleConfig
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.processes import move_to_device
from scale_cli.runs.folder import RunFolder
from scale_cli.runs.method_folder import (
    describe_method,
    load_recorded_base,
    put_on_base,
    write_peft,
    write_trained,
)
from scale_cli.runs.opened import MethodFolder
from scale_cli.terminal import progress_bar
from scale_cli.upscale.base import dtype_of_files, load_written
from scale_cli.upscale.base_tokenizer import tokenizer_place
from scale_cli.upscale.building import MethodModel
from scale_cli.upscale.preservation import trained_logits

MAX_LOGIT_DIFFERENCE = 1e-4  # float32
# A float32 export passes if no logit differs by more than that. Any other export is held to the
# trained model's own rounding: how far that model moves from its exact logits when it is held in
# the export's dtype. The first ratio limits the mean, which any wrong weight raises. The second
# limits the largest difference, which scatters, in float32.
MAX_OWN_RATIO = 2.0
MAX_OWN_RATIO_AT_WORST = 10.0
_POSITIONS_AT_ONCE = 32

Logits = Callable[[MethodModel, Tensor], Tensor]


def served_logits(model: MethodModel, input_ids: Tensor) -> Tensor:
    """Return the logits that the trained model answers with: routed ones for `route`."""
    return model(input_ids=input_ids, use_cache=False).logits


class _Exact(TorchDispatchMode):
    """Compute in a higher precision: each operation first converts what it reads, so no converted
    model is held.

    To raise means here to convert to that precision.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op.is_view:  # a view of a weight is raised when it is read
            return op(*args, **kwargs)
        if isinstance(asked := kwargs.get("dtype"), torch.dtype):
            kwargs = kwargs | {"dtype": self._raised_dtype(asked)}
        written = (argument.alias_info is not None for argument in op._schema.arguments)
        read = [
            value if is_written else tree_map_only(Tensor, self._raised, value)
            for value, is_written in zip(args, written, strict=False)
        ]
        return op(*read, **tree_map_only(Tensor, self._raised, kwargs))

    def _raised_dtype(self, dtype: torch.dtype) -> torch.dtype:
        is_lower = dtype.is_floating_point and dtype.itemsize < self.dtype.itemsize
        return self.dtype if is_lower else dtype

    def _raised(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._raised_dtype(tensor.dtype))


def _differences(logits_1TV: Tensor, wanted_1TV: Tensor) -> Tensor:
    """Return (T, 2): by how much the logits at a position differ at most, and on average."""
    of_positions = []
    for some_PV, others_PV in zip(
        logits_1TV[0].split(_POSITIONS_AT_ONCE),
        wanted_1TV[0].split(_POSITIONS_AT_ONCE),
        strict=True,
    ):
        apart_PV = (some_PV.double() - others_PV).abs_()
        of_positions.append(torch.stack([apart_PV.amax(dim=1), apart_PV.mean(dim=1)], dim=1).cpu())
    return torch.cat(of_positions)


@torch.no_grad()
def measure_parity(
    exported: MethodModel, trained: MethodModel, expected: Logits, prompts: list[Tensor]
) -> Parity:
    """Compare an export's logits with the exact ones of the trained model, prompt by prompt; ids
    are (1, T).

    "Exact" is float64 for a float32 export, and float32 for one in 16 bits. The trained model's own
    rounding is measured against the same. `expected` gives the trained model's logits: of the
    trained head, or routed.
    """
    exact = _Exact(torch.float64 if exported.dtype == torch.float32 else torch.float32)
    own = {parameter: parameter.data for parameter in trained.parameters()}
    lowered = {parameter: tensor.to(exported.dtype) for parameter, tensor in own.items()}
    of_export = []
    of_rounding = []
    bar = progress_bar(
        iterable=prompts,
        desc="comparing the export",
        unit=" texts",
        leave=False,
    )
    for input_ids in bar:
        with exact:
            wanted = expected(trained, input_ids)
        of_export.append(
            _differences(exported(input_ids=input_ids, use_cache=False).logits, wanted)
        )
        try:
            for parameter, tensor in lowered.items():
                parameter.data = tensor
            of_rounding.append(_differences(expected(trained, input_ids), wanted))
        finally:
            for parameter, tensor in own.items():
                parameter.data = tensor

    of_export_P2 = torch.cat(of_export)
    of_rounding_P2 = torch.cat(of_rounding)
    return Parity(
        max_logit_difference=of_export_P2[:, 0].max().item(),  # NaN stays NaN
        mean_logit_difference=of_export_P2[:, 1].mean().item(),
        own_mean_difference=of_rounding_P2[:, 1].mean().item(),
        num_positions=len(of_export_P2),
        own_max_difference=of_rounding_P2[:, 0].max().item(),
    )


def check_parity(parity: Parity, dtype: str) -> None:
    good = parity.mean_logit_difference <= MAX_OWN_RATIO * parity.own_mean_difference
    limit = f"a mean of {MAX_OWN_RATIO:g} x {parity.own_mean_difference:.2e}"
    if dtype == "float32":
        at_worst = MAX_OWN_RATIO_AT_WORST * parity.own_max_difference
        good = good and parity.max_logit_difference <= at_worst
        good = good or parity.max_logit_difference <= MAX_LOGIT_DIFFERENCE
        limit = f"{MAX_LOGIT_DIFFERENCE:g} at most, or {limit} and {at_worst:.2g} at most"
    if not good:
        raise ExportParityError(
            f"the export does not compute what the trained model computes: logits differ by at most "
            f"{parity.max_logit_difference:.2e}, on average {parity.mean_logit_difference:.2e}; "
            f"allowed: {limit} ({dtype})"
        )


class Format:
    """A kind of folder in which a run's model is written."""

    name: ClassVar[str]  # its value of `export.format`
    description: ClassVar[str]  # for the terminal

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.method = config.method.definition
        self.fits_method = True  # whether the method's models can be written in this format
        self.loaded_as = self.name  # `kind` in `card.md.j2`, which says how it is loaded
        # False: it answers with the trained head alone. The run is then served otherwise only if
        # its method routes.
        self.answers_as_served = False
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

    def load(self, folder: Path) -> Iterator[tuple[MethodModel, Logits]]:
        """Yield the model for each way to load the folder, with the trained model's logits that it
        must match.

        If the folder can also be served routed, that way comes second.
        """
        raise NotImplementedError

    def prove(self, folder: Path, model: MethodModel, prompts: list[Tensor]) -> Parity:
        """Load a folder in every way in which it is served, and check that it computes what the
        trained model does.

        Cached decoding is compared with one pass without a cache too.
        """
        parities = []
        for loaded, expected in self.load(folder):
            parities.append(measure_parity(move_to_device(loaded).eval(), model, expected, prompts))
            check_parity(parities[-1], str(loaded.dtype).removeprefix("torch."))
            check_cached_decoding(loaded, prompts)
            del loaded  # freed before the next is loaded
        return replace(parities[0], routed=parities[1] if len(parities) > 1 else None)


class Llama(Format):
    """A plain model of the base's own class, of whatever family; it may carry a router."""

    name = "llama"
    description = "plain dense model, no custom code: loads wherever the base model does"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.answers_as_served = self.method.routes_plainly(config.method.settings)
        self.loaded_as = "routed" if self.answers_as_served else self.name
        self.needs_base = not self.method.adapter  # adapters are merged here, for other runtimes

    def write(
        self, folder: Path, model: MethodModel, trained: MethodFolder, prompts: list[Tensor]
    ) -> None:
        grown_in = None if self.config.method.vocabulary is None else trained.path
        plain = plain_model(model, self.dtype, prompts)
        write_plain(
            plain, trained.tokenizer, self.config.model, folder, router_keys(model), grown_in
        )

    def load(self, folder: Path) -> Iterator[tuple[MethodModel, Logits]]:
        yield load_written(AutoModelForCausalLM, folder), trained_logits
        if (routed := routed_class(folder)) is not None:
            yield load_written(routed, folder), served_logits


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

    def load(self, folder: Path) -> Iterator[tuple[MethodModel, Logits]]:
        yield load_written(ScaleForCausalLM, folder), served_logits


class Adapter(Format):
    """The trained tensors, to load onto the base; for PEFT's methods in PEFT's own folder."""

    name = "adapter"
    description = "only what was trained; loads onto the base of this training, and onto no other"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.fits_method = bool(self.method.adapter)
        self.loaded_as = "peft" if self.method.adapter == "peft" else self.name
        self.needs_base = self.method.adapter == "peft"
        self.answers_as_served = True

    def write(
        self, folder: Path, model: MethodModel, trained: MethodFolder, prompts: list[Tensor]
    ) -> None:
        if self.method.adapter != "peft":
            trained.tokenizer.save_pretrained(folder)
            write_trained(folder, model, self.config.method, trained.record)
            return
        describe_method(folder, model, self.config.method, trained.record)
        copy_tokenizer(trained.tokenizer, tokenizer_place(self.config.model), folder)
        write_peft(folder, model, self.config.model)
        settings: Any = model.generation_config  # PEFT leaves them to the base
        settings.save_pretrained(folder)
        name_ends(folder, trained.tokenizer)

    def load(self, folder: Path) -> Iterator[tuple[MethodModel, Logits]]:
        base = load_recorded_base(folder, self.config.model)
        yield put_on_base(folder, base), served_logits


FORMATS: dict[str, type[Format]] = {one.name: one for one in (Llama, Transformers, Adapter)}


def formats_of(config: RunConfig) -> list[Format]:
    """Return the formats that a config asks for, each with a copy of the config that asks for it
    alone.

    Raises:
        ConfigError: one of the formats cannot hold a model of this method.
    """
    made = []
    for name in config.export.format:
        alone = config.export.model_copy(update={"format": [name]})
        made.append(FORMATS[name](config.model_copy(update={"export": alone})))
        if not made[-1].fits_method:
            fitting = [other for other in FORMATS if FORMATS[other](config).fits_method]
            raise ConfigError(
                f"export.format: {name}: a model of the variant {config.method.variant} can only be exported as "
                f"{' or '.join(fitting)}"
            )
    return made
