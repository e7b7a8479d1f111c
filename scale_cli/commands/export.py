"""The verb `scale export`: write, load what was written, compare, and only then call it done."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from scale_cli.config.load import dump_config, load_config
from scale_cli.config.same_run import EXPORT_SECTIONS, differences
from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.data.corpora import open_sources
from scale_cli.errors import ConfigError, ExportParityError
from scale_cli.evaluation.results import finished_report, report_sha256
from scale_cli.export.card import model_card
from scale_cli.export.dense import lower_weights, plain_model
from scale_cli.export.licence import Licence, base_licence
from scale_cli.export.parity import Logits, check_parity, measure_parity, served_logits, trained_logits
from scale_cli.export.plain_folder import copy_tokenizer, write_plain
from scale_cli.export.publish import Publication, check_repository, planned, publish
from scale_cli.export.router_keys import routed_class, router_keys
from scale_cli.export.self_contained import write_self_contained
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.processes import device, placed
from scale_cli.storage.atomic import MANIFEST, is_whole, new_folder, read_json, write_text
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.records import BaseRecord, ExportRecord, Parity, trained_sha256
from scale_cli.upscale.base import load_written
from scale_cli.upscale.folder import MethodModel, describe_method, load_onto_base, write_trained
from scale_cli.upscale.preservation import sample_ids
from scale_cli.upscale.session import open_final, open_folder
from scale_cli.upscale.tokenizer import tokenizer_place

CARD = "README.md"
_DOCUMENTS_PER_CORPUS = 4
_DESCRIPTIONS = {
    "llama": "plain dense model, no custom code: loads wherever the base model does",
    "transformers": "self-contained, loads with trust_remote_code=True, router included",
    "adapter": "what was trained, alone; loads onto the base it was trained on, and no other",
}


@dataclass(frozen=True)
class ExportSummary:
    """What was exported, for the terminal."""

    folder: Path
    export_format: str
    variant: str
    parity: Parity

    def lines(self) -> list[str]:
        """Return aligned lines."""
        num_bytes = sum(file.stat().st_size for file in self.folder.iterdir() if file.is_file())
        lines = [f"format         {self.export_format}: {_DESCRIPTIONS[self.export_format]}"]
        if self.parity.routed is not None:
            lines.append("routed         with trust_remote_code=True, by `scale serve`, or in vLLM with our plug-in")
        elif self.export_format == "llama" and self.variant == "route":
            lines.append("note           it holds the trained head; this router needs export.format=transformers")
        for name, parity in (("parity", self.parity), ("parity, routed", self.parity.routed)):
            if parity is not None:
                lines.append(
                    f"{name:<15}max |dlogit| {parity.max_logit_difference:.1e}, mean "
                    f"{parity.mean_logit_difference:.1e}, over {parity.num_positions:,} positions (the trained model's "
                    f"own rounding: max {parity.own_max_difference:.1e})"
                )
        return [*lines, f"written        {self.folder} ({num_bytes / 1e6:,.1f} MB), its model card is README.md"]


def one_by_one(config: RunConfig) -> list[RunConfig]:
    """Return a config for every folder that a config asks for: the same, with one format."""
    return [
        config.model_copy(update={"export": config.export.model_copy(update={"format": export_format})})
        for export_format in config.export.formats
    ]


def export_all(
    config: RunConfig,
    repository: str | None,
    show: Callable[[ExportSummary | Publication], None],
    *,
    dry_run: bool,
) -> None:
    """Write every format that a config asks for, and send each to a repository of the hub, where one is named."""
    if repository is not None:
        check_repository(repository, config.export.formats)
    check_format(config)
    for one in one_by_one(config):
        summary = export(one)
        show(summary)
        if repository is not None:
            send = planned if dry_run else publish
            show(send(summary.folder, repository))


def export(config: RunConfig) -> ExportSummary:
    """Write the trained model in the format of a config that has one (`one_by_one`), or leave nothing behind."""
    settings, session = config.export, open_final(config)
    (export_format,) = settings.formats
    check_format(config)
    model, tokenizer = session.load(), session.tokenizer
    prompts = _prompts(config, tokenizer)
    folder = export_folder(config)
    with new_folder(folder) as partial:
        if export_format == "llama":
            plain = plain_model(model, settings.dtype, prompts)
            grown_in = None if config.method.vocabulary is None else session.folder
            write_plain(plain, tokenizer, config.model, partial, router_keys(model), grown_in)
        elif export_format == "transformers":
            lowered = copy.deepcopy(model)
            lower_weights(lowered, getattr(torch, settings.dtype))
            assert isinstance(lowered, ScaleForCausalLM), "check_format"
            write_self_contained(lowered, tokenizer, partial)
        else:
            assert export_format == "adapter", export_format
            _write_adapter(partial, model, tokenizer, config, session.record)
        parity = _check(partial, model, prompts, config)
        licence = base_licence(config.model)
        licence.copy_files(partial)
        write_card(partial, config, parity, licence)
    return ExportSummary(folder, export_format, config.method.variant, parity)


def _write_adapter(
    folder: Path, model: MethodModel, tokenizer: PreTrainedTokenizerBase, config: RunConfig, record: BaseRecord
) -> None:
    """Write what was trained, to be put onto the base: PEFT's own folder of a LoRA."""
    if config.method.variant != "lora":
        tokenizer.save_pretrained(folder)
        write_trained(folder, model, config.method, record)
        return
    from scale_cli.upscale.folder import write_peft

    describe_method(folder, model, config.method, record)
    copy_tokenizer(tokenizer, tokenizer_place(config.model), folder)
    write_peft(folder, model, config.model)


