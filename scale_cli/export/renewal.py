"""Whether an export is there already, and a new model card for one whose weights need no new writing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from scale_cli.config.compare import EXPORT_SECTIONS, differences
from scale_cli.config.load import load_config
from scale_cli.config.schema import RunConfig
from scale_cli.evaluation.run import report_sha256
from scale_cli.export.licence import base_licence
from scale_cli.export.parity import Parity
from scale_cli.export.run import CARD, PARITY, export_folder, write_card
from scale_cli.storage.atomic import MANIFEST, is_whole, new_folder, read_json
from scale_cli.storage.layout import RunFolder
from scale_cli.upscale.folder import trained_sha256


def export_is_finished(config: RunConfig) -> bool:
    """Return whether the export that a config (with one format) asks for is already there, for this training."""
    folder = export_folder(config)
    if not is_whole(folder):
        return False
    changed = differences(load_config(folder / "scale.yaml"), config, EXPORT_SECTIONS)
    exported_sha256 = read_json(folder / PARITY)["trained_sha256"]
    return not changed and exported_sha256 == trained_sha256(RunFolder(config.output_dir).final)


def card_is_current(config: RunConfig) -> bool:
    """Return whether the card of a finished export tells of the report that is there now (or that there is none)."""
    told_of: dict[str, str | None] = read_json(export_folder(config) / PARITY)
    return "report_sha256" in told_of and told_of["report_sha256"] == report_sha256(config)


def renew_card(config: RunConfig) -> Path:
    """Write the folder of a finished export again with a new card; its other files are linked, not copied.

    Raises:
        StorageError: it could not be written; the export is as it was.
    """
    folder = export_folder(config)
    told = read_json(folder / PARITY)
    with new_folder(folder) as partial:
        for file in sorted(file for file in folder.rglob("*") if file.is_file()):
            if file.name not in (CARD, PARITY, MANIFEST, "scale.yaml"):
                _link(file, partial / file.relative_to(folder))
        write_card(partial, config, Parity.from_json(told), base_licence(config.model))
    return folder


def _link(file: Path, place: Path) -> None:
    """Give a file a second name; copy it where the file system has no such thing."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, place)
    except OSError:
        shutil.copyfile(file, place)
