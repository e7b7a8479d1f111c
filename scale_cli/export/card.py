"""The model card of an export: what it was made of, how, what it forgot, and under which licence.

Source: the hub's metadata, https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from markupsafe import Markup

from scale_cli.config.schema import ModelConfig, RunConfig
from scale_cli.data.ledger import SourceTokens, TokenLedger
from scale_cli.evaluation.results import Report, guarantee
from scale_cli.export.formats import FORMATS
from scale_cli.export.parity import parity_in_words
from scale_cli.model.configuration_scale import LEAST_TRANSFORMERS
from scale_cli.report import (
    DASH,
    Row,
    Table,
    code,
    markdown,
    number,
    percent,
    share_cell,
    with_interval,
    worst_document,
)
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.records import BaseRecord, BranchPoint, Parity, TrainState
from scale_cli.upscale.base import looks_local, root_model, stages_below
from scale_cli.values import language_name

_OPTIMISERS = {"adamw": "AdamW", "muon": "Muon on the matrices and AdamW on the rest"}
# By the names that the hub's models use: Llama comes with USE_POLICY.md, Apache-licensed work may come with NOTICE.
_LICENCE_FILES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")


@dataclass(frozen=True)
class Licence:
    """What a base says of its licence."""

    # as its card's metadata has it (`apache-2.0`, `llama3.2`); None where it says nothing
    identifier: str | None = None
    name: str | None = None  # of a licence that the hub does not know, where `identifier` is `other`
    link: str | None = None  # to its text
    files: tuple[Path, ...] = ()  # its licence files

    def copy_files(self, folder: Path) -> None:
        for file in self.files:
            shutil.copyfile(file, folder / file.name)

    def sentence(self) -> str:
        named = self.name or self.identifier
        if not named and not self.files:
            return "The base came without a word on its licence. Find it out before you pass this model on."
        beside = f"; its text is beside this card: {', '.join(f'`{file.name}`' for file in self.files)}"
        whose = f"The base's licence, {named}," if named else "The base's licence"
        return f"{whose} holds for this model too{beside if self.files else ''}."


def base_licence(model: ModelConfig) -> Licence:
    """Return what the plain base says of its licence, in its README.md's metadata and in files beside it.

    A base from the hub is asked there; offline, its cached copy is, and where that has neither, nothing is known.
    """
    model = root_model(model)
    folder = Path(model.base)
    if not looks_local(model.base):
        wanted = ["README.md", *_LICENCE_FILES]
        try:
            folder = Path(snapshot_download(model.base, revision=model.revision, allow_patterns=wanted))
        except (HfHubHTTPError, OSError):
            return Licence()
    files = tuple(sorted({file for pattern in _LICENCE_FILES for file in folder.glob(pattern) if file.is_file()}))
    if not (folder / "README.md").is_file():
        return Licence(files=files)
    # The card is somebody else's: what is wrong in the rest of its metadata is no matter here.
    data = ModelCard.load(folder / "README.md", ignore_metadata_errors=True).data
    return Licence(data.license, data.license_name, data.license_link, files)


@dataclass(frozen=True)
class _Stage:
    """One training, of the model itself or of a widened base that it stands on."""

    name: str  # of its run
    config: RunConfig  # of its run
    folder: Path  # final/, or an adapter export, which says neither how long it was trained nor on how much


def model_card(config: RunConfig, report: Report | None, parity: Parity, licence: Licence, architecture: str) -> str:
    """Return the README.md of an export; `architecture` is the class that its config.json names."""
    below = [_Stage(one.output_dir.name, one, folder) for folder, one in stages_below(config.model)]
    stages = [*below[::-1], _Stage(config.output_dir.name, config, RunFolder(config.output_dir).final)]
    record = BaseRecord.load(stages[0].folder)
    (name,) = config.export.formats
    definition, export_format = config.method.definition, FORMATS[name](config)
    kind, answers_as_served = export_format.loaded_as, export_format.answers_as_served
    runs, library = [stage.config for stage in stages], "peft" if kind == "peft" else "transformers"
    return markdown(
        "export_card.md.j2",
        **shared_values(record, runs, licence, config.method.variant, library),
        loading=loading(kind, architecture, config.model.dtype),
        config=config,
        report=report,
        stages=stages,
        routed=kind == "routed",
        answers_as_served=answers_as_served,
        method=definition.label,
        making=_making(stages, record, name, parity).markdown(),
        sources=_sources_table(stages).markdown(),
        served=None if report is None else _figures(report, report.served).markdown(),
        plainly=None if report is None else _figures(report, "adapted").markdown(),
        guarantee=guarantee(config.method.router) if definition.routes and answers_as_served else "",
        language_name=language_name,
        number=number,
        percent=percent,
    )


def loading(kind: str, architecture: str = "", dtype: str = "") -> Markup:
    """Return how a folder is loaded: of a format, of a plain one that can route too (routed), or by PEFT (peft)."""
    least = ".".join(map(str, LEAST_TRANSFORMERS))
    values = {"kind": kind, "architecture": architecture, "dtype": dtype, "least_transformers": least}
    return Markup(markdown("card_loading.md.j2", **values).strip("\n"))


def shared_values(
    record: BaseRecord,  # of the plain base
    runs: Sequence[RunConfig],  # the trainings that made the model, the first of them on that base
    licence: Licence,
    kind: str,  # of model, for the hub's tags
    library: str = "transformers",  # that loads it, by the hub's name
) -> dict[str, Any]:
    """Return what every card holds: the hub's metadata, what the base is called, what was taught, the licence."""
    base, codes = runs[0].model.base, list[str]()
    for run in runs:
        codes += (source.language for source in run.evaluation.perplexity if source.role == "retention")
        codes += (source.language for source in run.corpus.sources)
    metadata = ModelCardData(
        language=_distinct(codes),
        license=licence.identifier,
        license_name=licence.name,
        license_link=licence.link,
        library_name=library,
        pipeline_tag="text-generation",
        base_model=None if looks_local(base) else base,
        tags=["scale", "continual-pretraining", kind],
    )
    taught = _distinct(source.language for run in runs for source in run.corpus.new)
    return {
        "metadata": Markup(metadata.to_yaml()),
        "base": base_title(record),
        "taught": [language_name(code) for code in taught],
        "licence": Markup(licence.sentence()),
    }


