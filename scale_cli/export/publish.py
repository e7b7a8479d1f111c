"""Sending an export to the hub: dry unless it is asked for in so many words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from scale_cli.errors import PublishError, UsageError, one_line
from scale_cli.storage.records import BaseRecord

# What tells of the folders of this machine, and is of use beside the run alone; an adapter cannot be loaded without.
_STAYS_HERE = ["manifest.json", "parity.json", "scale.yaml"]


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
