import pytest

from scale_cli.training import loop
from tests.training.conftest import MakeConfig, before_each_step, finished


def test_freed_memory_is_kept_from_the_second_step_on_if_twice_the_firsts_peak_is_left(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[int] = []
    monkeypatch.setattr(loop, "peak_memory_bytes", lambda _: 7)
    monkeypatch.setattr(loop, "keep_freed_memory", said.append)
    before: dict[int, list[int]] = {}
    before_each_step(monkeypatch, lambda done, _: before.update({done: [*said]}))
    finished(make_config("run", "train.max_steps=3"))
    assert before == {0: [], 1: [7], 2: [7]}
