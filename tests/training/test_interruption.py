import os
import shlex
import signal

import pytest

from scale_cli.training import interruption
from scale_cli.training.interruption import command_to_go_on, stop_requests


@pytest.mark.parametrize(
    ("given", "num_processes", "expected"),
    [
        ("train a.yaml", None, "scale train a.yaml --resume auto"),
        ("train a.yaml train.lr=1", None, "scale train a.yaml train.lr=1 --resume auto"),
        ("train a.yaml --resume auto", "1", "scale train a.yaml --resume auto"),
        ("train --resume=x 'a b'", None, "scale train --resume=x 'a b' --resume auto"),
        ("run a.yaml 'output_dir=b c'", None, "scale run a.yaml 'output_dir=b c'"),
        ("run a.yaml", "4", "accelerate launch --num_processes 4 -m scale_cli run a.yaml"),
    ],
)
def test_the_command_to_go_on_is_the_one_that_was_given(
    given: str, num_processes: str | None, expected: str
) -> None:
    environment = {} if num_processes is None else {"WORLD_SIZE": num_processes}
    assert command_to_go_on(shlex.split(given), environment) == expected


def test_a_first_ctrl_c_says_at_once_when_it_stops_and_what_a_second_does(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interruption, "shows_lines", lambda: True)
    with stop_requests(None, alone=True) as request:
        os.kill(os.getpid(), signal.SIGINT)
        told = capfd.readouterr().err
        assert request.mine() == signal.SIGINT
    assert "stopping after this step" in told and "a second Ctrl-C ends it now" in told
