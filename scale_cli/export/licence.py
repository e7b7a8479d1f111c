"""The base's licence: what it says of itself, and its files, carried over to what is made of it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCard, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from scale_cli.config.schema import ModelConfig
from scale_cli.upscale.base import looks_local, root_model

# By the names that the hub's models use: Llama comes with USE_POLICY.md, Apache-licensed work may come with NOTICE.
_FILES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")


@dataclass(frozen=True)
class Licence:
    """What a base model may be used for, as far as it says."""

    # as its card's metadata has it (`apache-2.0`, `llama3.2`); None where it says nothing
    identifier: str | None = None
    name: str | None = None  # of a licence that the hub does not know, where `identifier` is `other`
    link: str | None = None  # to its text
    files: tuple[Path, ...] = ()  # its licence files

    def copy_files(self, folder: Path) -> None:
        """Copy the licence files into a folder."""
        for file in self.files:
            shutil.copyfile(file, folder / file.name)

    def sentence(self) -> str:
        """Return one sentence."""
        named = self.name or self.identifier
        if named or self.files:
            beside = f"; its text is beside this card: {', '.join(f'`{file.name}`' for file in self.files)}"
            whose = f"The base's licence, {named}," if named else "The base's licence"
            return f"{whose} holds for this model too{beside if self.files else ''}."
        return "The base came without a word on its licence. Find it out before you pass this model on."


def base_licence(model: ModelConfig) -> Licence:
    """Return what a base says of its licence: in its README.md's metadata, and in licence files beside it.

    A base from the hub is asked there; offline, its cached copy is, and where that has neither, nothing is known. Of a
    widened base it is the plain model at its bottom that has a licence.
    """
    model = root_model(model)
    folder = Path(model.base) if looks_local(model.base) else _hub_folder(model)
    if folder is None:
        return Licence()
    files = tuple(sorted({file for pattern in _FILES for file in folder.glob(pattern) if file.is_file()}))
    if not (folder / "README.md").is_file():
        return Licence(files=files)
    # The card is somebody else's: what is wrong in the rest of its metadata is no matter here.
    data = ModelCard.load(folder / "README.md", ignore_metadata_errors=True).data
    return Licence(data.license, data.license_name, data.license_link, files)


def _hub_folder(model: ModelConfig) -> Path | None:
    try:
        return Path(snapshot_download(model.base, revision=model.revision, allow_patterns=["README.md", *_FILES]))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
        return None
