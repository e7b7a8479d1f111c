"""One hash for a tokenizer."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from scale_cli.storage.atomic import file_sha256, writing

# What the saved configuration says of how the tokenizer was loaded, not of how it tokenises.
_HOW_LOADED = ("is_local", "local_files_only", "name_or_path", "transformers_version")


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return one hash over the files that a tokenizer saves."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        with writing(Path(folder)):
            tokenizer.save_pretrained(folder)
        files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
        lines = "".join(f"{file.name} {_content(file)}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def _content(file: Path) -> str:
    if file.name != "tokenizer_config.json":
        return file_sha256(file)
    settings = json.loads(file.read_text(encoding="utf-8"))
    return json.dumps({key: value for key, value in settings.items() if key not in _HOW_LOADED}, sort_keys=True)
