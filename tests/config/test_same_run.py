from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scale_cli.config.same_run import (
    ACCEPTABLE,
    EVALUATE_SECTIONS,
    EXPORT_SECTIONS,
    FREE,
    LOCATION_KEYS,
    TRAIN_SECTIONS,
    UPSCALE_SECTIONS,
    differences,
    scored_otherwise,
)
from scale_cli.config.schema import RunConfig
from scale_cli.values import Change, Section


def config(**changes: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "output_dir": "runs/x",
        "model": {"base": "some/model"},
        "method": {"variant": "adapt"},
        "corpus": {"sources": [{"name": "news", "path": "news.txt", "language": "ko"}]},
        "train": {"max_steps": 10},
    }
    for key, value in changes.items():
        section, _, field = key.partition("__")
        if field:
            tree[section] = tree.get(section, {}) | {field: value}
        else:
            tree[section] = value
    return RunConfig.model_validate(tree)


LAYERS = st.none() | st.sampled_from(["none", "all", "top:1"]) | st.lists(st.integers(0, 3), max_size=2)
CONFIGS = st.builds(
    config,
    seed=st.integers(0, 1),
    method__collaboration=st.fixed_dictionaries({"layers": LAYERS}),
    corpus__sequence_length=st.sampled_from([8, 16]),
    train__lr=st.sampled_from([1e-3, 1e-4]),
    train__log_every_steps=st.integers(1, 2),
    output_dir=st.sampled_from([Path("a"), Path("b")]),
)
SECTIONS = st.sampled_from([UPSCALE_SECTIONS, TRAIN_SECTIONS])


@settings(deadline=None, max_examples=100)
@given(CONFIGS, CONFIGS, SECTIONS)
def test_differences_are_the_same_from_both_sides(one: RunConfig, other: RunConfig, sections: tuple[str, ...]) -> None:
    def swapped(line: str) -> str:
        key, _, values = line.partition(": ")
        before, _, now = values.partition(" -> ")
        return f"{key}: {now} -> {before}"

    assert sorted(differences(one, other, sections)) == sorted(map(swapped, differences(other, one, sections)))


@settings(deadline=None, max_examples=100)
@given(CONFIGS, CONFIGS)
def test_two_configs_differ_unless_every_counted_key_is_equal(one: RunConfig, other: RunConfig) -> None:
    counted = [(c.seed, c.method.collaboration.layers, c.corpus.sequence_length, c.train.lr) for c in (one, other)]
    assert bool(differences(one, other, TRAIN_SECTIONS)) == (counted[0] != counted[1])


@pytest.mark.parametrize(
    "changes",
    [
        {"output_dir": "elsewhere"},
        {"corpus__cache_dir": "cache"},
        {"train__log_every_steps": 1},
        {"train__micro_batch_size": 4},
        {"train__sharding": "all"},
        {"train__save_every_steps": 1},
        {"train__keep_checkpoints": 9},
        {"train__eval_every_steps": 5},
        {"train__eval_max_documents": 5},
        {"train__trackers": ["tensorboard"]},
        {"evaluation": {"batch_size": 1}},
        {"export": {"format": "adapter"}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_changes_no_number_of_a_run_may_change(changes: dict[str, Any]) -> None:
    assert differences(config(), config(**changes), TRAIN_SECTIONS) == []


def reachable(kind: Any) -> Iterator[type[Section]]:
    """Yield every section in an annotation, those in lists and unions too, and in its own fields."""
    if isinstance(kind, type) and issubclass(kind, Section):
        yield kind
    of_fields = [field.annotation for field in kind.model_fields.values()] if hasattr(kind, "model_fields") else []
    for inner in (*get_args(kind), *of_fields):
        yield from reachable(inner)


@pytest.mark.parametrize(("mark", "acting"), [(Change.FREE, FREE), (Change.ACCEPTED, ACCEPTABLE)])
def test_every_mark_that_a_key_may_change_acts(mark: Change, acting: frozenset[str]) -> None:
    marked = {
        (section, name)
        for section in reachable(RunConfig)
        for name, field in section.model_fields.items()
        if mark in field.metadata
    }
    assert len(marked) == len(acting) > 0, "one stands where `_marked` does not look, in a list or an optional section"


def test_text_may_lie_elsewhere_whether_it_is_given_by_one_pattern_or_several() -> None:
    news = {"name": "news", "language": "ko"}
    one, several, moved = (
        config(corpus__sources=[news | {"path": path}]) for path in ("a/*.txt", ["a/1.txt", "a/2.txt"], ["b/1.txt"])
    )
    for now in (several, moved):
        assert differences(one, now, TRAIN_SECTIONS) != []
        assert differences(several, now, TRAIN_SECTIONS, LOCATION_KEYS) == []
        assert differences(one, now, TRAIN_SECTIONS, LOCATION_KEYS) == []


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"seed": 1}, "seed"),
        ({"model__base": "other/model"}, "model.base"),
        ({"model__dtype": "bfloat16"}, "model.dtype"),
        ({"method__variant": "route"}, "method.variant"),
        ({"method__collaboration": {"layers": []}}, "method.collaboration.layers"),
        ({"method__collaboration": {"modules": ["mlp"]}}, "method.collaboration.modules"),
        ({"corpus__sequence_length": 4}, "corpus.sequence_length"),
        ({"train__max_steps": 11}, "train.max_steps"),
    ],
)
def test_what_makes_another_run_is_named(changes: dict[str, Any], key: str) -> None:
    lines = differences(config(), config(**changes), TRAIN_SECTIONS)
    assert lines
    assert all(line.startswith(key) for line in lines)


