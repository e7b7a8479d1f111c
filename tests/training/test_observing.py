"""What is measured as a model trains, and which weights are kept for it."""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from scale_cli import terminal
from scale_cli.commands.evaluate import evaluate
from scale_cli.commands.train import train
from scale_cli.commands.verify import verify
from scale_cli.config.schema import RunConfig
from scale_cli.data.corpora import open_sources
from scale_cli.data.encoding import DocumentMarkers
from scale_cli.errors import Interrupted
from scale_cli.evaluation.scoring import DocumentLosses, score_beginnings
from scale_cli.model.two_streams import TwoStreams
from scale_cli.runs.folder import TRAINED, RunFolder, step_of
from scale_cli.runs.opened import Run
from scale_cli.storage.atomic import file_sha256, remove_folder
from scale_cli.training import observing, training_run
from scale_cli.training.metrics_log import (
    BITS,
    EVALUATION,
    SAMPLES,
    SHARES,
    Losses,
    MetricsLog,
    MetricsRecord,
    read_records,
)
from scale_cli.training.observing import Observer, better_of
from scale_cli.training.records import Score, TrainState
from scale_cli.training.step import TakenStep
from scale_cli.training.training_run import write_checkpoint
from scale_cli.upscale.base_tokenizer import load_tokenizer
from tests.small_runs import (
    SMALLEST,
    changed,
    held_out,
    load_text,
    petitions_run,
    train_run,
)
from tests.training.conftest import (
    MakeConfig,
    around_steps,
    configs_in,
    finished,
    go_on,
    upscaled,
)
from tests.vocabulary.grown_run import config_of

OF_BITS = st.floats(-2.0, 9.0).map(lambda bits: round(bits, 1))
SCORES = st.lists(st.tuples(OF_BITS, OF_BITS), max_size=12).map(
    lambda pairs: [Score(step, *pair, []) for step, pair in enumerate(pairs, start=1)]
)


@given(SCORES, st.floats(0.0, 3.0))
def test_the_best_has_learned_most_within_the_bound_and_where_none_keeps_within_it_has_lost_least(
    scores: list[Score], bound: float
) -> None:
    best = reduce(lambda before, new: better_of(before, new, bound), scores, None)
    within = [score for score in scores if score.forgetting <= bound]
    if within:
        least = min(score.acquisition for score in within)
        assert best == next(score for score in within if score.acquisition == least)
    elif scores:
        assert best is not None and best.forgetting == min(score.forgetting for score in scores)
    else:
        assert best is None
    assert better_of(best, None, bound) == best


def bits(
    base: float | None, trained: float | None, routed: float | None
) -> dict[str, float | None]:
    return {"base": base, "trained": trained, "routed": routed}


def observer_of(*overrides: str, **roles: str) -> Observer:
    """Return what judges a run by texts of these roles; it cannot evaluate."""
    sources = [json.dumps(held_out(name, "x.txt", role)) for name, role in roles.items()]
    config = load_text(SMALLEST, f"evaluation.perplexity=[{', '.join(sources)}]", *overrides)
    no: Any = None
    return Observer(config, no, no, no, no, no, [], [])


def test_the_score_is_of_the_served_head_and_of_the_corpus_that_lost_most() -> None:
    roles = {"a": "retention", "b": "retention", "c": "acquisition", "d": "acquisition"}
    losses = {"a": bits(1, 9, 1.5), "b": bits(1, 9, 1.2), "c": bits(9, 2, 3), "d": bits(9, 4, 5)}
    for variant, acquisition, forgetting in (("route", 4.0, 0.5), ("preserve", 3.0, 8.0)):
        observer = observer_of(f"method.variant={variant}", **roles)
        score = observer.score(7, losses)
        assert score is not None and score.step == 7
        assert (score.acquisition, score.forgetting) == pytest.approx((acquisition, forgetting))
        assert observer.score(7, losses | {"c": bits(1.0, None, None)}) is None


