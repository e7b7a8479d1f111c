"""A run with new tokens, from `scale upscale` to every export, with SentencePiece's kind of tokenizer."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scale_cli.commands.evaluate import evaluate
from scale_cli.commands.plan import growth_of, plan
from scale_cli.commands.upscale import upscale
from scale_cli.commands.verify import verify
from scale_cli.config.schema import RunConfig
from scale_cli.errors import ConfigError, PreservationError
from scale_cli.export.plain_folder import routed_class
from scale_cli.runs.opened import Run
from scale_cli.storage.atomic import read_json
from scale_cli.vocabulary.growing import Spelling
from tests.command_line import ModelLoads, model_loads
from tests.small_runs import changed, export, train_run
from tests.vocabulary.grown_run import config_of
from tests.vocabulary.tokenizers_at_hand import KOREAN


@pytest.fixture(scope="module", params=["route", "full"])
def grown(
    request: pytest.FixtureRequest, shared_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunConfig:
    """A run with new tokens, trained; no test changes it but by an evaluation and an export."""
    return train_run(config_of(shared_data, tmp_path_factory.mktemp("grown"), request.param))


@torch.no_grad()
def test_every_verb_of_a_run_has_its_tokens(grown: RunConfig) -> None:
    evaluate(grown)
    run, folder = Run(grown).open_final(), export(grown).folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab() == run.tokenizer.get_vocab() and len(tokenizer) == 576
    ids = tokenizer(KOREAN, add_special_tokens=False, return_tensors="pt").input_ids[:, :40]
    assert ids.max() >= 512
    served = (routed_class(folder) or AutoModelForCausalLM).from_pretrained(folder)
    wanted, said = (model(input_ids=ids).logits.log_softmax(-1) for model in (run.load(), served))
    assert torch.allclose(said, wanted, atol=1e-3)
    verify(grown.output_dir)
    told = read_json(folder / "tokenizer_config.json")
    # TokenizersBackend is unknown to transformers 4.
    assert told["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not told.keys() & {"backend", "is_local", "local_files_only"}


def test_a_reports_base_is_the_base_by_its_own_tokens(tmp_path: Path, grown: RunConfig) -> None:
    """Bits/byte of the base do not depend on the tokens that a run adds."""
    report = evaluate(grown)
    plain = changed(grown, "method.vocabulary=null", f"output_dir={tmp_path / 'plain'}")
    expected = evaluate(train_run(plain))
    for found, alone in zip(report.corpora, expected.corpora, strict=True):
        bits = alone.heads["base"].bits_per_byte
        assert found.heads["base"].bits_per_byte == pytest.approx(bits, rel=1e-6)
        assert found.num_base_tokens == alone.num_tokens
    korean = report.corpora[1]
    assert korean.num_base_tokens > 1.5 * korean.num_tokens
    mixed = korean.base_of_new_tokens
    assert mixed is not None
    assert mixed.bits_per_byte != pytest.approx(korean.heads["base"].bits_per_byte, rel=0.05)


def test_what_new_tokens_cannot_do_is_refused_in_one_line(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="lora takes no new tokens"):
        config_of(shared_data, tmp_path, "lora")

    def moved(*_: object) -> int:
        raise PreservationError("method.vocabulary: the tokens of 'x' have changed")

    monkeypatch.setattr("scale_cli.runs.new_tokens.check_grown_tokenizer", moved)
    with pytest.raises(PreservationError):
        upscale(config_of(shared_data, tmp_path))
    assert not (tmp_path / "run/upscaled").exists()


def test_more_tokens_than_the_text_gives_are_refused_and_what_is_said_instead_can_be_had(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scale_cli.commands.upscale.load_hashed_base", model_loads)
    config = config_of(shared_data, tmp_path, vocabulary={"new_tokens": 20_000, "min_count": 2})
    with pytest.raises(ConfigError, match=r"^method\.vocabulary\.new_tokens: ") as refused:
        upscale(config)
    assert not config.output_dir.exists()
    (instead,) = re.findall(r"set it to (\d+),", str(refused.value))
    fitting = changed(config, f"method.vocabulary.new_tokens={instead}")
    with pytest.raises(ModelLoads):
        upscale(fitting)


def test_a_plan_counts_learned_tokens_and_what_the_same_text_would_cost_without(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(shared_data, tmp_path)

    def planned(*overrides: str) -> tuple[Any, dict[str, Any]]:
        made = plan(changed(config, *overrides), 1e12, 1, compared=True)
        return made.new_tokens, {method.variant: method for method in made.methods}

    unlearned, _ = planned()
    assert (unlearned.num_new, unlearned.sources, unlearned.tokens_without) == (64, [], 1.0)
    upscale(config)
    made, methods = planned()
    (told,) = made.sources
    assert made.num_new == 64
    assert told["num_tokens_before"] > 1.5 * told["num_tokens_after"]
    run, texts = Run(config), (tmp_path / "ko.txt").read_text().split("\n\n")
    before, after = (
        sum(len(of(text, add_special_tokens=False).input_ids) for text in texts)
        for of in (run.base_tokenizer, run.tokenizer)
    )
    assert (told["num_tokens_before"], told["num_tokens_after"]) == (before, after)

    num_by_trains = Counter[bool]()
    for parameter in run.open_start().load().parameters():
        num_by_trains[parameter.requires_grad] += parameter.numel()
    counted = {False: methods["route"].num_frozen, True: methods["route"].num_trainable}
    assert counted == num_by_trains

    num_without = round(2 * 2 * 32 * before / after)
    assert methods["no new tokens"].num_tokens == methods["lora"].num_tokens == num_without
    _, alone = planned("method.vocabulary=null")
    for variant, same in (("no new tokens", "route"), ("lora", "lora")):
        assert methods[variant].memory == alone[same].memory
        assert methods[variant].flops_per_token == alone[same].flops_per_token

    two = "{{name: {0}, path: {1}/{0}.txt, language: {0}, weight: {2}}}".format
    sources = f"[{two('ko', tmp_path, 1.0)}, {two('en', tmp_path, 0.6)}]"
    mixed, _ = growth_of(changed(config, f"corpus.sources={sources}"))
    assert mixed.tokens_without == pytest.approx(0.625 * before / after + 0.375), "1 to 0.6"


def test_the_plan_names_the_bytes_that_the_bases_tokenizer_lacks(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, missing = Spelling.of, frozenset({0xC0, 0xC1})
    monkeypatch.setattr(Spelling, "of", lambda *told: replace(of(*told), missing=missing))
    lines = plan(config_of(shared_data, tmp_path), 1e12, 1).lines()
    (note,) = (line for line in lines if line.startswith("note "))
    assert "has no token for the bytes c0 c1" in note
