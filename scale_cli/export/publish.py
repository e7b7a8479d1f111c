"""Sending an export to the hub: dry unless it is asked for in so many words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from scale_cli.errors import PublishError, UsageError
from scale_cli.storage.records import BaseRecord

# What tells of the folders of this machine, and is of use beside the run alone; an adapter cannot be loaded without.
_STAYS_HERE = ("manifest.json", "parity.json", "scale.yaml")


@dataclass(frozen=True)
class Publication:
    """What was sent, or would be."""

    repository: str  # on the hub
    files: dict[str, int]  # names and bytes
    url: str | None  # of the commit; None where nothing was sent
    names_folders: bool = False  # whether what is sent tells of folders of this machine

    def lines(self) -> list[str]:
        """Return one line for each file, and what became of them."""
        total = f"{len(self.files)} files, {sum(self.files.values()) / 1e6:,.1f} MB"
        if self.url is not None:
            return [f"sent           {total}: {self.url}"]
        listed = [f"  {num_bytes:>15,} bytes  {name}" for name, num_bytes in self.files.items()]
        if self.names_folders:
            listed.append("               scale.yaml and base.json name folders as the config does")
        return [
            f"dry run        {total} would go to https://huggingface.co/{self.repository} (private where it is new):",
            *listed,
            "               nothing was sent; --no-dry-run sends it",
        ]


def check_repository(repository: str, formats: Sequence[str]) -> None:
    """Refuse what cannot be a model repository of somebody, before anything is exported."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UsageError(f"--push-to-hub {repository}: {' '.join(str(error).split())}") from None
    if repository.count("/") != 1:
        raise UsageError(f"--push-to-hub {repository}: OWNER/NAME is wanted")
    if len(formats) > 1:
        raise UsageError(
            f"--push-to-hub {repository}: a repository holds one model; of {' and '.join(formats)} say which is sent: "
            f"export.format={formats[-1]}"
        )


def planned(folder: Path, repository: str) -> Publication:
    """Return what `publish` would send."""
    files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
    sizes = {name: file.stat().st_size for name, file in files.items() if name not in _staying_here(folder)}
    return Publication(repository, sizes, None, names_folders="scale.yaml" in sizes)


def _staying_here(folder: Path) -> tuple[str, ...]:
    return () if BaseRecord.is_in(folder) else _STAYS_HERE


def publish(folder: Path, repository: str) -> Publication:
    """Send a folder to the hub, as one commit to a repository that is made private where it is new."""
    if get_token() is None:
        raise PublishError("--push-to-hub: not logged in to the hub: `hf auth login`, or HF_TOKEN in the environment")
    hub = HfApi()
    try:
        hub.create_repo(repository, private=True, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Export by scale",
            ignore_patterns=list(_staying_here(folder)),
        )
    except (HfHubHTTPError, OSError) as error:
        raise PublishError(f"--push-to-hub {repository}: {' '.join(str(error).split())}") from None
    return replace(planned(folder, repository), url=str(commit.commit_url))