def test_a_failure_on_the_way_names_what_is_compared_and_the_trained_head_alone() -> None:
    observer = observer_of(old="retention", new="acquisition")
    failed = observer.failures({"old": bits(1.0, 9.0, 1.0), "new": bits(1.188, 1.339, 1.188)})
    assert [*failed] == ["new"], "what is forgotten has a bound of its own"
    assert "1.188 to 1.339 bits/byte, without an interval, of the text that" in failed["new"]
    failed = observer.failures({"old": bits(1.0, None, 1.0), "new": bits(None, 1.0, None)})
    assert failed == {"old": "the trained head's loss is not finite"}
    for trained in (0.9, 1.0, 1.0004):
        assert not observer.failures({"old": bits(1.0, 1.0, 1.0), "new": bits(1.0, trained, 1.0)})


class Killed(Exception):
    """Ends training as a kill would: without a checkpoint."""


# Step 4 is the best that keeps within the bound; the last step is measured because there is one to choose.
SCORES_BY_STEP = {2: (5.0, 0.0), 4: (4.0, 0.1), 6: (3.0, 0.2), 8: (4.5, 0.0), 9: (4.0, 0.0)}


def scored(observer: Observer, step: int, _bits: Losses) -> Score:
    return Score(step, *SCORES_BY_STEP[step], [corpus.folder.name for corpus in observer.held_out])


@pytest.fixture(scope="module")
def chosen(
    shared_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunConfig, list[int]]:
    """A finished run that was evaluated at every second step and kept the best of them, and the steps it saved."""
    folder = tmp_path_factory.mktemp("chosen")
    tales = f"{shared_data}/en-tinystories/tinystories_val.txt"
    roles = ("acquisition", "retention")
    corpora = json.dumps([held_out(role, tales, role, max_documents=2) for role in roles])
    config = configs_in(folder, shared_data, tmp_path_factory.getbasetemp() / "tokens")(
        "whole",
        f"evaluation.perplexity={corpora}",
        "evaluation.bootstrap_resamples=100",
        "train.eval_every_steps=2",
        "train.eval_max_tokens=100000",
        "evaluation.sequence_length=512",
        "train.max_forgetting=0.1",
        "train.keep_checkpoints=1",
        "train.save_every_steps=2",
        "train.global_batch_size=2",
        "train.micro_batch_size=2",
        "train.log_every_steps=4",
    )
    saved = list[int]()

    def write(run: Any, state: TrainState, snapshot: Any) -> None:
        saved.append(state.step)
        write_checkpoint(run, state, snapshot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Observer, "score", scored)
        patch.setattr(training_run, "write_checkpoint", write)
        finished(config)
    return config, saved


def evaluations(run: RunFolder) -> list[MetricsRecord]:
    return [record for record in read_records(run.metrics) if EVALUATION in record]


