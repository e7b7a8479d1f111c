from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest

from scale_cli.config.schema import (
    ACCEPTABLE,
    EVALUATE_SECTIONS,
    EXPORT_SECTIONS,
    FREE,
    LOCATION_KEYS,
    TRAIN_SECTIONS,
    UPSCALE_SECTIONS,
    RunConfig,
    differences,
    scored_otherwise,
)
from scale_cli.values import Change, Section

NEWS = {"name": "news", "path": "news.txt", "language": "ko"}
HELD_OUT = {"name": "old", "path": "old.txt", "language": "en", "role": "retention"}


def config(**changes: Any) -> RunConfig:
    """Return a small config with other values of some keys, `train__lr`."""
    tree: dict[str, Any] = {
        "output_dir": "runs/x",
        "model": {"base": "some/model"},
        "method": {"variant": "route"},
        "corpus": {"sources": [NEWS]},
        "train": {"max_steps": 10},
        "evaluation": {"perplexity": [HELD_OUT]},
        "export": {},
    }
    for key, value in changes.items():
        section, _, field = key.partition("__")
        tree[section] = tree[section] | {field: value} if field else value
    return RunConfig.model_validate(tree)


ALL = {"upscale": UPSCALE_SECTIONS, "train": TRAIN_SECTIONS, "evaluate": EVALUATE_SECTIONS, "export": EXPORT_SECTIONS}
TRAINED, RESULTS = ("train", "evaluate", "export"), ("evaluate", "export")


@pytest.mark.parametrize(
    ("changes", "key", "of"),
    [
        ({"output_dir": "elsewhere"}, None, ()),
        ({"train__micro_batch_size": 4}, None, ()),
        ({"train__trackers": ["tensorboard"]}, None, ()),
        ({"seed": 1}, "seed", (*ALL,)),
        ({"method__collaboration": {"layers": []}}, "method.collaboration.layers", (*ALL,)),
        ({"method__router": {"threshold": 0.75}}, "method.router.threshold", RESULTS),
        ({"corpus__sequence_length": 4}, "corpus.sequence_length", TRAINED),
        ({"corpus__sources": [NEWS, NEWS | {"name": "tales"}]}, "corpus.sources.1", TRAINED),
        ({"train__max_steps": 11}, "train.max_steps", TRAINED),
        ({"evaluation__batch_size": 1}, "evaluation.batch_size", ("evaluate",)),
        ({"export__format": "adapter"}, "export.format", ("export",)),
    ],
)
def test_a_change_makes_another_run_of_the_verbs_whose_results_hang_on_it(
    changes: dict[str, Any], key: str | None, of: tuple[str, ...]
) -> None:
    found = {verb: differences(config(), config(**changes), sections) for verb, sections in ALL.items()}
    assert tuple(verb for verb, lines in found.items() if lines) == of
    assert all(key is not None and line.startswith(key) for lines in found.values() for line in lines)


def test_distillation_may_be_set_after_upscaling_and_makes_another_training() -> None:
    before, after = (
        config(method__distillation={"weight": weight}, corpus__sources=[NEWS, NEWS | {"name": "b", "role": "replay"}])
        for weight in (0.0, 1.0)
    )
    assert differences(before, after, UPSCALE_SECTIONS) == []
    assert differences(before, after, TRAIN_SECTIONS) == ["method.distillation.weight: 0.0 -> 1.0"]


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
    one, several, moved = (
        config(corpus__sources=[NEWS | {"path": path}]) for path in ("a/*.txt", ["a/1.txt", "a/2.txt"], ["b/1.txt"])
    )
    for now in (several, moved):
        assert differences(one, now, TRAIN_SECTIONS) != []
        assert differences(several, now, TRAIN_SECTIONS, LOCATION_KEYS) == []
        assert differences(one, now, TRAIN_SECTIONS, LOCATION_KEYS) == []


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"train__eval_max_documents": 4}, "train.eval_max_documents"),
        ({"evaluation__perplexity": [HELD_OUT | {"max_documents": 4}]}, "evaluation.perplexity.0.max_documents"),
        ({"evaluation__perplexity": [HELD_OUT | {"path": "moved.txt"}]}, None),
        ({"train__eval_every_steps": 4}, None),
    ],
)
def test_scores_compare_while_the_same_text_is_scored_in_the_same_way(changes: dict[str, Any], key: str | None) -> None:
    changed = scored_otherwise(config(), config(**changes))
    assert [line.partition(": ")[0] for line in changed] == ([] if key is None else [key])
