"""Send an export to the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from scale_cli.errors import RunError, UsageError, one_line
from scale_cli.methods.given import ADAPTER_CONFIG
from scale_cli.methods.stream_kinds import ROUTER
from scale_cli.storage.atomic import read_json
from scale_cli.upscale.base_files import BaseRecord, looks_local

# Not sent to the hub: these name local folders, and are only useful beside the run. An adapter
# needs them to load.
_STAYS_HERE = ["manifest.json", "parity.json", "scale.yaml"]
_TELL_PATHS = ["scale.yaml", "base.json"]  # of an adapter
# Left by an earlier export of another kind, these would change what a loader makes of a repository.
_REPLACED = [
    "*.safetensors",
    "*.safetensors.index.json",
    ADAPTER_CONFIG,
    "base.json",
    *_STAYS_HERE,
]


def check_repository(repository: str, formats: Sequence[str]) -> None:
    """Raise UsageError if the name is not OWNER/NAME, or if several formats would go to it."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UsageError(f"--push-to-hub {repository}: {one_line(error)}") from None
    if repository.count("/") != 1:
        raise UsageError(f"--push-to-hub {repository}: not of the form OWNER/NAME")
    if len(formats) > 1:
        raise UsageError(
            f"--push-to-hub {repository}: a repository holds one model, but the config exports "
            f"{' and '.join(formats)}; choose one: export.format={formats[-1]}"
        )


def publish(folder: Path, repository: str, *, dry_run: bool) -> list[str]:
    """Send a folder to the hub as one commit; a new repository is made private.

    The commit removes the weights and settings of an earlier export that it does not overwrite.

    Returns:
        Lines that say what was sent, or would be in a dry run.
    """
    is_adapter = BaseRecord.is_in(folder)
    staying = [] if is_adapter else _STAYS_HERE
    sizes = {
        file.relative_to(folder).as_posix(): file.stat().st_size
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name not in staying
    }
    total = f"{len(sizes)} files, {sum(sizes.values()) / 1e6:,.1f} MB"
    if dry_run:
        telling = [*(_TELL_PATHS if is_adapter else []), *_naming_a_local_base(folder)]
        paths = f"               {' and '.join(telling)} contain the paths of folders in the config"
        return [
            f"dry run        {total} would go to https://huggingface.co/{repository} "
            "(private if it is new):",
            *(f"  {num_bytes:>15,} bytes  {name}" for name, num_bytes in sizes.items()),
            *([paths] if telling else []),
            "               weights and settings of an earlier export in that repository would go",
            "               nothing was sent; add --no-dry-run to send it",
        ]
    if get_token() is None:
        raise RunError(
            "--push-to-hub: not logged in to the hub; run `hf auth login`, "
            "or set HF_TOKEN in the environment"
        )
    hub = HfApi()
    try:
        hub.create_repo(repository, private=True, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Export by scale",
            ignore_patterns=staying,
            delete_patterns=_REPLACED,
        )
    except Exception as error:  # the hub's own, or one of the network library below it
        raise RunError(f"--push-to-hub {repository}: {one_line(error)}") from None
    return [f"sent           {total}: {commit.commit_url}"]


def _naming_a_local_base(folder: Path) -> list[str]:
    """Return config.json's name if an export is routed with a base that lies in a folder."""
    path = folder / "config.json"
    router = read_json(path).get(ROUTER) if path.is_file() else None
    base = (router or {}).get("base")
    return [path.name] if base is not None and looks_local(base) else []
