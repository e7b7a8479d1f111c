from __future__ import annotations

from scale_cli.evaluation.results import HEADS
from scripts.biography.report import MethodResult, served_lines, verdicts


def a_result(variant: str, task_0: list[float], task_1: list[float]) -> MethodResult:
    steps = list(range(len(task_0)))
    return MethodResult(variant, variant, {}, 1, 1.0, steps, dict.fromkeys(HEADS, task_0), dict.fromkeys(HEADS, task_1))


def test_route_is_shown_under_both_rules_and_every_other_method_once() -> None:
    results = [a_result(variant, [1.0], [0.0]) for variant in ("full", "lora", "preserve", "route")]
    lines = served_lines(results)
    assert [(line.label, line.served) for line in lines] == [
        ("full", "adapted"),
        ("lora", "adapted"),
        ("preserve", "adapted"),
        ("route (cosine)", "cosine"),
        ("route (posterior)", "posterior"),
    ]


def test_a_dip_on_the_way_counts_against_what_was_kept() -> None:
    lines = served_lines(
        [a_result("full", [1.0, 0.1, 0.1], [0.0, 0.5, 1.0]), a_result("route", [0.9, 0.8, 0.9], [0, 0, 1])]
    )
    (sentence,) = verdicts(lines)
    assert "88.9 % of Task 0 (bar 95 %: missed)" in sentence
    assert "100.0 % of what full learned of Task 1 (bar 90 %: met)" in sentence


def test_learning_less_than_the_bar_is_said() -> None:
    lines = served_lines([a_result("full", [1.0, 0.1], [0.0, 1.0]), a_result("route", [1.0, 1.0], [0.0, 0.85])])
    (sentence,) = verdicts(lines)
    assert "100.0 % of Task 0 (bar 95 %: met)" in sentence
    assert "85.0 % of what full learned of Task 1 (bar 90 %: missed)" in sentence


def test_a_base_that_never_learned_task_0_keeps_nothing() -> None:
    (sentence,) = verdicts(served_lines([a_result("route", [0.0, 0.0], [0.0, 1.0])]))
    assert "nothing of Task 0 (bar 95 %: missed)" in sentence