def _distinct(codes: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(codes))


def base_title(record: BaseRecord) -> str:
    """Return what the base is called, of a local folder its last two names: where it lies is nobody's business."""
    return "/".join(Path(record.name).parts[-2:]) if looks_local(record.name) else record.name


def _making(stages: list[_Stage], record: BaseRecord, export_format: str, parity: Parity) -> Table:
    revision = f" at {record.revision}" if record.revision else ""
    rows: list[Row] = [
        ["base", f"{base_title(record)}{revision}, {record.dtype}"],
        ["base, SHA-256", code(record.content_sha256)],
    ]
    if (quantisation := stages[0].config.model.quantisation) is not None:
        here = "this folder stands on the base so held"
        if export_format != "adapter":
            here = (
                "in this folder they are held as the numbers that those stand for, so the base's logits are to rounding"
            )
        rows.append(["the base while it was trained", f"linear maps in {quantisation}, by torchao; {here}"])
    for stage in stages:
        named, method = f"{stage.name}: " if len(stages) > 1 else "", stage.config.method
        if stage is not stages[0]:
            rows.append([f"{named}stands on, SHA-256", code(BaseRecord.load(stage.folder).content_sha256)])
        rows.append([f"{named}method", method.in_words + method.definition.served_in_words(method.settings)])
        rows.append([f"{named}trained", _trained(stage)])
    routed = "" if parity.routed is None else f"; served routed: {parity_in_words(parity.routed)}"
    rows.append(["this folder", f"format {export_format}; {parity_in_words(parity)}{routed}"])
    return Table(["", ""], rows, "ll")


def _trained(stage: _Stage) -> str:
    """Return how much was trained, and what came before and after; `scale.yaml` beside the card has every setting."""
    train, state = stage.config.train, TrainState.load_if_there(stage.folder)
    if state is None:
        return "not known: it is an adapter export"
    sequences = f"{train.global_batch_size:,} sequences of {stage.config.corpus.sequence_length:,} tokens"
    told = f"{state.step:,} steps of {sequences}: {state.num_tokens:,} tokens"
    told += f"; {_OPTIMISERS[train.optimiser]}, lr {train.lr:g}, seed {stage.config.seed}"
    if (begun := BranchPoint.load_if_there(stage.folder)) is not None:
        told += f"; begun with {begun}"
    if train.average is not None:
        told += f"; an average of weights ({train.average.kind}, {train.averaged_steps:,} steps)"
    return told


def _sources_table(stages: list[_Stage]) -> Table:
    rows = []
    for stage in stages:
        ledgers = tokens_by_source(stage.folder)
        for source in stage.config.corpus.sources:
            counts = ["not known"] * 4
            if (tokens := ledgers.get(source.name)) is not None:
                dropped = sum(count.documents for count in tokens.corpus.dropped.values())
                numbers = tokens.corpus.read.documents, dropped, tokens.corpus.num_tokens, tokens.num_trained
                counts = [f"{count:,}" for count in numbers]
            use = "replay, to keep it" if source.role == "replay" else "new text"
            rows.append([stage.name, source.name, language_name(source.language), use, *counts])
    titles = ["run", "source", "language", "use", "documents read", "dropped", "tokens", "tokens trained on"]
    return Table(titles, rows, "l" * 8)


def tokens_by_source(folder: Path) -> dict[str, SourceTokens]:
    """Return the account of every source that was trained on; empty where a folder has none, as an adapter export."""
    ledger = TokenLedger.load_if_there(folder)
    return {} if ledger is None else ledger.sources


def _figures(report: Report, answers: str) -> Table:
    """Return what the head (or the router) that answers made of every held-out corpus, beside the base."""
    titles = ["held-out", "", "documents", "bytes/token", "base", "this model", "difference [95 %]"]
    titles += ["worst document, nats − base", "letters in the prompt's script, base and this model [95 %]"]
    rows = []
    for corpus in report.corpora:
        base, head = corpus.heads["base"], corpus.heads[answers]
        in_script = f"{share_cell(base.in_script)}, {share_cell(head.in_script)}" if corpus.num_prompts else DASH
        rows.append(
            [
                corpus.name,
                f"{language_name(corpus.language)}, {corpus.role}",
                f"{corpus.num_documents:,}",
                f"{corpus.bytes_per_token:.2f}",
                number(base.bits_per_byte),
                number(head.bits_per_byte),
                with_interval(head.bits_per_byte_difference, 4),
                worst_document(head.worst_document_nats),
                in_script,
            ]
        )
    return Table(titles, rows, "l" * len(titles)).without_empty_columns()
