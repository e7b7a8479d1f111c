from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from scale_cli.commands.evaluate import evaluate
from scale_cli.commands.export import export
from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.config.schema import ModelConfig, RunConfig
from scale_cli.evaluation.results import Report
from scale_cli.export.card import Licence, base_licence, model_card
from scale_cli.methods.widened import CollaborationConfig
from scale_cli.storage.atomic import read_json
from scale_cli.storage.records import Parity
from tests.export.conftest import configured

TrainedRun = Callable[..., RunConfig]
ROUTE = {"variant": "route"}
CARD = "---\nlicense: other\nlicense_name: ours\nlicense_link: https://example.org/licence\nlanguage: 7\n---\n# Base\n"


def card_of(config: RunConfig, report: Report | None) -> str:
    return model_card(config, report, Parity(0.0, 0.0, 0.0, 1), Licence(), "LlamaForCausalLM")


def lines_of(card: str) -> list[str]:
    """Return the lines that have something on them, after the metadata."""
    return [line for line in card.split("\n---\n")[1].splitlines() if line]


def with_export(config: RunConfig, export_format: str) -> RunConfig:
    return RunConfig.model_validate(config.model_dump() | {"export": {"format": export_format}})


def with_router(config: RunConfig, **router: Any) -> RunConfig:
    return RunConfig.model_validate(config.model_dump() | {"method": {**config.method.model_dump(), "router": router}})


@pytest.mark.parametrize("export_format", ["llama", "transformers", "adapter"])
def test_every_export_has_a_card_with_the_data_the_budget_and_the_parity(
    trained_run: TrainedRun, export_format: str
) -> None:
    config = trained_run(ROUTE, format=export_format)
    summary = export(config)
    card = ModelCard.load(summary.folder / "README.md")
    ledger = read_json(config.output_dir / "final" / "token_ledger.json")["petitions"]
    assert card.data.language == ["en", "ko"]
    assert card.data.base_model is None  # a local folder is no repository of the hub
    assert "12 steps of 4 sequences of 64 tokens" in card.text
    assert f"| {ledger['corpus']['num_tokens']:,} | {ledger['num_trained']:,} |" in card.text
    assert f"{summary.parity.max_logit_difference:.1e}" in card.text
    assert ("## Training it further" in card.text) == (export_format == "llama")  # whose rows of u are stored small
    assert "Not measured" in card.text
    assert ("trust_remote_code=True" in card.text) is (export_format != "adapter")


def test_a_card_tells_where_the_base_is_by_no_more_than_its_last_two_names(trained_run: TrainedRun) -> None:
    config = trained_run(ROUTE)
    text = (export(config).folder / "README.md").read_text(encoding="utf-8")
    assert "ckpt-stories260K/hf" in text
    assert str(Path(config.model.base).parent.parent) not in text
    assert str(config.output_dir) not in text


def test_the_first_line_of_a_plain_card_tells_what_the_head_in_it_lost_and_what_keeps_it(
    trained_run: TrainedRun,
) -> None:
    config, preserve = trained_run(ROUTE), trained_run({"variant": "preserve"})
    assert "has not been measured" in lines_of(card_of(config, None))[1]
    report = evaluate(config).report
    tiny = report.corpora[0].heads
    figures = f"from {tiny['base'].bits_per_byte:.3f} to {tiny['adapted'].bits_per_byte:.3f} bits/byte"
    first = lines_of(card_of(config, report))[1]
    assert f"English (tiny) {figures}" in first
    assert "`scale generate`" in first and "`trust_remote_code=True`" in first and "`scale serve`" in first
    collaborating = config.method.model_copy(update={"collaboration": CollaborationConfig(layers="top:1")})
    first = lines_of(card_of(config.model_copy(update={"method": collaborating}), report))[1]
    assert "`transformers`" in first and "`scale generate`" in first and "trust_remote_code" not in first
    assert "variant `route`" in lines_of(card_of(preserve, report))[1]
    for served in (with_export(config, "transformers"), trained_run({"variant": "full"})):
        assert "without a router" not in card_of(served, report)


