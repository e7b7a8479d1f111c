"""SIGTERM and SIGINT wherever they come: the way to go on is told, and the run ends as the whole one, bit for bit."""

import shutil
import signal
import time
from collections.abc import Callable

from tests.torture.faults import SignalAt
from tests.torture.tiny_run import MAX_STEPS, Runs, assert_same
from tests.torture.verbs import Ended, ended_group, run_verb

Record = Callable[[str, object], None]
_GO_ON = "continue with: "
# Where the signal comes, and the step after which the run is stopped then.
PLACES = [
    (SignalAt("micro-batch", 7, signal.SIGTERM), 1),  # in the middle of a step
    (SignalAt("evaluation", 4, signal.SIGINT), 8),  # of the second corpus
    (SignalAt("save", 1, signal.SIGTERM), None),
    (SignalAt("micro-batch", 1, signal.SIGINT), 0),
    (SignalAt("micro-batch", 8, signal.SIGTERM), 1),  # before the update
    (SignalAt("micro-batch", 26, signal.SIGTERM), 6),  # after a checkpoint
    (SignalAt("evaluation", 1, signal.SIGTERM), 4),
    (SignalAt("save", 3, signal.SIGINT), None),
]


def stop(runs: Runs, signalled: SignalAt, verb: str = "train") -> Ended:
    """Let a signal come into a verb of the run `stopped`, which is to end by it."""
    ended = run_verb(*runs.arguments(verb, "stopped"), hook=signalled)
    assert ended.exit_code in (0, 128 + signalled.number), ended.printed
    assert "Traceback" not in ended.printed
    return ended


def test_a_signal_ends_in_a_checkpoint_and_the_resumed_run_as_the_whole_one(
    runs: Runs, in_full: bool
) -> None:
    for signalled, step in PLACES if in_full else PLACES[:2]:
        run = runs.upscaled("stopped")
        ended = stop(runs, signalled)
        assert f"{_GO_ON}scale train {runs.config('stopped')} --resume auto\n" in ended.printed
        assert f"stopped by {signal.Signals(signalled.number).name}" in ended.printed
        if step is not None:
            assert run.checkpoint(step).is_dir() and f"after step {step};" in ended.printed
        if in_full:  # once more; resumed, it may not come to so many calls
            stop(runs, signalled)
        runs.finish_as("whole", "stopped")


def test_a_signal_in_every_evaluation_again_and_again_still_comes_to_the_end(runs: Runs) -> None:
    """The first corpus of the evaluation gets done, the second is cut: nothing of it may be logged twice."""
    runs.upscaled("stopped")
    # At last the evaluation is made up for, logged, and then a step is left: the log is ahead of the checkpoint.
    for place in ("evaluation", "evaluation", "micro-batch"):
        assert "after step 4;" in stop(runs, SignalAt(place, 2, signal.SIGTERM)).printed
    runs.finish_as("whole", "stopped")


def test_a_second_sigint_stops_at_once_and_the_run_goes_on_from_its_last_checkpoint(
    runs: Runs,
) -> None:
    run = runs.upscaled("stopped")
    ended = stop(runs, SignalAt("micro-batch", 18, signal.SIGINT, times=2))
    assert ended.exit_code == 130 and _GO_ON not in ended.printed
    assert not run.checkpoint(4).exists()
    # It goes on, and is stopped again while its last checkpoint is written: before `final/` is.
    ended = stop(runs, SignalAt("save", 3, signal.SIGTERM))
    assert ended.exit_code == 143 and f"after step {MAX_STEPS};" in ended.printed
    assert not run.final.exists()
    runs.finish_as("whole", "stopped")


def test_a_signal_while_tokenising_leaves_nothing_that_blocks_the_same_command(runs: Runs) -> None:
    shutil.rmtree(runs.upscaled("stopped").tokens)
    ended = stop(runs, SignalAt("tokenisation", 2, signal.SIGTERM), "prepare")
    assert ended.exit_code == 143 and "the same command" in ended.printed
    runs.do("prepare", "stopped")
    runs.finish_as("whole", "stopped")


def test_signals_at_any_instant_from_outside(
    runs: Runs, in_full: bool, record_property: Record
) -> None:
    """Loading, training, saving, writing `final/`, compiling: 143 with a way to go on, and the same end."""
    for compiles, num_signals in ((False, 40), (True, 4)) if in_full else ((False, 1),):
        timed = Runs(runs.root, (f"train.compile={str(compiles).lower()}",))
        timed.upscaled("timed")
        started_s = time.monotonic()
        timed.do("train", "timed")
        usual_s = time.monotonic() - started_s
        timed.upscaled("stopped")
        stops = 0
        for part in range(num_signals):
            verb = timed.start("stopped")
            verb.process.join(usual_s * (part + 0.5) / num_signals)
            verb.send(signal.SIGTERM)
            ended = verb.ended()
            # Before main() runs, it ends in the system's way.
            assert ended.exit_code in (0, 143, -signal.SIGTERM), ended.printed
            assert "Traceback" not in ended.printed
            stops += ended.exit_code != 0
        timed.finish_as("timed", "stopped")
        record_property(f"SIGTERMs from outside, train.compile {compiles}", stops)


def test_two_processes_agree_on_a_signal_that_only_one_got(runs: Runs) -> None:
    whole, run = runs.upscaled("whole-of-two"), runs.upscaled("stopped")
    assert all(ended.exit_code == 0 for ended in ended_group(runs.start_two("whole-of-two")))
    verbs = runs.start_two("stopped")
    deadline_s = time.monotonic() + 60
    while not run.metrics.exists() or not run.metrics.read_bytes():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    verbs[1].send(signal.SIGTERM)
    ends = [verb.ended() for verb in verbs]
    assert [ended.exit_code for ended in ends] == [143, 143], ends
    told = "".join(ended.printed for ended in ends)
    assert told.count(f"{_GO_ON}accelerate launch --num_processes 2 -m scale_cli train ") == 1, told
    assert all(ended.exit_code == 0 for ended in ended_group(runs.start_two("stopped")))
    assert_same(run, whole)
