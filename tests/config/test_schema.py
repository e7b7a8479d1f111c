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
from tests.small_runs import EVALUATED, SMALLEST, load_text

NEWS, TALES = (
    "{name: news, path: news.txt, language: ko}",
    "{name: tales, path: news.txt, language: ko}",
)
ALL = {
    "upscale": UPSCALE_SECTIONS,
    "train": TRAIN_SECTIONS,
    "evaluate": EVALUATE_SECTIONS,
    "export": EXPORT_SECTIONS,
}
TRAINED, RESULTS = ("train", "evaluate", "export"), ("evaluate", "export")


@pytest.mark.parametrize(
    ("override", "of"),
    [
        ("output_dir=elsewhere", ()),
        ("train.micro_batch_size=4", ()),
        ("train.trackers=[tensorboard]", ()),
        ("seed=1", (*ALL,)),
        ("method.collaboration.layers=[]", (*ALL,)),
        ("method.router.threshold=0.75", RESULTS),
        ("corpus.sequence_length=4", TRAINED),
        ("train.max_steps=11", TRAINED),
        ("evaluation.batch_size=1", ("evaluate",)),
        ("export.format=adapter", ("export",)),
    ],
)
def test_a_change_makes_another_run_of_the_verbs_whose_results_hang_on_it(
    override: str, of: tuple[str, ...]
) -> None:
    before, after = load_text(EVALUATED), load_text(EVALUATED, override)
    found = {verb: differences(before, after, sections) for verb, sections in ALL.items()}
    assert tuple(verb for verb, lines in found.items() if lines) == of
    assert all(
        line.startswith(override.partition("=")[0]) for lines in found.values() for line in lines
    )


def test_a_source_more_makes_another_training_and_is_named_alone() -> None:
    before, after = (
        load_text(SMALLEST, f"corpus.sources=[{sources}]") for sources in (NEWS, f"{NEWS}, {TALES}")
    )
    assert differences(before, after, UPSCALE_SECTIONS) == []
    named = {".".join(line.split(".")[:3]) for line in differences(before, after, TRAIN_SECTIONS)}
    assert named == {"corpus.sources.1"}


def test_distillation_may_be_set_after_upscaling_and_makes_another_training() -> None:
    replay = f"corpus.sources=[{NEWS}, {{name: b, path: b.txt, language: ko, role: replay}}]"
    before, after = (
        load_text(EVALUATED, f"method.distillation.weight={weight}", replay)
        for weight in (0.0, 1.0)
    )
    assert differences(before, after, UPSCALE_SECTIONS) == []
    assert differences(before, after, TRAIN_SECTIONS) == ["method.distillation.weight: 0.0 -> 1.0"]


def reachable(kind: Any) -> Iterator[type[Section]]:
    """Yield every section in an annotation, those in lists and unions too, and in its own fields."""
    if isinstance(kind, type) and issubclass(kind, Section):
        yield kind
    of_fields = (
        [field.annotation for field in kind.model_fields.values()]
        if hasattr(kind, "model_fields")
        else []
    )
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
    assert len(marked) == len(acting) > 0, (
        "one stands where `_marked` does not look, in a list or an optional section"
    )


def test_text_may_lie_elsewhere_whether_it_is_given_by_one_pattern_or_several() -> None:
    paths = ("a/*.txt", "[a/1.txt, a/2.txt]", "[b/1.txt]")
    one, several, moved = (load_text(SMALLEST, f"corpus.sources.0.path={path}") for path in paths)
    for now in (several, moved):
        assert differences(one, now, TRAIN_SECTIONS) != []
        assert differences(several, now, TRAIN_SECTIONS, LOCATION_KEYS) == []
        assert differences(one, now, TRAIN_SECTIONS, LOCATION_KEYS) == []


@pytest.mark.parametrize(
    ("override", "compares"),
    [
        ("train.eval_max_tokens=4", False),
        ("evaluation.perplexity.0.max_documents=4", False),
        ("evaluation.perplexity.0.path=moved.txt", True),
        ("train.save_every_steps=4", True),
    ],
)
def test_scores_compare_while_the_same_text_is_scored_in_the_same_way(
    override: str, compares: bool
) -> None:
    every = "train.eval_every_steps=2"
    changed = scored_otherwise(load_text(EVALUATED, every), load_text(EVALUATED, every, override))
    assert [line.partition(": ")[0] for line in changed] == (
        [] if compares else [override.partition("=")[0]]
    )


def test_scores_do_not_compare_where_evaluations_come_at_other_steps_and_so_read_more() -> None:
    seldom, often = (
        load_text(EVALUATED, f"train.eval_every_steps={steps}") for steps in (10**6, 10**5)
    )
    (line,) = scored_otherwise(seldom, often)
    assert line == f"train.eval_max_tokens: {seldom.eval_tokens} -> {often.eval_tokens}"


def test_evaluations_while_training_read_a_tenth_of_what_was_trained_on_or_what_is_asked() -> None:
    held_out = "evaluation.perplexity=[{name: a, path: x.txt, language: en, role: retention}]"
    sizes = ("corpus.sequence_length=32", "train.global_batch_size=8", held_out)
    assert load_text(SMALLEST, *sizes).eval_tokens == 0
    assert load_text(SMALLEST, *sizes, "train.eval_every_steps=100").eval_tokens == 2_560
    assert load_text(SMALLEST, *sizes, "train.eval_every_steps=1").eval_tokens == 32
    asked = load_text(SMALLEST, *sizes, "train.eval_every_steps=1", "train.eval_max_tokens=7")
    assert asked.eval_tokens == 7
