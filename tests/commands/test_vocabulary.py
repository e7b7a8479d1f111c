"""A run with new tokens, from `scale upscale` to every export, with SentencePiece's kind of tokenizer."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scale_cli.commands.evaluate import evaluate
from scale_cli.commands.export import export
from scale_cli.commands.plan import growth_of, plan
from scale_cli.commands.upscale import upscale
from scale_cli.commands.verify import verify
from scale_cli.config.schema import RunConfig
from scale_cli.errors import ConfigError, PreservationError
from scale_cli.export.plain_folder import routed_class
from scale_cli.planning import device as speed
from scale_cli.planning.sizes import BaseSizes
from scale_cli.runs.opened import Run
from scale_cli.storage.atomic import read_json
from scale_cli.vocabulary.added_tokens import Spelling
from tests.command_line import ModelLoads, model_loads
from tests.small_runs import changed, train_run
from tests.vocabulary.grown_run import config_of
from tests.vocabulary.tokenizers_at_hand import KOREAN

SHARES = (("ko", 1.0), ("en", 0.6))


@pytest.fixture(scope="module")
def grown(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A widened run with new tokens, trained; no test changes it but by an evaluation and an export."""
    return train_run(config_of(shared_data, tmp_path_factory.mktemp("grown")))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["route", "full"])
def test_every_verb_of_a_run_has_its_tokens(
    shared_data: Path, tmp_path: Path, grown: RunConfig, kind: str
) -> None:
    config = grown
    with torch.enable_grad():
        if kind == "full":
            config = train_run(config_of(shared_data, tmp_path, kind))
    evaluate(config)
    session, folder = Run(config).open_final(), export(config).folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocabulary = Run(grown).open_final().tokenizer.get_vocab()
    assert (
        tokenizer.get_vocab() == session.tokenizer.get_vocab() == vocabulary
        and len(tokenizer) == 576
    )
    ids = tokenizer(KOREAN, add_special_tokens=False, return_tensors="pt").input_ids[:, :40]
    assert ids.max() >= 512
    served = (routed_class(folder) or AutoModelForCausalLM).from_pretrained(folder)
    wanted, said = (
        model(input_ids=ids).logits.log_softmax(-1) for model in (session.load(), served)
    )
    assert torch.allclose(said, wanted, atol=1e-3)
    verify(config.output_dir)
    told = read_json(folder / "tokenizer_config.json")
    assert (
        told["tokenizer_class"] == "PreTrainedTokenizerFast"
    )  # TokenizersBackend is unknown to transformers 4
    assert not told.keys() & {"backend", "is_local", "local_files_only"}


@pytest.mark.parametrize("kind", ["route", "full"])
def test_a_reports_base_is_the_base_by_its_own_tokens(
    shared_data: Path, tmp_path: Path, grown: RunConfig, kind: str
) -> None:
    """Bits/byte of the base do not depend on the tokens that a run adds."""
    config = grown if kind == "route" else train_run(config_of(shared_data, tmp_path, kind))
    report = evaluate(config)
    plain = changed(config, "method.vocabulary=null", f"output_dir={tmp_path / 'plain'}")
    expected = evaluate(train_run(plain))
    for found, alone in zip(report.corpora, expected.corpora, strict=True):
        bits = alone.heads["base"].bits_per_byte
        assert found.heads["base"].bits_per_byte == pytest.approx(bits, rel=1e-6)
        assert found.num_base_tokens == alone.num_tokens
        assert found.base_of_new_tokens is not None
    korean = report.corpora[1]
    assert korean.num_base_tokens > 1.5 * korean.num_tokens
    mixed = korean.base_of_new_tokens
    assert mixed is not None
    assert mixed.bits_per_byte != pytest.approx(korean.heads["base"].bits_per_byte, rel=0.05)


def test_what_new_tokens_cannot_do_is_refused_in_one_line(
    shared_data: Path, tmp_path: Path, grown: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="lora takes no new tokens"):
        config_of(shared_data, tmp_path, "lora")

    def moved(*_: object) -> int:
        raise PreservationError("method.vocabulary: the tokens of 'x' have changed")

    monkeypatch.setattr("scale_cli.runs.new_tokens.check_added_tokens", moved)
    with pytest.raises(PreservationError):
        upscale(changed(grown, f"output_dir={tmp_path / 'again'}"))
    assert not (tmp_path / "again/upscaled").exists()


