"""The verb `scale export`: write, load what was written, compare, and only then call it done, or send it to the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils._validators import validate_repo_id
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from scale_cli.config.load import dump_config, load_config
from scale_cli.config.same_run import EXPORT_SECTIONS, differences
from scale_cli.config.schema import RunConfig
from scale_cli.data.corpora import open_sources
from scale_cli.errors import ConfigError, ExportParityError, PublishError, UsageError, one_line
from scale_cli.evaluation.results import finished_report, report_sha256
from scale_cli.export.card import base_licence, model_card
from scale_cli.export.formats import FORMATS
from scale_cli.export.parity import check_parity, measure_parity, parity_in_words
from scale_cli.processes import device, placed
from scale_cli.storage.atomic import is_whole, new_folder, read_json, write_text
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.records import BaseRecord, ExportRecord, Parity, trained_sha256
from scale_cli.upscale.method import MethodModel
from scale_cli.upscale.preservation import sample_ids
from scale_cli.upscale.run import MethodFolder, Run, open_folder

# What tells of the folders of this machine, and is of use beside the run alone; an adapter cannot be loaded without.
_STAYS_HERE = ["manifest.json", "parity.json", "scale.yaml"]


_DOCUMENTS_PER_CORPUS = 4


@dataclass(frozen=True)
class ExportSummary:
    """What was exported, for the terminal."""

    folder: Path
    export_format: str
    lacks_router: bool  # where the trained model has one
    parity: Parity

    def lines(self) -> list[str]:
        num_bytes = sum(file.stat().st_size for file in self.folder.iterdir() if file.is_file())
        lines = [f"format         {self.export_format}: {FORMATS[self.export_format].description}"]
        if self.parity.routed is not None:
            lines.append("routed         with trust_remote_code=True, by `scale serve`, or in vLLM with our plug-in")
        elif self.lacks_router:
            lines.append("note           it holds the trained head; this router needs export.format=transformers")
        lines += [
            f"{name:<15}{parity_in_words(parity)}"
            for name, parity in (("parity", self.parity), ("parity, routed", self.parity.routed))
            if parity is not None
        ]
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
    show: Callable[[ExportSummary], None],
    log: Callable[[str], None],
    *,
    dry_run: bool,
) -> None:
    """Write every format that a config asks for, and send it to a repository of the hub, where one is named."""
    if repository is not None:
        check_repository(repository, config.export.formats)
    for summary in export_each(one_by_one(config)):
        show(summary)
        if repository is not None:
            for line in publish(summary.folder, repository, dry_run=dry_run):
                log(line)


def export(config: RunConfig) -> ExportSummary:
    """Write the trained model in the format of a config that has one (`one_by_one`), or leave nothing behind."""
    (summary,) = export_each([config])
    return summary


def export_each(configs: Sequence[RunConfig]) -> Iterator[ExportSummary]:
    """Write the trained model, loaded once, in the format of each config; they differ in that alone."""
    for config in configs:
        check_format(config)
    final = Run(configs[0]).open_final()
    model, prompts = final.load_to_export(), _prompts(configs[0], final.tokenizer)
    for config in configs:
        yield _export(config, final, model, prompts)


def _export(config: RunConfig, final: MethodFolder, model: MethodModel, prompts: list[Tensor]) -> ExportSummary:
    (name,) = config.export.formats
    export_format, folder, report = FORMATS[name](config), export_folder(config), finished_report(config)
    with new_folder(folder) as partial:
        export_format.write(partial, model, final, prompts)
        parity = _check(partial, model, prompts, config)
        licence = base_licence(config.model)
        licence.copy_files(partial)
        architectures = read_json(partial / "config.json").get("architectures") or [""]
        write_text(partial / "README.md", model_card(config, export_format, report, parity, licence, architectures[0]))
        write_text(partial / "scale.yaml", dump_config(config))
        made_of = {"trained_sha256": trained_sha256(final.path), "report_sha256": report_sha256(config, report)}
        ExportRecord(**vars(parity) | made_of).save(partial)
    lacks_router = config.method.definition.routes and not export_format.answers_as_served
    return ExportSummary(folder, name, lacks_router, parity)


def export_folder(config: RunConfig) -> Path:
    """Return where the export of a config with one format lands."""
    (export_format,) = config.export.formats
    return RunFolder(config.output_dir).export(export_format, config.export.dtype)


def check_written_export(config: RunConfig, folder: Path) -> None:
    """Compare an export that is there with the trained model that is beside it, if it is of that training."""
    run = Run(config)
    if ExportRecord.load(folder).trained_sha256 != trained_sha256(run.folder.final):
        raise ExportParityError(f"{folder}: was made from another training than {run.folder.final}")
    final = open_folder(run.folder.final, run)
    _check(folder, final.load_to_export(), _prompts(config, final.tokenizer), config)


def check_format(config: RunConfig) -> None:
    """Refuse a format that the method does not have, or a precision that the format does not have."""
    known = [name for name, one in FORMATS.items() if one(config).is_had]
    if unknown := [name for name in config.export.formats if name not in known]:
        variant = f"a model of the variant {config.method.variant}"
        raise ConfigError(f"export.format: {unknown[0]}: {variant} is exported as {' or '.join(known)}")
    for name in config.export.formats:
        FORMATS[name](config).check()


def _check(folder: Path, model: MethodModel, prompts: list[Tensor], config: RunConfig) -> Parity:
    """Load an export in every way in which it is served, and compare it with the trained model."""
    (name,) = config.export.formats
    parities = []
    for loaded, expected in FORMATS[name](config).load(folder):
        parities.append(measure_parity(placed(loaded).eval(), model, expected, prompts))
        check_parity(parities[-1], str(loaded.dtype).removeprefix("torch."))
        del loaded  # before another is loaded
    return replace(parities[0], routed=parities[1] if len(parities) > 1 else None)


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
    """Return whether the export that a config (with one format) asks for is there, of this training and this report."""
    folder, run = export_folder(config), RunFolder(config.output_dir)
    if not is_whole(folder) or differences(load_config(folder / "scale.yaml"), config, EXPORT_SECTIONS):
        return False
    made, now = ExportRecord.load(folder), (trained_sha256(run.final), report_sha256(config, finished_report(config)))
    return (made.trained_sha256, made.report_sha256) == now


def check_repository(repository: str, formats: Sequence[str]) -> None:
    """Refuse what cannot be a model repository of somebody, before anything is exported."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UsageError(f"--push-to-hub {repository}: {one_line(error)}") from None
    if repository.count("/") != 1:
        raise UsageError(f"--push-to-hub {repository}: OWNER/NAME is wanted")
    if len(formats) > 1:
        raise UsageError(
            f"--push-to-hub {repository}: a repository holds one model; of {' and '.join(formats)} say which is sent: "
            f"export.format={formats[-1]}"
        )


