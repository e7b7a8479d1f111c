"""The verb `scale export`: write an export, load and compare it, and only then keep or send it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from scale_cli.config.load import dump_config, load_config
from scale_cli.config.schema import EXPORT_SECTIONS, SERVED_SECTIONS, RunConfig, differences
from scale_cli.data.corpora import open_sources
from scale_cli.errors import CorpusError, ExportParityError
from scale_cli.evaluation.results import finished_report, report_sha256
from scale_cli.export.card import base_licence, model_card
from scale_cli.export.formats import Format, formats_of, routed_formats
from scale_cli.export.learned import Learned, Retained
from scale_cli.export.plain_folder import name_base
from scale_cli.export.publishing import check_repository, publish
from scale_cli.export.records import ExportRecord, Parity
from scale_cli.export.sizes import served_size
from scale_cli.planning.beginnings import DOCUMENTS_COMPARED, LONGEST_COMPARED
from scale_cli.processes import device
from scale_cli.runs.folder import RunFolder, folder_bytes, trained_sha256
from scale_cli.runs.opened import MethodFolder, Run, open_folder
from scale_cli.storage.atomic import is_whole, new_folder, read_json, write_text
from scale_cli.terminal import log
from scale_cli.upscale.building import MethodModel
from scale_cli.upscale.preservation import sample_ids


@dataclass(frozen=True)
class Exported:
    """An export that was checked against the trained model."""

    folder: Path
    parity: Parity


def export_all(config: RunConfig, repository: str | None, *, dry_run: bool) -> list[Exported]:
    """Write every format of a config, and send it to a repository of the hub, if one is named."""
    if repository is not None:
        check_repository(repository, config.export.format)
    exports = export_each(formats_of(Run(config).config))
    if repository is not None:
        for line in publish(exports[0].folder, repository, dry_run=dry_run):
            log(line)
    return exports


def export_each(formats: Sequence[Format]) -> list[Exported]:
    """Load a run's trained model once, and write it in each format; one that fails leaves nothing."""
    if not formats:
        return []
    config = formats[0].config
    final = Run(config).open_final()
    model = final.load_to_export()
    judged_by = _judged_by(config, final, model)
    return [_export(export_format, final, model, *judged_by) for export_format in formats]


def _export(
    made: Format,
    final: MethodFolder,
    model: MethodModel,
    prompts: list[Tensor],
    learned: Learned | None,
    retained: Retained | None,
) -> Exported:
    config = made.config
    report = finished_report(config, SERVED_SECTIONS)
    with new_folder(made.folder) as partial:
        made.write(partial, model, final, prompts)
        if made.needs_base:
            name_base(partial, config, final.record)
        parity = made.prove(partial, model, prompts, learned, retained)
        licence = base_licence(config.model)
        for file in licence.files:
            shutil.copyfile(file, partial / file.name)
        size = served_size(model, final.run.base_config, made.dtype)
        architectures = read_json(partial / "config.json").get("architectures") or [""]
        card = model_card(
            config,
            made,
            report=report,
            parity=parity,
            licence=licence,
            architecture=architectures[0],
            size=size,
        )
        write_text(partial / "README.md", card)
        write_text(partial / "scale.yaml", dump_config(config))
        record = ExportRecord(
            **vars(parity),
            trained_sha256=trained_sha256(final.path),
            report_sha256=report_sha256(config, report),
            size=size,
        )
        record.save(partial)
    log(f"format         {made.name}: {made.description}")
    if parity.routed is not None:
        ways = "with trust_remote_code=True, by `scale serve`, or in vLLM with our plug-in"
        log(f"routed         {ways}")
    elif made.config.method.served != "trained" and not made.answers_as_served:
        way = " or ".join(f"export.format={name}" for name in routed_formats(made.config))
        way = f"set {way}" if way else f"give {made.config.output_dir} to `scale generate`"
        log(f"note           it holds only the trained head; for the router, {way}")
    log(f"parity         good: {parity}")
    if parity.routed is not None:
        log(f"parity, routed good: {parity.routed}")
    size_mb = folder_bytes(made.folder) / 1e6
    log(f"written        {made.folder} ({size_mb:,.1f} MB), its model card is README.md")
    return Exported(made.folder, parity)


def check_written_export(config: RunConfig, folder: Path) -> str:
    """Return why an export could not be judged by held-out text; empty if it was.

    ExportParityError: it is of another training, or does not compute the same.
    """
    run = Run(config)
    if ExportRecord.load(folder).trained_sha256 != trained_sha256(run.folder.final):
        raise ExportParityError(
            f"{folder}: was made from another training than {run.folder.final}; "
            "run `scale export` again"
        )
    final = open_folder(run.folder.final, run)
    model = final.load_to_export()
    missing = ""
    try:
        judged_by = _judged_by(config, final, model)
    except CorpusError as error:
        missing = str(error)
        judged_by = sample_ids(final.tokenizer), None, None
    (export_format,) = formats_of(config)
    export_format.prove(folder, model, *judged_by)
    return missing


def _judged_by(
    config: RunConfig, final: MethodFolder, model: MethodModel
) -> tuple[list[Tensor], Learned | None, Retained | None]:
    """Return the text by which exports are judged, and what it costs the trained model."""
    prompts = _prompts(config, final.tokenizer)
    return prompts, Learned.of(final, model), Retained(final, model)


def _prompts(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[Tensor]:
    """Return (1, T) ids: beginnings of held-out documents, or sample texts if there are none."""
    length = min(config.corpus.sequence_length, LONGEST_COMPARED)
    documents = [
        corpus.with_boundary(index)[:length].astype("int64")
        for corpus in open_sources(config, config.evaluation.perplexity, tokenizer)
        for index in range(min(DOCUMENTS_COMPARED, len(corpus)))
    ]
    prompts = [torch.from_numpy(ids).unsqueeze(0).to(device()) for ids in documents]
    return prompts or sample_ids(tokenizer)


def export_is_finished(export_format: Format) -> bool:
    """Return whether an export of the current training and report exists."""
    folder = export_format.folder
    config = export_format.config
    if not is_whole(folder):
        return False
    if differences(load_config(folder / "scale.yaml"), config, EXPORT_SECTIONS):
        return False
    made = ExportRecord.load(folder)
    training = trained_sha256(RunFolder(config.output_dir).final)
    report = report_sha256(config, finished_report(config, SERVED_SECTIONS))
    return made.trained_sha256 == training and made.report_sha256 == report
