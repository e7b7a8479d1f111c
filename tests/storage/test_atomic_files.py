"""A file is as it was or as it shall be; what is damaged is told by its name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from scale_cli.errors import StorageError
from scale_cli.storage.atomic import load_tensors, read_json, save_tensors, write_json
from tests.storage.test_atomic import failing


@pytest.mark.parametrize("owner", [(os, "fsync"), (Path, "replace")])
@pytest.mark.parametrize("value", ["new", "half a surrogate pair: \ud800", float("nan"), float("inf")])
def test_a_file_that_cannot_be_written_keeps_its_old_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: tuple[Any, str], value: Any
) -> None:
    write_json(tmp_path / "file.json", "old")
    monkeypatch.setattr(*owner, failing(getattr(*owner), 1))
    with pytest.raises((StorageError, UnicodeEncodeError, ValueError)):
        write_json(tmp_path / "file.json", [value])
    assert read_json(tmp_path / "file.json") == "old"
    assert [child.name for child in tmp_path.iterdir()] == ["file.json"]


def test_tensors_read_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = {
        "f": torch.tensor([float("nan"), -0.0, 1e-45]),
        "b": torch.randn(3, 4, dtype=torch.bfloat16).t(),
        "none": torch.zeros(0, 2),
    }
    save_tensors(tmp_path / "t.safetensors", tensors)
    loaded = load_tensors(tmp_path / "t.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(loaded[name].view(torch.uint8), tensor.contiguous().view(torch.uint8))


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff", b"[" * 100_000])
def test_a_missing_or_damaged_json_file_is_a_storage_error(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    for read in (read_json, load_tensors):
        with pytest.raises(StorageError, match=f"{tmp_path / 'file'}: {'missing' if content is None else 'damaged'}"):
            read(tmp_path / "file")
