"""Windows' scores are the base's losses on them; they are made once and decide what is trained on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.commands.verify import verify
from scale_cli.data.batches import PackedWindows
from scale_cli.errors import RunFolderError
from scale_cli.storage.atomic import read_json
from scale_cli.storage.layout import RunFolder
from scale_cli.upscale.base import load_base
from scale_cli.upscale.objective import base_losses
from tests.training.conftest import MakeConfig

CHOSEN = (
    "corpus.sources.0.select={by: ngram, keep: 0.25, side: middle}",
    "train.max_steps=3",
    "corpus.cache_dir=null",
)


def test_a_windows_score_is_the_bases_loss_on_it(make_config: MakeConfig) -> None:
    config = make_config("run")
    ids = np.random.default_rng(0).integers(3, 500, 5 * 32 + 7).astype(np.uint16)
    windows, base = PackedWindows(ids, 32), load_base(config.model)
    expected = []
    for index in range(len(windows)):
        inputs, targets = (torch.from_numpy(row)[None] for row in windows.window(index))
        with torch.no_grad():
            expected.append(float(base(inputs, labels=targets, shift_labels=targets).loss))
    assert list(base_losses(windows, config.model, at_once=4)) == pytest.approx(expected, rel=1e-5)


def test_a_run_trains_on_what_was_chosen_says_what_it_left_out_and_is_held_to_it(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, said = make_config("run", *CHOSEN), list[str]()
    upscale(config)
    train(config, None, said.append)
    run = RunFolder(config.output_dir)
    assert any(line.startswith("chosen         petitions: ") for line in said)
    ledger = read_json(run.final / "token_ledger.json")
    chosen, whole = ledger["petitions"], ledger["tiny"]
    assert chosen["num_left_out"] > 0.7 * chosen["corpus"]["num_tokens"] and whole["num_left_out"] == 0
    verify(run.final).require()
    run.final.rename(run.root / "put-aside")
    monkeypatch.setattr("scale_cli.upscale.objective.ngram_scores", lambda *_: pytest.fail("judged twice"))
    monkeypatch.setattr("scale_cli.upscale.objective.base_losses", lambda *_: pytest.fail("judged twice"))
    train(config, "auto", lambda _: None)
    assert read_json(run.final / "token_ledger.json") == ledger
    run.final.rename(run.root / "put-aside-too")
    for folder in run.tokens.glob("*.ngram-*"):
        folder.rename(folder.with_name("elsewhere"))
    monkeypatch.setattr(
        "scale_cli.upscale.objective.ngram_scores", lambda windows, _: np.arange(len(windows), dtype=np.float64)
    )
    with pytest.raises(RunFolderError, match="other windows of petitions were chosen"):
        train(config, "auto", lambda _: None)
