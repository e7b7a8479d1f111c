"""What an export's card says: what the folder holds, what it lost, what it promises, and of whose licence it is."""

from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from scale_cli.commands.evaluate import evaluate
from scale_cli.config.schema import ModelConfig, RunConfig
from scale_cli.evaluation.results import Report
from scale_cli.export.card import base_licence, model_card
from scale_cli.export.formats import fitting_formats
from scale_cli.export.records import Parity, ServedSize
from scale_cli.model.configuration_scale import LEAST_TRANSFORMERS
from scale_cli.storage.atomic import read_json
from tests.export.conftest import TrainedRun
from tests.small_runs import changed, export
from tests.torture.attacker import edit_json

ROUTE = {"variant": "route"}
BOUND = "no document costs more than"


def card_of(config: RunConfig, report: Report | None, export_format: str = "plain") -> str:
    config = changed(config, f"export.format={export_format}")
    return model_card(
        config,
        fitting_formats(config)[export_format],
        report=report,
        parity=Parity(0.0, 1),
        licence=base_licence(config.model),
        architecture="LlamaModel",
        size=ServedSize(264_000_000, 528_000_000, 135_000_000, 270_000_000, ratio=1 / 3),
    )


def first_line(card: str) -> str:
    """Return the line beneath the title."""
    return [line for line in card.split("\n---\n")[1].splitlines() if line][1]


@pytest.mark.parametrize("export_format", ["plain", "transformers", "adapter"])
def test_every_export_has_a_card_with_data_budget_and_parity_and_no_place_of_this_machine(
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
    assert f"format {export_format}; {summary.parity}" in card.text
    # Rows of u are stored small in a plain one.
    assert ("## Training it further" in card.text) == (export_format == "plain")
    assert ("trust_remote_code=True" in card.text) is (export_format != "adapter")
    least = ".".join(map(str, LEAST_TRANSFORMERS))
    needs = f"It needs transformers {least} or newer." in card.text
    assert needs is (export_format == "transformers")
    assert "ckpt-stories260K/hf" in card.text
    for place in (Path(config.model.base).parents[1], config.output_dir):
        assert str(place) not in card.text


def test_the_first_line_of_a_plain_card_tells_what_the_head_in_it_lost_and_what_keeps_it(
    trained_run: TrainedRun,
) -> None:
    config, preserve = trained_run(ROUTE), trained_run({"variant": "preserve"})
    assert "has not been measured" in first_line(card_of(config, None))
    report = evaluate(config)
    tiny = report.corpora[0].heads
    first = first_line(card_of(config, report))
    before, after = (tiny[head].bits_per_byte for head in ("base", "trained"))
    assert f"from {before:.3f} to {after:.3f} bits/byte" in first
    assert "`trust_remote_code=True`" in first and "`scale serve`" in first
    first = first_line(card_of(changed(config, "method.collaboration.layers=top:1"), report))
    assert "`transformers`" in first and "trust_remote_code" not in first
    assert "variant `route`" in first_line(card_of(preserve, report))
    for served in (
        card_of(config, report, "transformers"),
        card_of(trained_run({"variant": "full"}), report),
    ):
        assert "without a router" not in served


def test_a_card_of_a_model_beside_its_base_shows_both_ways_to_load_it_or_where_the_router_is(
    trained_run: TrainedRun,
) -> None:
    for variant, export_format in (("full", "plain"), ("lora", "adapter")):
        config = trained_run({"variant": variant})
        report = evaluate(config)
        card = card_of(config, report, export_format)
        assert "With its router and its base (`scale generate`, `scale serve`):" in card
        assert "Loaded plainly:" in card and BOUND in card
        assert ("trust_remote_code=True)` routes too" in card) == (variant == "lora")
        alone = card_of(changed(config, "method.router=null"), report, export_format)
        assert "With its router" not in alone and BOUND not in alone
        assert "route the two" not in alone and "routes the two" not in alone
        assert "routes too" not in alone
    merged = card_of(config, report, "plain")
    assert "the router, which keeps what the base knew, is in the format `adapter`." in merged
    assert "With its router" not in merged and BOUND not in merged


def test_a_card_promises_a_bound_where_its_router_has_one_and_says_its_size(
    trained_run: TrainedRun,
) -> None:
    config, preserve = trained_run(ROUTE), trained_run({"variant": "preserve"})
    for of_two in ("plain", "transformers"):
        card = card_of(config, None, of_two)
        assert BOUND in card and "widened by 0.333" in card and r"\`" not in card
        assert "264 M parameters, 528 MB" in card and "(the base: 135 M, 270 MB)" in card
        for unbound in (changed(config, "method.router.rule=cosine"), preserve):
            assert BOUND not in card_of(unbound, None, of_two)
    assert (
        "0.693 nats over the better" in card and "3.912 nats" in card and "reads them" not in card
    )
    uneven = changed(config, "method.router.prior=0.9", "method.router.script_prior=null")
    told = card_of(uneven, None)
    assert "0.105 nats over the base head, nor more than 2.303 over the trained head" in told
    assert "does not cover" in told and "script" not in told.split(BOUND)[1].split("## ")[0]
    grown = changed(config, "method.vocabulary={new_tokens: 64, script: hangul}")
    assert "the base head that reads them, not the base by its own tokens." in card_of(grown, None)


def test_replay_is_called_so_and_not_taught_and_what_began_a_run_is_told(
    trained_run: TrainedRun,
) -> None:
    config = trained_run(ROUTE)
    begun = {
        "content_sha256": "0123456789abcdef",
        "step": 70,
        "num_tokens": 8000,
        "moments": "kept",
    }
    edit_json(config.output_dir / "final" / "init_from.json", begun)
    news, *_ = config.corpus.sources
    sources = [
        f"{{name: {name}, path: {news.path}, language: {language}, role: {role}}}"
        for name, language, role in (("petitions", "ko", "new"), ("stories", "en", "replay"))
    ]
    card = card_of(changed(config, f"corpus.sources=[{', '.join(sources)}]"), None)
    assert "| petitions | Korean | new text |" in card and "taught Korean\n" in card
    assert "| stories | English | replay, to keep it | not known |" in card
    assert "; begun with step 70 of a run" in card


def test_the_licence_of_the_base_is_carried_over_or_said_to_be_unknown(
    tmp_path: Path, trained_run: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = trained_run(ROUTE)
    assert "Find out what it is before" in card_of(config, None)
    metadata = "license: other\nlicense_name: ours\nlicense_link: https://x.org/y\nlanguage: 7"
    (licensed := tmp_path / "licensed").mkdir()
    (licensed / "README.md").write_text(f"---\n{metadata}\n---\n# Base\n")
    for name in ("LICENSE.txt", "USE_POLICY.md"):
        (licensed / name).write_text("do as you like")
    licence = base_licence(ModelConfig(base=str(licensed)))
    assert (licence.identifier, licence.link) == ("other", "https://x.org/y")
    monkeypatch.setattr("scale_cli.commands.export.base_licence", lambda _: licence)
    folder = export(config).folder
    for name in ("LICENSE.txt", "USE_POLICY.md"):
        assert (folder / name).read_text() == "do as you like"
    card = ModelCard.load(folder / "README.md")
    assert "licence, ours, applies" in card.text and "`LICENSE.txt`, `USE_POLICY.md`." in card.text
    assert card.data.license_name == "ours"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert base_licence(ModelConfig(base="nobody/nothing")).files == ()