def test_a_plan_refuses_more_tokens_than_the_text_gives_and_what_it_says_instead_can_be_had(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scale_cli.commands.upscale.load_hashed_base", model_loads)
    config = config_of(shared_data, tmp_path, vocabulary={"new_tokens": 20_000, "min_count": 2})
    with pytest.raises(
        ConfigError, match=r"method\.vocabulary\.new_tokens: 20,000, but the text gives"
    ) as refused:
        plan(config, 1e12, 1)
    with pytest.raises(ConfigError) as refused_too:
        upscale(config)
    assert str(refused_too.value) == str(refused.value)
    assert not config.output_dir.exists()
    (instead,) = re.findall(r"set it to (\d+),", str(refused.value))
    fitting = config_of(
        shared_data, tmp_path, vocabulary={"new_tokens": int(instead), "min_count": 2}
    )
    assert plan(fitting, 1e12, 1).new_tokens is not None
    with pytest.raises(ModelLoads):
        upscale(fitting)


def test_a_plan_counts_each_sources_tokens_and_what_the_same_text_would_cost_without(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(shared_data, tmp_path, vocabulary={"new_tokens": 60, "min_count": 2})
    sketched = plan(config, 1e12, 1, compared=True)
    assert sketched.new_tokens is not None and not sketched.new_tokens.is_learned
    upscale(config)
    made = plan(config, 1e12, 1, compared=True)
    assert made.new_tokens is not None and made.new_tokens.is_learned
    for planned in (sketched, made):
        assert planned.new_tokens is not None
        (told,) = planned.new_tokens.sources
        assert planned.new_tokens.num_new == 64
        assert told["num_tokens_before"] > 1.5 * told["num_tokens_after"]
    old, new = Run(config).base_tokenizer, Run(config).tokenizer
    texts = (tmp_path / "ko.txt").read_text().split("\n\n")
    counts = [
        sum(len(of(text, add_special_tokens=False).input_ids) for text in texts)
        for of in (old, new)
    ]
    (told,) = made.new_tokens.sources
    assert [told["num_tokens_before"], told["num_tokens_after"]] == counts

    methods = {method.variant: method for method in made.methods}
    trained = Run(config).open_start().load()
    numbers = [
        sum(p.numel() for p in trained.parameters() if p.requires_grad is trains)
        for trains in (False, True)
    ]
    assert [
        methods["route"].num_frozen,
        methods["route"].num_trainable,
    ] == numbers
    num_without = round(2 * 2 * 32 * counts[0] / counts[1])
    assert methods["no new tokens"].num_tokens == methods["lora"].num_tokens == num_without
    alone = {
        method.variant: method
        for method in plan(
            changed(config, "method.vocabulary=null"), 1e12, 1, compared=True
        ).methods
    }
    assert methods["no new tokens"].memory == alone["route"].memory
    assert methods["lora"].memory == alone["lora"].memory
    monkeypatch.setattr(speed, "peak_flops_per_s", lambda *_: 1e9)
    sizes = BaseSizes.of(Run(config).base_config.to_dict(), "base")
    assert speed.peak_tokens_per_s(config, sizes, "a GPU", 1, 64) == pytest.approx(
        1e9 / methods["route"].flops_per_token
    )
    assert methods["no new tokens"].flops_per_token == alone["route"].flops_per_token

    sources = (
        f"{{name: {of}, path: {tmp_path}/{of}.txt, language: {of}, weight: {weight}}}"
        for of, weight in SHARES
    )
    mixed = growth_of(changed(config, f"corpus.sources=[{', '.join(sources)}]"))
    assert mixed.tokens_without == pytest.approx(0.625 * counts[0] / counts[1] + 0.375), "1 to 0.6"


def test_the_plan_names_the_bytes_that_the_bases_tokenizer_lacks(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = Spelling.of
    monkeypatch.setattr(
        Spelling, "of", lambda *told: replace(of(*told), missing=frozenset({0xC0, 0xC1}))
    )
    lines = plan(config_of(shared_data, tmp_path), 1e12, 1).lines()
    (note,) = (line for line in lines if line.startswith("note "))
    assert "has no token for the bytes C0-C1" in note
