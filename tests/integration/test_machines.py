"""Two processes as two machines would have them: nothing in common but the run's folder, and one works long alone."""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from scale_cli import processes
from scale_cli.data.tokens import TokenCache
from scale_cli.runs.folder import TRAINED
from scale_cli.storage import atomic
from scale_cli.storage.atomic import load_tensors
from scale_cli.training.observing import Observer
from scale_cli.training.records import TrainState
from tests.torture.tiny_run import Runs, write_base_and_texts
from tests.torture.verbs import Ended, ended_group, start_group

_STEPS_WAIT_S, _ALONE_S = 8, 12
_LOGGED = ("train.log_every_steps=2", "train.trackers=[tensorboard]")
_SOURCES = (
    "model.base=./base",
    "corpus.cache_dir=./tokens",
    "corpus.sources.0.path=./one.txt",
    "corpus.sources.1.path=./two.txt",
    "evaluation.perplexity.0.path=./held-out.txt",
    "evaluation.perplexity.1.path=./one.txt",
)


@dataclass(frozen=True)
class OnMachine:
    """Let a process find its machine's files; the main one may take longer than the others wait in a step."""

    root: Path
    is_slow: bool = False

    def __call__(self) -> None:
        os.chdir(self.root / f"machine-{os.environ['RANK']}")
        if not self.is_slow:
            return
        vars(processes)["_STEPS"] = timedelta(seconds=_STEPS_WAIT_S)
        if os.environ["RANK"] == "0":
            self.delay(TokenCache, "open")
            self.delay(Observer, "samples")
            self.delay(Accelerator, "log")
            self.delay(atomic, "publish_folder")

    def delay(self, owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def later(*args: Any, **kwargs: Any) -> Any:
            tokenised = self.root / "tokenised"
            if name != "open" or not tokenised.exists():
                tokenised.touch()
                time.sleep(_ALONE_S)
            return function(*args, **kwargs)

        setattr(owner, name, later)


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """Runs of a base and text that lie on each machine, whose caches are empty."""
    write_base_and_texts(tmp_path, num_hidden_layers=2)
    for number in (0, 1):
        machine = tmp_path / f"machine-{number}"
        machine.mkdir()
        shutil.copytree(tmp_path / "base", machine / "base")
        for text in tmp_path.glob("*.txt"):
            shutil.copy(text, machine)
    return Runs(tmp_path, _SOURCES)


def trained(runs: Runs, name: str, *, is_slow: bool = False) -> list[Ended]:
    few = (
        "train.max_steps=4",
        "train.save_every_steps=2",
        "train.sharding=all",
        *_LOGGED,
        *runs.overrides,
    )
    arguments = str(runs.config(name)), *few
    for verb in ("upscale", "train"):
        ends = ended_group(
            start_group(
                verb, *arguments, num_processes=2, hook=OnMachine(runs.root, is_slow=is_slow)
            )
        )
        if any(ended.exit_code for ended in ends):
            return ends
    return ends


def test_machines_with_caches_of_their_own_train_and_wait_for_one_that_works_long_alone(
    runs: Runs,
) -> None:
    """Tokenising, samples, a trace, a tracker, checkpoints and `final/` take it longer than a step's time-out."""
    weights = []
    for name in ("usual", "slow"):
        ends = trained(runs, name, is_slow=name == "slow")
        assert [ended.exit_code for ended in ends] == [0, 0], ends
        assert TrainState.load(runs.folder(name).final).step == 4
        weights.append(load_tensors(runs.folder(name).final / TRAINED))
        for number in (0, 1):
            shutil.rmtree(runs.root / f"machine-{number}" / "tokens")
    assert all(weights[0][key].equal(tensor) for key, tensor in weights[1].items())


def test_machines_whose_text_is_not_the_same_are_refused_in_one_line(runs: Runs) -> None:
    (runs.root / "machine-1" / "two.txt").write_text("1 2 3\n\n4 5\n")
    ends = trained(runs, "run")
    said = [
        line for ended in ends for line in ended.printed.splitlines() if line.startswith("error: ")
    ]
    assert len(said) == 1 and "machines read different text (two-" in said[0], ends
