"""Layers, tokens and codes that `scale upscale` found stay what they are; that their text is another now is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.config.schema import RunConfig
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.records import CORPORA
from scale_cli.upscale.run import Run
from scale_cli.vocabulary import proofs
from tests.vocabulary.grown_run import config_of

TOKENS = {"variant": "full", "vocabulary": {"new_tokens": 64, "min_count": 2}}
ADEPT = {"variant": "adept", "adept": {"num_blocks": 1, "probe_windows": 2, "every_steps": 2}}
CODES = {"variant": "route", "expansion": {"codes": "cooccurrence"}}


@pytest.fixture(autouse=True)
def few_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "_CODE_POINTS", [*range(0x500), *range(0xA900, 0xD900)])
    monkeypatch.setattr(proofs, "_NUM_RANDOM", 500)


def config_with(method: dict[str, Any], shared_data: Path, folder: Path) -> RunConfig:
    tree = config_of(shared_data, folder).model_dump(mode="json")
    tree["method"] = method
    tree["corpus"]["sources"].append(
        {"name": "en", "path": str(folder / "en.txt"), "language": "en", "role": "replay", "weight": 0.5}
    )
    return RunConfig.model_validate(tree)


@pytest.mark.parametrize(
    ("method", "of_source", "other"),
    [(TOKENS, "ko", "en"), (ADEPT, "en", "ko"), (CODES, "ko", "en")],
    ids=["tokens", "layers", "codes"],
)
def test_a_run_on_other_text_than_its_start_was_found_in_says_so(
    shared_data: Path, tmp_path: Path, method: dict[str, Any], of_source: str, other: str
) -> None:
    config = config_with(method, shared_data, tmp_path)
    upscale(config)
    text = tmp_path / f"{other}.txt"
    text.write_text(text.read_text(encoding="utf-8") + "\n\nNothing was looked for in this text.", encoding="utf-8")
    assert Run(config).other_text_warnings() == []
    text = tmp_path / f"{of_source}.txt"
    text.write_text(text.read_text(encoding="utf-8") + "\n\nThis text is another one now.", encoding="utf-8")
    said: list[str] = []
    train(config, None, said.append)
    (told,) = [line for line in said if "found in other text" in line]
    assert told.startswith("warning: ") and told.count(f" {of_source}-") == 2 and f" {other}-" not in told


def test_a_start_for_which_no_text_is_read_has_no_record_of_any(shared_data: Path, tmp_path: Path) -> None:
    config = config_with({"variant": "adept", "adept": {"layers": [1]}}, shared_data, tmp_path)
    upscale(config)
    assert not (RunFolder(config.output_dir).upscaled / CORPORA).exists()
    (tmp_path / "en.txt").write_text("Another text altogether, of some length.", encoding="utf-8")
    assert Run(config).other_text_warnings() == []
