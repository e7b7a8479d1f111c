"""`scale join` of runs with tokens of their own: which go together, and what is written of them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from scale_cli.commands.evaluate import evaluate
from scale_cli.commands.join import join
from scale_cli.commands.verify import verify
from scale_cli.config.schema import RunConfig
from scale_cli.errors import ExportParityError, PreservationError, RunFolderError
from scale_cli.generation.generator import Generator, Sampling
from scale_cli.joining.members import join_runs
from scale_cli.joining.report import score_corpora
from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.runs.opened import Run
from scale_cli.upscale.base import load_written
from scale_cli.vocabulary.added_tokens import new_tokens
from tests.command_line import refused
from tests.small_runs import at_its_start, changed, train_run
from tests.vocabulary.grown_run import config_of
from tests.vocabulary.tokenizers_at_hand import ENGLISH, KOREAN, RUSSIAN

OLD, NEW = 512, 64
VOCABULARIES = {
    "korean": {"new_tokens": NEW, "min_count": 2},
    "russian": {"new_tokens": NEW, "min_count": 2, "script": "cyrillic"},
    "other-korean": {"new_tokens": NEW, "min_count": 3},
    "plain": None,
}


@pytest.fixture(scope="module")
def runs(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    """Runs of two scripts, one with other tokens of the first, one without any, one with the first's."""
    folder, made = tmp_path_factory.mktemp("runs"), {}
    for name, vocabulary in VOCABULARIES.items():
        make = at_its_start if name == "other-korean" else train_run
        made[name] = make(_configured(shared_data, folder / name, vocabulary))
    given = {"new_tokens": NEW, "folder": str(made["korean"].output_dir / "final")}
    again = _configured(shared_data, folder / "again", given)
    return {**made, "again": at_its_start(changed(again, "seed=1"))}


def _configured(shared_data: Path, folder: Path, vocabulary: object) -> RunConfig:
    folder.mkdir()
    text = {"russian": RUSSIAN, "other-korean": KOREAN[::-1]}.get(folder.name, KOREAN)
    config = config_of(shared_data, folder, new_text=text, vocabulary=vocabulary)
    return config.model_copy(update={"output_dir": folder / folder.name})


def folders(runs: dict[str, RunConfig], *names: str) -> list[Path]:
    return [runs[name].output_dir for name in names]


@torch.no_grad()
def test_two_scripts_and_a_run_without_new_tokens_are_one_model(
    runs: dict[str, RunConfig], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    report = join(folders(runs, "korean", "plain", "russian"), output, None)
    assert "it differs from the head alone" in (output / "README.md").read_text()
    assert report.max_cost_nats == pytest.approx(math.log(4))
    worst = [corpus.worst_document_nats for corpus in report.corpora]
    assert all(nats is not None and nats <= math.log(4) + 1e-3 for nats in worst)
    verify(output)

    model = JoinedForCausalLM.from_pretrained(output).eval()
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert len(tokenizer) == model.config.vocab_size == OLD + 2 * NEW
    for name, text, head, before in (
        ("korean", KOREAN, 1, 0),
        ("russian", RUSSIAN, 3, NEW),
        ("plain", ENGLISH, 2, 0),
    ):
        session = Run(runs[name]).open_final()
        alone, ids = (
            of(text, add_special_tokens=False, return_tensors="pt").input_ids[:, :60]
            for of in (session.tokenizer, tokenizer)
        )
        assert torch.equal(torch.where(alone >= OLD, alone + before, alone), ids)
        assert (ids >= OLD).any() == (name != "plain")
        assert tokenizer.decode(ids[0]) == session.tokenizer.decode(alone[0])
        run = session.load()
        assert isinstance(run, ScaleForCausalLM)
        own = run.trained_logits(run.final_states(alone, preserved=False)).log_softmax(-1)
        said = model.routed_logits(model.final_states(ids, preserved=True))[head].log_softmax(-1)
        own, said = (
            logits[:, :-1].gather(-1, came[:, 1:, None])
            for logits, came in ((own, alone), (said, ids))
        )
        assert torch.allclose(said, own, atol=1e-4)
    (continued,) = Generator(output).continue_all(["국민 люди"], Sampling(max_new_tokens=4))
    assert all(token.shares is not None and len(token.shares) == 4 for token in continued.tokens)


def test_a_joins_base_is_the_base_by_its_own_tokens_as_in_the_runs_report(
    runs: dict[str, RunConfig],
) -> None:
    """The bound is held against the base's head in the router, which has a row of its own."""
    report = evaluate(runs["korean"])
    joined = join_runs(folders(runs, "korean"), None)
    scored = score_corpora(joined, [joined.members[0].run])
    for told, found in zip(report.corpora, scored, strict=True):
        mixed, expected = found.base_of_new_tokens, told.base_of_new_tokens
        assert mixed is not None and expected is not None
        for of_join, of_run in ((found.heads["base"], told.heads["base"]), (mixed, expected)):
            assert of_join.bits_per_byte == pytest.approx(of_run.bits_per_byte)
            assert of_join.nats_per_token == pytest.approx(of_run.nats_per_token)
        assert found.heads["base"].share is None
        assert mixed.share == pytest.approx(told.heads["posterior"].base_share)
    korean = scored[1]
    assert korean.base_of_new_tokens is not None
    of_router = korean.base_of_new_tokens.bits_per_byte
    assert of_router != pytest.approx(korean.heads["base"].bits_per_byte, rel=0.05)


def test_other_tokens_of_one_script_are_refused_in_one_line(runs: dict[str, RunConfig]) -> None:
    with refused(
        RunFolderError, r"other-korean and .*korean add different tokens for the same script"
    ):
        join_runs(folders(runs, "korean", "other-korean"), None)


def test_a_text_that_is_cut_otherwise_than_by_its_run_leaves_nothing_behind(
    runs: dict[str, RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scale_cli.joining.tokenizer.new_tokens", lambda *of: new_tokens(*of)[:-1])
    with pytest.raises(PreservationError, match="have changed"):
        join(folders(runs, "korean", "russian"), tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_a_wrong_row_of_a_token_that_no_sample_text_has_is_found(
    runs: dict[str, RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_wrong_row(*of: Any) -> JoinedForCausalLM:
        model = load_written(*of)
        model.members[-1].lm_head.weight.data[-1] += 1.0
        return model

    monkeypatch.setattr("scale_cli.joining.checks.load_written", one_wrong_row)
    with pytest.raises(ExportParityError):
        join(folders(runs, "korean", "russian"), tmp_path / "out", None)
    assert not (tmp_path / "out").exists()