def test_a_card_promises_a_bound_where_its_router_has_one_and_says_what_that_does_not_cover(
    trained_run: TrainedRun,
) -> None:
    config = with_export(trained_run(ROUTE), "transformers")
    assert "no document costs more than 0.693 nats over the better" in card_of(config, None)
    assert "does not cover" in card_of(config, None)
    leaning = with_router(config, prior=0.9)
    assert "0.105 nats over the base head, nor than 2.303 over the trained one" in card_of(leaning, None)
    assert "no document costs" in card_of(with_export(config, "llama"), None)
    cosine = with_router(config, rule="cosine")
    unbound = [with_router(config, switch_rate=0.1), cosine, with_export(cosine, "llama")]
    unbound.append(with_export(trained_run({"variant": "preserve"}), "transformers"))
    for served in unbound:
        assert "no document costs" not in card_of(served, None)


def test_a_card_tells_what_was_trained_before_by_another_run_and_with_which_optimiser(trained_run: TrainedRun) -> None:
    config = trained_run(ROUTE)
    begun = {"content_sha256": "0123456789abcdef", "step": 70, "num_tokens": 8000, "moments": "kept"}
    path = config.output_dir / "final" / "init_from.json"
    assert "begun with" not in card_of(config, None)
    path.write_text(json.dumps(begun), encoding="utf-8")
    tree = config.model_dump()
    tree["train"] |= {"optimiser": "muon", "average": {"kind": "tail", "steps": 3}}
    card = card_of(RunConfig.model_validate(tree), None)
    assert "; begun with step 70 of a run, 8,000 tokens, kept moments, sha256 0123456789ab" in card
    assert "; Muon on the matrices and AdamW on the rest, lr" in card
    assert "; an average of weights (tail, 3 steps)" in card


def test_replay_is_called_so_and_not_taught(trained_run: TrainedRun) -> None:
    config = trained_run(ROUTE)
    assert "| petitions | Korean | new text |" in card_of(config, None)
    tree = config.model_dump()
    stories = tree["corpus"]["sources"][0] | {"name": "stories", "language": "en", "role": "replay"}
    tree["corpus"]["sources"].append(stories)
    card = card_of(RunConfig.model_validate(tree), None)
    assert "| stories | English | replay, to keep it | not known |" in card
    assert lines_of(card)[0].endswith("taught Korean")
    tree["corpus"]["sources"][1]["role"] = "new"
    card = card_of(RunConfig.model_validate(tree), None)
    assert "replay" not in card and lines_of(card)[0].endswith("taught Korean and English")


def test_the_licence_of_the_base_is_carried_over_with_its_files(tmp_path: Path, trained_run: TrainedRun) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text(CARD, encoding="utf-8")
    (base / "LICENSE.txt").write_text("do as you like", encoding="utf-8")
    (base / "USE_POLICY.md").write_text("be kind", encoding="utf-8")
    licence = base_licence(ModelConfig(base=str(base)))
    assert (licence.identifier, licence.name, licence.link) == ("other", "ours", "https://example.org/licence")
    licence.copy_files(tmp_path)
    assert (tmp_path / "LICENSE.txt").read_text(encoding="utf-8") == "do as you like"
    assert (tmp_path / "USE_POLICY.md").is_file()
    assert "ours" in licence.sentence()
    assert "`LICENSE.txt`" in licence.sentence()


def test_a_base_without_a_licence_is_said_to_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Find it out" in base_licence(ModelConfig(base=str(tmp_path))).sentence()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "Find it out" in base_licence(ModelConfig(base="nobody/nothing")).sentence()


def test_the_card_of_a_stack_tells_what_every_stage_was_made_of(shared_data: Path, tmp_path: Path) -> None:
    below = configured(shared_data, tmp_path / "first", ROUTE)
    above = configured(shared_data, tmp_path / "second", ROUTE)
    above = above.model_copy(update={"model": ModelConfig(base=str(tmp_path / "first"))})
    for config in (below, above):
        upscale(config)
        train(config, None, print)
    card = ModelCard.load(export(above).folder / "README.md")
    first, second = (read_json(config.output_dir / "final" / "base.json") for config in (below, above))
    assert "# ckpt-stories260K/hf, taught Korean" in card.text
    assert ", upon first." in card.text
    assert f"| base, SHA-256 | `{first['content_sha256']}` |" in card.text
    assert f"| second: stands on, SHA-256 | `{second['content_sha256']}` |" in card.text
    for config in (below, above):
        name, ledger = config.output_dir.name, read_json(config.output_dir / "final" / "token_ledger.json")
        assert f"| {name}: trained | 12 steps" in card.text
        assert f"| {name} | petitions | Korean |" in card.text
        assert f"| {ledger['petitions']['num_trained']:,} |" in card.text