def publish(folder: Path, repository: str, *, dry_run: bool) -> list[str]:
    """Send a folder to the hub, as one commit to a repository that is made private where it is new.

    Returns:
        Lines on what was sent, or in a dry run would be.
    """
    is_adapter = BaseRecord.is_in(folder)
    staying = [] if is_adapter else _STAYS_HERE
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name not in staying]
    sizes = {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
    total = f"{len(sizes)} files, {sum(sizes.values()) / 1e6:,.1f} MB"
    if dry_run:
        note = ["               scale.yaml and base.json name folders as the config does"] if is_adapter else []
        return [
            f"dry run        {total} would go to https://huggingface.co/{repository} (private where it is new):",
            *(f"  {num_bytes:>15,} bytes  {name}" for name, num_bytes in sizes.items()),
            *note,
            "               nothing was sent; --no-dry-run sends it",
        ]
    if get_token() is None:
        raise PublishError("--push-to-hub: not logged in to the hub: `hf auth login`, or HF_TOKEN in the environment")
    hub = HfApi()
    try:
        hub.create_repo(repository, private=True, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Export by scale", ignore_patterns=staying
        )
    except (HfHubHTTPError, OSError) as error:
        raise PublishError(f"--push-to-hub {repository}: {one_line(error)}") from None
    return [f"sent           {total}: {commit.commit_url}"]