def test_a_source_more_is_a_difference() -> None:
    news = {"name": "news", "path": "news.txt", "language": "ko"}
    more = config(corpus__sources=[news, news | {"name": "tales"}])
    assert any(
        line.startswith("corpus.sources.1.name: None -> ") for line in differences(config(), more, TRAIN_SECTIONS)
    )


@pytest.mark.parametrize("changes", [{"corpus__sequence_length": 4}, {"train__lr": 1.0}])
def test_training_keys_do_not_touch_what_was_upscaled(changes: dict[str, Any]) -> None:
    assert differences(config(), config(**changes), UPSCALE_SECTIONS) == []


def test_the_router_may_be_set_after_training_but_not_after_evaluation_or_export() -> None:
    before = config()
    router = before.method.router.model_copy(update={"threshold": 0.75})
    after = before.model_copy(update={"method": before.method.model_copy(update={"router": router})})
    assert differences(before, after, TRAIN_SECTIONS) == []
    for sections in (EVALUATE_SECTIONS, EXPORT_SECTIONS):
        assert differences(before, after, sections) == ["method.router.threshold: 0.5 -> 0.75"]


def test_distillation_may_be_set_after_upscaling_and_makes_another_training() -> None:
    news = {"name": "news", "path": "news.txt", "language": "ko"}
    sources = [news, news | {"name": "old", "role": "replay"}]
    before, after = (
        config(method={"variant": "route", "distillation": {"weight": weight}}, corpus__sources=sources)
        for weight in (0.0, 1.0)
    )
    assert differences(before, after, UPSCALE_SECTIONS) == []
    assert differences(before, after, TRAIN_SECTIONS) == ["method.distillation.weight: 0.0 -> 1.0"]


HELD_OUT = {"name": "old", "path": "old.txt", "language": "en", "role": "retention"}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"train": {"max_steps": 10, "eval_max_documents": 4}}, "train.eval_max_documents"),
        ({"evaluation__perplexity": [HELD_OUT | {"max_documents": 4}]}, "evaluation.perplexity.0.max_documents"),
        ({"evaluation__perplexity": [HELD_OUT | {"path": "moved.txt"}]}, None),
        ({"train": {"max_steps": 10, "eval_every_steps": 4}}, None),
    ],
)
def test_scores_compare_while_the_same_text_is_scored_in_the_same_way(changes: dict[str, Any], key: str | None) -> None:
    before = config(evaluation__perplexity=[HELD_OUT])
    changed = scored_otherwise(before, config(**({"evaluation__perplexity": [HELD_OUT]} | changes)))
    assert [line.partition(": ")[0] for line in changed] == ([] if key is None else [key])
