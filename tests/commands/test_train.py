import io
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from scale_cli import terminal
from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.errors import Interrupted
from scale_cli.methods.recipes import trainable_parameters
from scale_cli.runs.folder import RunFolder
from scale_cli.storage.atomic import load_tensors, read_json
from scale_cli.training import loop, training_run
from scale_cli.training.metrics_log import read_records
from scale_cli.training.observing import Observer
from scale_cli.training.records import TrainState
from scale_cli.training.step import TakenStep, train_step
from tests.data.test_conversations import PLAIN, talk
from tests.torture.tiny_run import CLOCK
from tests.training.conftest import (
    MakeConfig,
    are_equal,
    around_steps,
    finished,
    go_on,
    trained,
    upscaled,
)
from tests.widening import lower_stories


def metrics(run: RunFolder) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in record.items() if key not in CLOCK}
        for record in read_records(run.metrics)
    ]


def assert_same_run(one: RunFolder, other: RunFolder) -> None:
    assert metrics(one) == metrics(other)
    assert are_equal(trained(one.final), trained(other.final))


MUON = (
    "train.eval_every_steps=4",
    "train.optimiser=muon",
    "train.schedule=wsd",
    "method.collaboration.layers=none",
    "method.distillation.weight=1",
    "corpus.sources.1.role=replay",
    "train.embedding_norm=bounded",
    "corpus.sources.1.weight=1.0",
    "train.log_every_steps=4",
)


