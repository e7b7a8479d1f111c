"""A run with new tokens, from `scale upscale` to every export, with SentencePiece's kind of tokenizer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scale_cli import planning as speed
from scale_cli.commands import plan as plan_module
from scale_cli.commands.evaluate import evaluate
from scale_cli.commands.export import export
from scale_cli.commands.plan import plan
from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.commands.verify import verify
from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.errors import BaseModelError, ConfigError, PreservationError
from scale_cli.export.plain_folder import routed_class
from scale_cli.upscale.run import Run
from tests.command_line import ModelLoads, model_loads
from tests.vocabulary.grown_run import config_of
from tests.vocabulary.tokenizers_at_hand import KOREAN

pytestmark = pytest.mark.usefixtures("few_characters")


def trained(config: RunConfig) -> RunConfig:
    upscale(config)
    train(config, None, lambda _: None)
    return config


@torch.no_grad()
def check_export(config: RunConfig) -> Path:
    """Hold an export to what was trained: its tokens, and what it serves of text that has new ones."""
    session, folder = Run(config).open_final(), export(config).folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab() == session.tokenizer.get_vocab() and len(tokenizer) == 576
    ids = tokenizer(KOREAN, add_special_tokens=False, return_tensors="pt").input_ids[:, :40]
    assert ids.max() >= 512
    served = (routed_class(folder) or AutoModelForCausalLM).from_pretrained(folder)
    wanted, said = (model(input_ids=ids).logits.log_softmax(-1) for model in (session.load(), served))
    assert torch.allclose(said, wanted, atol=1e-3)
    verify(config.output_dir).require()
    return folder


@pytest.mark.parametrize("variant", ["route", "full"])
def test_every_verb_of_a_run_has_its_tokens(shared_data: Path, tmp_path: Path, variant: str) -> None:
    config = config_of(shared_data, tmp_path, variant)
    assert any("new tokens     64;" in line for line in upscale(config).lines())
    train(config, None, lambda _: None)
    evaluate(config)
    told = json.loads((check_export(config) / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert told["tokenizer_class"] == "PreTrainedTokenizerFast"  # TokenizersBackend is unknown to transformers 4
    assert not told.keys() & {"backend", "is_local", "local_files_only"}


def upon(config: RunConfig, method: MethodConfig) -> RunConfig:
    """A run upon another run."""
    base = config.model.model_copy(update={"base": str(config.output_dir)})
    return config.model_copy(
        update={"output_dir": config.output_dir.with_name("upon"), "model": base, "method": method}
    )


def test_a_run_upon_one_with_new_tokens_has_them_in_every_verb_and_export(shared_data: Path, tmp_path: Path) -> None:
    below = trained(config_of(shared_data, tmp_path))
    config = trained(upon(below, below.method.model_copy(update={"vocabulary": None})))
    evaluate(config)
    check_export(config)
    assert Run(config).open_final().tokenizer.get_vocab() == Run(below).open_final().tokenizer.get_vocab()


def test_what_new_tokens_cannot_do_is_refused_in_one_line(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="lora takes no new tokens"):
        config_of(shared_data, tmp_path, "lora")
    config = trained(config_of(shared_data, tmp_path))
    with pytest.raises(BaseModelError, match=r"method\.vocabulary: .* is widened; only a plain base takes new tokens"):
        upscale(upon(config, config.method))

    def moved(*_: object) -> int:
        raise PreservationError("method.vocabulary: the tokens of 'x' are not what they were")

    monkeypatch.setattr("scale_cli.upscale.run.check_extension", moved)
    again = config.model_copy(update={"output_dir": tmp_path / "again"})
    with pytest.raises(PreservationError):
        upscale(again)
    assert not (tmp_path / "again/upscaled").exists()
    assert PreservationError.exit_code == 3


def test_more_tokens_than_the_text_gives_are_refused_and_what_is_said_instead_can_be_had(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scale_cli.commands.upscale.load_any_base", model_loads)
    config = config_of(shared_data, tmp_path, vocabulary={"new_tokens": 20_000, "min_count": 2})
    with pytest.raises(ConfigError, match=r"method\.vocabulary\.new_tokens: 20,000, but the text gives") as refused:
        upscale(config)
    assert not config.output_dir.exists()
    (instead,) = re.findall(r"put (\d+) there", str(refused.value))
    with pytest.raises(ModelLoads):
        upscale(config_of(shared_data, tmp_path, vocabulary={"new_tokens": int(instead), "min_count": 2}))


def test_a_plan_has_the_new_tokens_before_and_after_they_are_learned(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "methods_beside", lambda _: [])
    config = config_of(shared_data, tmp_path, vocabulary={"new_tokens": 60, "min_count": 2})
    asked = plan(config, 1e12, 1)
    upscale(config)
    assert plan(config, 1e12, 1).methods == asked.methods
    assert asked.num_new_tokens == 64 and any("64, 576 in all" in line for line in asked.lines())
    trained, planned = Run(config).open_start().load(), asked.methods[0]
    numbers = [sum(p.numel() for p in trained.parameters() if p.requires_grad is trains) for trains in (False, True)]
    assert [planned.parameters.num_frozen, planned.parameters.num_trainable] == numbers
    monkeypatch.setattr(speed, "peak_flops_per_s", lambda *_: 1e9)
    assert speed.peak_tokens_per_s(config, "a GPU", 1) == pytest.approx(1e9 / planned.flops_per_token)