def export_folder(config: RunConfig) -> Path:
    """Return where the export of a config with one format lands."""
    (export_format,) = config.export.formats
    return RunFolder(config.output_dir).export(export_format, config.export.dtype)


def write_card(folder: Path, config: RunConfig, parity: Parity, licence: Licence) -> None:
    """Write the model card, the config, and what the card tells of: which training, and which report of it, if any."""
    architectures = read_json(folder / "config.json").get("architectures") or [""]
    write_text(folder / CARD, model_card(config, finished_report(config), parity, licence, architectures[0]))
    write_text(folder / "scale.yaml", dump_config(config))
    trained = trained_sha256(RunFolder(config.output_dir).final)
    ExportRecord(**vars(parity) | {"trained_sha256": trained, "report_sha256": report_sha256(config)}).save(folder)


def check_written_export(config: RunConfig, folder: Path) -> None:
    """Compare an export that is there with the trained model that is beside it, if it is of that training."""
    run = RunFolder(config.output_dir)
    if ExportRecord.load(folder).trained_sha256 != trained_sha256(run.final):
        raise ExportParityError(f"{folder}: was made from another training than {run.final}")
    session = open_folder(run.final, config.model, config.method.router)
    _check(folder, session.load(), _prompts(config, session.tokenizer), config)


def check_format(config: RunConfig) -> None:
    """Refuse a format that the method does not have, or a precision that the format does not have."""
    known = _formats(config.method)
    if unknown := [name for name in config.export.formats if name not in known]:
        variant = f"a model of the variant {config.method.variant}"
        raise ConfigError(f"export.format: {unknown[0]}: {variant} is exported as {' or '.join(known)}")
    if "adapter" in config.export.formats and config.export.dtype != "float32":
        raise ConfigError(f"export.dtype: {config.export.dtype}: an adapter keeps what was trained, in float32")


def _formats(method: MethodConfig) -> tuple[str, ...]:
    if method.widens:
        return ("llama", "transformers", "adapter")
    return ("llama", "adapter") if method.variant == "lora" else ("llama",)


def _check(folder: Path, model: MethodModel, prompts: list[Tensor], config: RunConfig) -> Parity:
    """Load an export in every way in which it is served, and compare it with the trained model."""

    def compared(loaded: MethodModel, expected: Logits) -> Parity:
        parity = measure_parity(placed(loaded).eval(), model, expected, prompts)
        check_parity(parity, str(loaded.dtype).removeprefix("torch."))
        return parity

    if config.export.format == "transformers":
        return compared(load_written(ScaleForCausalLM, folder), served_logits)
    if config.export.format == "adapter":
        return compared(load_onto_base(folder, config.model), served_logits)
    assert config.export.format == "llama", config.export.format
    parity, routed = compared(load_written(AutoModelForCausalLM, folder), trained_logits), routed_class(folder)
    if routed is None:
        return parity
    return replace(parity, routed=compared(load_written(routed, folder), served_logits))


def _prompts(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[Tensor]:
    """Return (1, T) ids: the beginnings of held-out documents, or sample sentences where the config names none."""
    length = min(config.corpus.sequence_length, 512)
    documents = [
        corpus.document(index)[:length].astype("int64")
        for corpus in open_sources(config, config.evaluation.perplexity, tokenizer)
        for index in range(min(_DOCUMENTS_PER_CORPUS, len(corpus)))
    ]
    if documents:
        return [torch.from_numpy(ids).unsqueeze(0).to(device()) for ids in documents]
    return sample_ids(tokenizer)


def export_is_finished(config: RunConfig) -> bool:
    """Return whether the export that a config (with one format) asks for is already there, for this training."""
    folder = export_folder(config)
    if not is_whole(folder):
        return False
    changed = differences(load_config(folder / "scale.yaml"), config, EXPORT_SECTIONS)
    return not changed and ExportRecord.load(folder).trained_sha256 == trained_sha256(
        RunFolder(config.output_dir).final
    )


def card_is_current(config: RunConfig) -> bool:
    """Return whether the card of a finished export tells of the report that is there now (or that there is none)."""
    return ExportRecord.load(export_folder(config)).report_sha256 == report_sha256(config)


def renew_card(config: RunConfig) -> Path:
    """Write the folder of a finished export again with a new card; its other files are linked, not copied."""
    folder = export_folder(config)
    with new_folder(folder) as partial:
        for file in sorted(file for file in folder.rglob("*") if file.is_file()):
            if file.name not in (CARD, ExportRecord.FILE, MANIFEST, "scale.yaml"):
                _link(file, partial / file.relative_to(folder))
        write_card(partial, config, ExportRecord.load(folder), base_licence(config.model))
    return folder


def _link(file: Path, place: Path) -> None:
    """Give a file a second name; copy it where the file system has no such thing."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, place)
    except OSError:
        shutil.copyfile(file, place)
