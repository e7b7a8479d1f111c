"""Windows' scores are made once and decide what is trained on; ADEPT copies the layers that its own code does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.commands.verify import verify
from scale_cli.config.schema import MethodConfig
from scale_cli.data.batches import MicroBatch, PackedWindows
from scale_cli.errors import ConfigError, RunFolderError
from scale_cli.storage.atomic import read_json
from scale_cli.storage.layout import RunFolder
from scale_cli.upscale.base import load_base
from scale_cli.upscale.base_losses import base_losses, bypass_losses, with_found_layers
from tests.training.conftest import MakeConfig
from tests.widening import TINY, tiny_llama

CHOSEN = (
    "corpus.sources.0.select={by: ngram, keep: 0.25, side: middle}",
    "corpus.sources.1.order=easy_first",
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
    assert any(line.startswith("chosen         tiny: ") and "the lowest score first" in line for line in said)
    ledger = read_json(run.final / "token_ledger.json")
    chosen, ordered = ledger["petitions"], ledger["tiny"]
    assert chosen["num_left_out"] > 0.7 * chosen["corpus"]["num_tokens"] and ordered["num_left_out"] == 0
    verify(run.final).require()
    run.final.rename(run.root / "put-aside")
    monkeypatch.setattr("scale_cli.upscale.base_losses.ngram_scores", lambda *_: pytest.fail("judged twice"))
    monkeypatch.setattr("scale_cli.upscale.base_losses.base_losses", lambda *_: pytest.fail("judged twice"))
    train(config, "auto", lambda _: None)
    assert read_json(run.final / "token_ledger.json") == ledger
    run.final.rename(run.root / "put-aside-too")
    for folder in run.tokens.glob("*.ngram-*"):
        folder.rename(folder.with_name("elsewhere"))
    monkeypatch.setattr(
        "scale_cli.upscale.base_losses.ngram_scores", lambda windows, _: np.arange(len(windows), dtype=np.float64)
    )
    with pytest.raises(RunFolderError, match="other windows of petitions were chosen"):
        train(config, "auto", lambda _: None)


@pytest.mark.parametrize("key", ["corpus.sources.0.order=easy_first", "corpus.sources.0.select={by: base_loss}"])
def test_the_base_does_not_judge_tokens_that_it_does_not_have(make_config: MakeConfig, key: str) -> None:
    with pytest.raises(ConfigError, match="judged by the base, which has none of the new tokens"):
        make_config("run", key, "method.vocabulary={new_tokens: 8}")


def windows(number: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, TINY["vocab_size"], (number, 12), generator=generator)
    return [MicroBatch(row[None, :-1], row[None, 1:], torch.tensor([0])) for row in ids]


def qwen3() -> PreTrainedModel:
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    sizes: dict[str, Any] = {**TINY, "head_dim": 8, "use_sliding_window": True, "sliding_window": 4}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, layer_types=kinds)).eval()


@pytest.mark.parametrize("base", [tiny_llama, qwen3])
@torch.no_grad()
def test_a_layers_score_is_the_loss_where_all_its_weights_are_zero(base: Any) -> None:
    model, probe = base(), windows(3)
    found = bypass_losses(model, probe)
    for index, layer in enumerate(model.model.layers):
        kept = [(parameter, parameter.clone()) for parameter in layer.parameters()]
        for parameter, _ in kept:
            parameter.zero_()
        losses = [model(w.input_ids, labels=w.targets, shift_labels=w.targets).loss for w in probe]
        assert found[index] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)
        for parameter, before in kept:
            parameter.copy_(before)
    assert len(set(found)) == len(model.model.layers)


def test_copied_are_those_that_hurt_least_in_order_and_as_many_as_asked_for() -> None:
    model, probe = tiny_llama(), windows(2)
    losses = bypass_losses(model, probe)
    for number in (1, 2, 3):
        method = MethodConfig.model_validate({"variant": "adept", "adept": {"num_blocks": number}})
        layers = with_found_layers(method, model, probe).adept.layers
        assert layers == sorted(sorted(range(3), key=losses.__getitem__)[:number])
