"""The model card of an export: what it was made of, how, what it forgot, and under which licence.

The text is in `templates/card.md.j2`; this module collects its values. Source: the hub's metadata,
https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from markupsafe import Markup

from scale_cli.config.schema import ModelConfig, RunConfig
from scale_cli.config.sources import TextSource
from scale_cli.data.ledger import TokenLedger
from scale_cli.evaluation.render import failures
from scale_cli.evaluation.results import NOT_COVERED, Report
from scale_cli.export.formats import Format, routed_formats
from scale_cli.model.configuration_scale import LEAST_TRANSFORMERS
from scale_cli.report import render
from scale_cli.runs.folder import RunFolder
from scale_cli.training.records import BranchPoint, TrainState
from scale_cli.upscale.base_files import BaseRecord, looks_local
from scale_cli.values import language_name

# Names that the hub's models use: Llama has USE_POLICY.md, Apache-licensed work may have NOTICE.
_LICENCE_FILES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")


@dataclass(frozen=True)
class Licence:
    """The licence that a base states."""

    # from its card's metadata (`apache-2.0`, `llama3.2`); None if not stated
    identifier: str | None = None
    name: str | None = None  # if `identifier` is `other`: a licence that the hub does not know
    link: str | None = None  # to its text
    files: tuple[Path, ...] = ()  # its licence files


def base_licence(model: ModelConfig) -> Licence:
    """Return the licence that the plain base states, in its README.md's metadata and in files
    beside it.

    A base from the hub is looked up there, and offline in its cache; if neither has it, the licence
    is empty.
    """
    folder = Path(model.base)
    if not looks_local(model.base):
        wanted = ["README.md", *_LICENCE_FILES]
        try:
            found = snapshot_download(model.base, revision=model.revision, allow_patterns=wanted)
        except (HfHubHTTPError, OSError):
            return Licence()
        folder = Path(found)
    files = {file for pattern in _LICENCE_FILES for file in folder.glob(pattern) if file.is_file()}
    if not (folder / "README.md").is_file():
        return Licence(files=tuple(sorted(files)))
    # Other errors in the metadata of the base's card do not matter here.
    data = ModelCard.load(folder / "README.md", ignore_metadata_errors=True).data
    return Licence(data.license, data.license_name, data.license_link, tuple(sorted(files)))


def model_card(
    config: RunConfig, export: Format, *, report: Report | None, licence: Licence, **values: Any
) -> str:
    """Return the README.md of an export; `licence` is the base's, `values` are others of
    `card.md.j2`.
    """
    final = RunFolder(config.output_dir).final
    record = BaseRecord.load(final)
    is_local = looks_local(record.name)
    sources = config.corpus.sources
    measured = config.evaluation.perplexity
    new: Sequence[TextSource] = config.corpus.new
    if not sources:
        new = [source for source in measured if source.role == "acquisition"]
    languages = [source.language for source in measured if source.role == "retention"]
    languages += [source.language for source in (*sources, *new)]
    taught = [language_name(source.language) for source in new]
    metadata = ModelCardData(
        language=list(dict.fromkeys(languages)),
        license=licence.identifier,
        license_name=licence.name,
        license_link=licence.link,
        library_name=export.library,
        pipeline_tag="text-generation",
        base_model=None if is_local else record.name,
        tags=["scale", "continual-pretraining", config.method.variant],
    )
    is_served = export.answers_as_served
    return render(
        "card.md.j2",
        metadata=Markup(metadata.to_yaml()),
        # Of a local folder only the last two parts, to keep its location private.
        base="/".join(Path(record.name).parts[-2:]) if is_local else record.name,
        record=record,
        config=config,
        state=TrainState.load(final),
        begun=BranchPoint.load_if_there(final),
        tokens=TokenLedger.load(final).sources,  # by source
        taught=list(dict.fromkeys(taught)),
        licence=licence,
        kind=export.loaded_as,
        least_transformers=".".join(map(str, LEAST_TRANSFORMERS)),
        dtype=config.model.dtype,
        method=config.method.definition,
        export=export,
        routed_formats=routed_formats(config),
        report=report,
        failures=[] if report is None else failures(report),
        answers=report.served if report is not None and is_served else "trained",
        bounds=_bounds(config) if is_served else {},
        not_covered=NOT_COVERED,
        **values,
    )


def _bounds(config: RunConfig) -> dict[str, float]:
    """Return the nats that a document costs at most, over each head and by a prompt's script."""
    router = config.method.router
    if router is None or config.method.served != "posterior":
        return {}
    bounds = {"base": -math.log(router.prior), "trained": -math.log(1.0 - router.prior)}
    if config.script_prior is not None:
        bounds["script"] = -math.log(min(config.script_prior, router.prior, 1.0 - router.prior))
    return bounds