def test_a_plain_model_beside_its_base_is_trained_to_the_bits_of_one_unseen_and_the_base_is_read_once(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (
        "method={variant: full}",
        "train.max_steps=3",
        "train.global_batch_size=4",
        "evaluation.perplexity.0.max_documents=1",
    )
    hashes, num_read = [], 0
    from_pretrained = AutoModelForCausalLM.from_pretrained

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_read
        num_read += 1
        return from_pretrained(*args, **kwargs)

    for name, *more in (("unseen",), ("observed", "train.eval_every_steps=1")):
        config = make_config(name, *settings, *more)
        upscaled(config)
        num_read = 0
        with monkeypatch.context() as patch:
            patch.setattr(AutoModelForCausalLM, "from_pretrained", counted)
            train(config, None, print)
        trained = RunFolder(config.output_dir).final
        hashes.append({file.name: file_sha256(file) for file in trained.glob("*.safetensors")})
        assert num_read == 1
    assert hashes[0] and hashes[0] == hashes[1]


def test_samples_move_a_bar_by_every_token(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "_SECONDS_APART", 0.0)
    finished(make_config("run", "train.max_steps=1", "train.eval_every_steps=1"))
    states = re.findall(r"sampling: .*?(\d+\.?\d*)/32\.0", capsys.readouterr().err)
    assert [*map(float, states)] == [float(number) for number in range(33)]


def test_an_evaluation_scores_no_more_tokens_than_its_bound_of_all_texts_together(
    make_config: MakeConfig, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens = list[float]()

    def counted(*args: Any, **options: Any) -> list[DocumentLosses]:
        scored = score_beginnings(*args, **options)
        num_tokens.extend(losses.num_tokens.sum() for losses in scored)
        return scored

    monkeypatch.setattr(observing, "score_beginnings", counted)
    tales = f"{shared_data}/en-tinystories/tinystories_val.txt"
    texts = [held_out(name, tales, max_documents=4) for name in ("a", "b")]
    finished(
        make_config(
            "run",
            f"evaluation.perplexity={json.dumps(texts)}",
            "train.max_steps=1",
            "train.eval_every_steps=1",
            "train.eval_max_tokens=100",
        )
    )
    assert num_tokens == [50, 50]


@pytest.mark.parametrize("base", ["ckpt-stories260K", "ckpt-eltec"])
def test_a_sampled_prompt_begins_as_every_window_does(
    base: str, shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    answer = TwoStreams.answers

    def heard(model: Any, ids_BT: Any, *given: Any, **options: Any) -> Any:
        begun.append(int(ids_BT[0, 0]))
        return answer(model, ids_BT, *given, **options)

    monkeypatch.setattr(TwoStreams, "answers", heard)
    config = changed(
        petitions_run(shared_data, tmp_path / "run"),
        f"model.base={shared_data / base / 'hf'}",
        "train.max_steps=1",
        "train.global_batch_size=1",
        "train.micro_batch_size=1",
        "train.eval_every_steps=1",
        "train.eval_max_tokens=200",
    )
    train_run(config)
    markers = DocumentMarkers.of(load_tokenizer(config.model))
    assert begun and {*begun} == {markers.context}


def check_is_of_final(record: MetricsRecord, config: RunConfig) -> None:
    """The record has the figures of the report on `final/`, and the continuation that its model generates."""
    report, (acquisition, *_) = evaluate(config), config.evaluation.perplexity
    for corpus in report.corpora:
        for head in ("base", "trained", "routed"):
            figures = corpus.heads["posterior" if head == "routed" else head]
            assert record[EVALUATION][corpus.name][head] == figures.nats_per_token
            assert record[BITS][corpus.name][head] == figures.bits_per_byte
        assert record[SHARES][corpus.name] == figures.base_share
    final = Run(config).open_final()
    (heard,) = open_sources(config, [acquisition], final.tokenizer)
    heads: list[Any] = [final.load(), final.load_base()]
    ids = torch.tensor(heard.document(0)[None, :32].astype("int64"))
    greedy, of_base = (
        head.generate(ids, max_new_tokens=32, do_sample=False)[0, 32:] for head in heads
    )
    said = {
        name: final.tokenizer.decode(part, skip_special_tokens=True)
        for name, part in (("prompt", ids[0]), ("continuation", greedy), ("base", of_base))
    }
    assert record[SAMPLES] == {acquisition.name: said}, "of one language"


def test_the_best_weights_outlive_later_checkpoints_and_are_final(
    chosen: tuple[RunConfig, list[int]],
) -> None:
    config, saved = chosen
    run = RunFolder(config.output_dir)
    assert saved == [2, 4, 6, 8, 9], "a step that has a checkpoint is not saved again"
    assert [step_of(folder) for folder in run.saved] == [4, 9]
    kept, *others = (folder / TRAINED for folder in (run.final, *run.saved))
    assert [file_sha256(kept) == file_sha256(other) for other in others] == [True, False]
    assert TrainState.load(run.final).step == 4
    records = evaluations(run)
    best = {record["step"]: record["best_step"] for record in records}
    assert best == {2: 2, 4: 4, 6: 4, 8: 4, 9: 4}
    verify(run.root)
    check_is_of_final(records[1], config)


@pytest.mark.parametrize("variant", ["route", "full"])
def test_a_periodic_evaluations_base_is_the_base_by_its_own_tokens_as_in_the_report(
    shared_data: Path, tmp_path: Path, variant: str
) -> None:
    config = changed(
        config_of(shared_data, tmp_path, variant),
        "train.eval_every_steps=1",
        "train.eval_max_tokens=100000",
        "evaluation.sequence_length=512",
    )
    (tmp_path / "en.txt").write_text("It was the best of times.\n\nIt was the worst of times.\n")
    first, last = evaluations(RunFolder(train_run(config).output_dir))
    report = evaluate(config)
    for corpus in report.corpora:
        for head in ("base", "trained", "routed"):
            told = corpus.heads["posterior" if head == "routed" else head]
            assert last[EVALUATION][corpus.name][head] == pytest.approx(told.nats_per_token)
            assert last[BITS][corpus.name][head] == pytest.approx(told.bits_per_byte)
        assert first[BITS][corpus.name]["base"] == last[BITS][corpus.name]["base"]


@pytest.mark.parametrize(
    ("owner", "name", "step"), [(MetricsLog, "append", 8), (Observer, "evaluate", 4)]
)
def test_a_run_that_is_killed_or_stopped_after_an_evaluation_and_resumed_chooses_the_same(
    chosen: tuple[RunConfig, list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    step: int,
) -> None:
    whole, _ = chosen
    config = changed(whole, f"output_dir={tmp_path / 'cut'}")
    run, undisturbed = upscaled(config), RunFolder(whole.output_dir)
    monkeypatch.setattr(Observer, "score", scored)
    work = getattr(owner, name)

    def disturbed(self: Any, given: Any, **due: bool) -> Any:
        done = work(self, given, **due)
        if owner is Observer and given == step:
            os.kill(os.getpid(), signal.SIGTERM)
        elif owner is MetricsLog and given["step"] == step:
            raise Killed
        return done

    with monkeypatch.context() as patch, pytest.raises((Killed, Interrupted)):
        patch.setattr(owner, name, disturbed)
        train(config, None, print)
    go_on(config)
    assert file_sha256(run.final / TRAINED) == file_sha256(undisturbed.final / TRAINED)
    found, expected = (
        [(record["step"], record["best_step"], record[SAMPLES]) for record in evaluations(one)]
        for one in (run, undisturbed)
    )
    assert found == expected
    state = TrainState.load(run.final)
    assert (state.step, state.evaluation_due) == (4, False)
    assert state.best == TrainState.load(undisturbed.final).best


def test_a_run_that_is_stopped_at_the_end_of_a_step_makes_up_for_its_evaluation(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("run", "train.max_steps=2", "train.eval_every_steps=1")
    run = upscaled(config)

    def stopped(_done: int, _model: Any, take: Callable[[], TakenStep]) -> TakenStep:
        taken = take()
        os.kill(os.getpid(), signal.SIGTERM)
        return taken

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        around_steps(patch, stopped)
        train(config, None, print)
    assert evaluations(run) == []
    go_on(config)
    assert [record["step"] for record in evaluations(run)] == [1, 2]


def test_a_best_that_is_damaged_while_a_run_trains_leaves_it_its_last_step(
    chosen: tuple[RunConfig, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(shutil.copytree(chosen[0].output_dir, tmp_path / "run"))
    remove_folder(run.final)
    monkeypatch.setattr("scale_cli.training.finishing.is_whole", lambda _: False)
    said = go_on(changed(chosen[0], f"output_dir={run.root}"))
    assert any(
        "the best checkpoint is damaged; final/ has the last step's" in line for line in said
    )
    assert "the best step" not in said[-1]
    assert TrainState.load(run.final).step == 9


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.max_forgetting=null", "/final"),
        ("evaluation.perplexity.0.path=other.txt", "was scored on other held-out text"),
        ("train.eval_max_tokens=1", "(train.eval_max_tokens: 100000 -> 1)"),
        ("method.router.prior=0.4", "(method.router.prior: 0.5 -> 0.4)"),
        (None, "the best checkpoint so far is missing"),
        ("train.log_every_steps=1", "the best checkpoint so far is damaged"),
    ],
)
def test_a_best_that_does_not_compare_any_more_or_is_gone_is_left_and_the_last_step_is_final(
    chosen: tuple[RunConfig, list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    override: str | None,
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.txt").write_text("Another text, at another place.\n")
    run = RunFolder(shutil.copytree(chosen[0].output_dir, tmp_path / "run"))
    remove_folder(run.final)
    config = changed(chosen[0], f"output_dir={run.root}", *filter(None, [override]))
    if override is None:
        remove_folder(run.checkpoint(4))
    if "damaged" in told:
        with (run.checkpoint(4) / TRAINED).open("ab") as file:
            file.write(b"\0")
    monkeypatch.setattr(Observer, "score", scored)
    said = go_on(config, "train.max_forgetting")
    assert any(told in line for line in said) and "the best step" not in said[-1]
    state = TrainState.load(run.final)
    assert state.step == 9 and state.best is None
