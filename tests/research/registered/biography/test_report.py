import pytest

from scale_cli.evaluation.results import HEADS
from scripts.research.biography.report import MethodResult, served_lines, verdicts


def a_result(variant: str, task_0: list[float], task_1: list[float]) -> MethodResult:
    steps = list(range(len(task_0)))
    return MethodResult(
        variant,
        variant,
        {},
        1,
        1.0,
        steps,
        dict.fromkeys(HEADS, task_0),
        dict.fromkeys(HEADS, task_1),
    )


def test_route_is_shown_under_both_rules_and_every_other_method_once() -> None:
    results = [a_result(variant, [1.0], [0.0]) for variant in ("full", "preserve", "route")]
    lines = [(line.label, line.served) for line in served_lines(results)]
    assert lines[:2] == [("full", "trained"), ("preserve", "trained")]
    assert lines[2:] == [("route (cosine)", "cosine"), ("route (posterior)", "posterior")]


@pytest.mark.parametrize(
    ("full", "task_0", "task_1", "kept", "learned"),
    [
        (
            [0.0, 0.5, 1.0],
            [0.9, 0.8, 0.9],
            [0.0, 0.0, 1.0],
            "88.9 % of Task 0 (bar 95 %: missed)",
            "100.0 %",
        ),
        ([0.0, 1.0], [1.0, 1.0], [0.0, 0.85], "100.0 % of Task 0 (bar 95 %: met)", "85.0 %"),
        ([0.0, 1.0], [0.0, 0.0], [0.0, 1.0], "nothing of Task 0 (bar 95 %: missed)", "100.0 %"),
    ],
    ids=["a dip on the way counts", "less was learned than the bar", "never learned"],
)
def test_what_was_kept_at_every_step_and_learned_in_the_end_is_held_to_the_bars(
    full: list[float], task_0: list[float], task_1: list[float], kept: str, learned: str
) -> None:
    lines = served_lines(
        [a_result("full", [1.0] * len(full), full), a_result("route", task_0, task_1)]
    )
    (sentence,) = verdicts(lines)
    met = "met" if learned == "100.0 %" else "missed"
    assert kept in sentence
    assert f"{learned} of what full learned of Task 1 (bar 90 %: {met})" in sentence