def test_speed_is_that_of_the_steps_since_the_last_record_and_everywhere_the_same(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations take two hours, checkpoints one, a step one second, by a clock that nothing else moves."""
    now_s = 0.0
    written = io.StringIO()
    bar: Any = tqdm(total=9, desc="training", mininterval=0, file=written)
    bar._time = lambda: now_s
    bar.start_t = bar.last_print_t = now_s
    monkeypatch.setattr(loop, "progress_bar", lambda **_: bar)
    monkeypatch.setattr(terminal, "_form", "lines")

    def takes(seconds: float, real: Callable[..., Any]) -> Callable[..., Any]:
        def take(*args: Any, **kwargs: Any) -> Any:
            nonlocal now_s
            now_s += seconds
            return real(*args, **kwargs)

        return take

    monkeypatch.setattr("time.monotonic", lambda: now_s)
    monkeypatch.setattr(loop, "train_step", takes(1.0, train_step))
    monkeypatch.setattr(Observer, "evaluate", takes(7200.0, Observer.evaluate))
    monkeypatch.setattr(training_run, "take_snapshot", takes(3600.0, training_run.take_snapshot))
    config = make_config("run", "train.eval_every_steps=4", "train.log_every_steps=2")
    run = upscaled(config)
    position = train(config, None, print)
    logged = [record for record in read_records(run.metrics) if "loss" in record]
    assert [record["step"] for record in logged] == [2, 4, 6, 8, 9]
    start: dict[str, Any] = {"num_tokens": 0, "step": 0}
    for earlier, record in pairwise([start, *logged]):
        tokens, steps = (record[key] - earlier[key] for key in ("num_tokens", "step"))
        assert record["tokens_per_s"] == pytest.approx(tokens / steps, abs=0.1)
    assert (logged[-1]["evaluating_s"], logged[-1]["saving_s"]) == (2 * 7200.0, 2 * 3600.0)
    spent = (position.stepping_s, position.evaluating_s, position.saving_s)
    assert spent == (9.0, 2 * 7200.0, 3 * 3600.0) and position.elapsed_s == sum(spent)
    cost = read_json(run.final / "cost.json")
    assert cost["tokens_per_s"] == position.tokens_per_s == position.num_tokens / 9
    assert TrainState.load(run.final) == position
    drawn = re.findall(r"(\d)/9 \[00:0(\d)<[^]]* 1\.00it/s([^]]*)", written.getvalue())
    for number, elapsed_s, more in drawn:
        told = [record for record in logged if record["step"] <= int(number)][-1:]
        assert number == elapsed_s and ("tokens/s" in more) == bool(told)
        assert all(f", {record['tokens_per_s']:,.0f} tokens/s" in more for record in told)
    assert {number for number, *_ in drawn} == {*"123456789"}


def test_the_time_that_an_evaluation_took_until_it_was_interrupted_is_kept(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    evaluate = Observer.evaluate

    def interrupted(*_: Any, **__: Any) -> Any:
        nonlocal now_s
        now_s += 100.0
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("time.monotonic", lambda: now_s)
    monkeypatch.setattr(Observer, "evaluate", interrupted)
    config = make_config("run", "train.eval_every_steps=4")
    run = upscaled(config)
    with pytest.raises(Interrupted):
        train(config, None, print)
    monkeypatch.setattr(Observer, "evaluate", evaluate)
    go_on(config)
    assert TrainState.load(run.final).evaluating_s == 100.0


@pytest.fixture
def everything(tmp_path: Path, shared_data: Path) -> tuple[str, ...]:
    """Keys that a run of AdamW can have at once: new tokens, conversations, replay, a choice among its weights, ..."""
    base = shutil.copytree(lower_stories(shared_data), tmp_path / "base")
    (base / "chat_template.jinja").write_text(PLAIN)
    talks = [{"m": talk([(f"ask {n}", f"say {n * n}")] * (n % 3 + 1))} for n in range(30)]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in talks))
    petitions = f"{shared_data}/ko-petitions/valid.txt.xz, language: ko"
    stories = f"{shared_data}/en-tinystories/tinystories_val.txt, language: en"
    sources = (
        f"{{name: petitions, path: {petitions}, max_documents: 8}}",
        f"{{name: tiny, path: {stories}, max_documents: 30, role: replay}}",
        f"{{name: talks, path: {tmp_path}/talks.jsonl, language: en, messages_field: m}}",
    )
    held_out = (
        f"{{name: kept, role: retention, path: {stories}, skip_documents: 40, max_documents: 2}}",
        f"{{name: learnt, role: acquisition, path: {petitions}, skip_documents: 9, max_documents: 1}}",
    )
    return (
        f"model.base={base}",
        "method.vocabulary={new_tokens: 64, min_count: 2, sources: [petitions]}",
        "method.collaboration.layers=none",
        "method.distillation.weight=1",
        f"corpus.sources=[{', '.join(sources)}]",
        "corpus.isolate_documents=true",
        f"evaluation.perplexity=[{', '.join(held_out)}]",
        "evaluation.sequence_length=64",
        "evaluation.batch_size=64",
        "train.embedding_norm=bounded",
        "train.lr_multipliers={head: 3.0}",
        "train.activation_checkpointing=true",
        "train.schedule=wsd",
        "train.on_nonfinite=skip",
        "train.eval_every_steps=4",
        "train.max_forgetting=0.5",
        "train.log_every_steps=2",
    )


@pytest.mark.parametrize("kind", ["muon", "everything"])
def test_killed_twice_without_warning_and_resumed_equals_uninterrupted_bitwise(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    everything: tuple[str, ...],
    kind: str,
) -> None:
    """Steps after the last checkpoint are done again; the log shows none of them twice. One step is not finite."""
    overrides = MUON if kind == "muon" else everything
    whole, cut = (make_config(name, *overrides) for name in ("whole", "cut"))
    kill_at: list[int] = []

    class Killed(BaseException):
        """Stands for SIGKILL: nothing of ours handles it."""

    def step_until_killed(done: int, model: Any, take: Callable[[], TakenStep]) -> TakenStep:
        if done in kill_at:
            raise Killed
        if kind != "everything" or done != 4:
            return take()
        trains = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        poison = trains.register_hook(lambda gradient: gradient * torch.nan)
        taken = take()
        poison.remove()
        return taken

    around_steps(monkeypatch, step_until_killed)
    uninterrupted, run = finished(whole), upscaled(cut)
    for step in (5, 7):
        kill_at[:] = [step]
        with pytest.raises(Killed):
            go_on(cut)
        logged = [record["step"] for record in metrics(run) if "loss" in record]
        assert logged == sorted({*logged})
        assert logged[-1] == step - step % whole.train.log_every_steps
    kill_at.clear()
    go_on(cut)
    assert TrainState.load(run.checkpoint(9)).skipped_steps == (kind == "everything")
    assert_same_run(uninterrupted, run)


def test_checkpoints_hold_the_expansion_and_nothing_frozen(make_config: MakeConfig) -> None:
    config = make_config("run")
    added = {*trainable_parameters(upscale(config).load_to_train())}
    train(config, None, print)
    assert all(name.startswith("expansion.") for name in added)
    run = RunFolder(config.output_dir)
    kept = sorted(run.checkpoints.iterdir())
    assert [folder.name for folder in kept] == ["step-00000006", "step-00000009"]
    moments = load_tensors(kept[-1] / "optimiser.safetensors")
    assert {*trained(kept[-1])} == added == {name.partition(".")[2] for name in moments}
