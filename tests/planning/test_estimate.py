"""The estimate of a run counts the tokens that evaluations and the comparison of exports read."""

from pathlib import Path
from typing import Any

import pytest

from scale_cli.commands.export import _prompts
from scale_cli.data.corpora import open_sources
from scale_cli.evaluation.scoring import beginnings, num_tokens_read
from scale_cli.planning.beginnings import HeldOut, held_out_texts, tokenizer_at_hand
from scale_cli.planning.device import Device
from scale_cli.planning.estimate import Estimate, count_evaluated, estimate
from scale_cli.planning.step import step_cost
from scale_cli.runs.folder import RunFolder
from scale_cli.runs.opened import Run
from scale_cli.upscale.base import load_base_config
from tests.small_runs import held_out, small_run


@pytest.mark.parametrize(
    "keys",
    [{}, {"max_documents": 7}, {"skip_documents": 20}, {"skip_documents": 3, "max_documents": 400}],
)
@pytest.mark.parametrize("max_tokens", [None, 300])
def test_evaluations_are_counted_as_they_read(
    keys: dict[str, Any], max_tokens: int | None, shared_data: Path, tmp_path: Path
) -> None:
    train = {"max_steps": 10, "eval_every_steps": 3, "eval_max_tokens": max_tokens}
    text = shared_data / "ko-petitions/valid.txt.xz"
    config = small_run(
        tmp_path,
        shared_data / "ckpt-eltec/hf",
        train=train,
        corpus={"sequence_length": 128},
        evaluation={"perplexity": [held_out("a", text, **keys), held_out("b", text)]},
    )
    (length, num_texts) = (128, 2)
    corpora = open_sources(config, config.evaluation.perplexity, Run(config).tokenizer)
    of_each = config.eval_tokens // num_texts
    positions = Run(config).base_config.max_position_embeddings
    read = sum(num_tokens_read(corpus, positions) for corpus in corpora)
    read += 3 * sum(int(beginnings(corpus, length, of_each).sum()) for corpus in corpora)
    texts = held_out_texts(config, tokenizer_at_hand(config.model), positions)
    num_tokens, num_samples = count_evaluated(config, texts)
    assert num_tokens == pytest.approx(read, rel=0.1)
    assert num_samples == 3  # one language, three times

    assert [text.role for text in texts] == [of.role for of in config.evaluation.perplexity]
    compared = sum(ids.numel() for ids in _prompts(config, Run(config).tokenizer))
    assert sum(text.num_compared for text in texts) == pytest.approx(compared, rel=0.15)


@pytest.mark.parametrize(
    ("variant", "formats", "num_ways"),
    [("preserve", ["plain"], 1), ("route", ["plain"], 2), ("route", ["plain", "adapter"], 3)],
)
def test_every_way_to_load_an_export_is_compared_on_its_tokens(
    variant: str, formats: list[str], num_ways: int, shared_data: Path, tmp_path: Path
) -> None:
    base = shared_data / "ckpt-eltec/hf"
    config = small_run(tmp_path, base, method={"variant": variant}, export={"format": formats})
    step = step_cost(load_base_config(config.model), config.method)

    def estimated(*texts: HeldOut) -> Estimate:
        return estimate(config, step, Device("cpu", 1e9, "stated"), texts)

    text = HeldOut(role="retention", num_tokens=0, num_in_windows=0, num_compared=100)
    takes = estimated(text)
    pass_s = 1 / takes.scored_per_s
    assert takes.export_s == pytest.approx(num_ways * 4 * 100 * pass_s)
    assert takes.total_s - estimated().total_s == pytest.approx(takes.export_s)


def test_what_an_export_keeps_is_read_by_all_that_are_compared_in_float32(
    shared_data: Path, tmp_path: Path
) -> None:
    config = small_run(tmp_path, shared_data / "ckpt-eltec/hf", method={"variant": "route"})
    in_bfloat16 = config.train.model_copy(update={"mixed_precision": "bf16"})
    step = step_cost(load_base_config(config.model), config.method)
    learned = HeldOut(role="acquisition", num_tokens=9_999, num_in_windows=0, num_compared=0)
    few = HeldOut(role="acquisition", num_tokens=50, num_in_windows=0, num_compared=0)
    retained = HeldOut(role="retention", num_tokens=70, num_in_windows=0, num_compared=0)
    for run, times in (
        (config, 1),
        (config.model_copy(update={"train": in_bfloat16}), 2),
    ):
        takes = estimate(run, step, Device("cpu", 1e9, "stated"), [learned, few, retained])
        read = takes.export_s * takes.scored_per_s
        # by the base, the run and both ways to load it; and by the run's base head and the export's
        assert read == pytest.approx(times * (4 * (4096 // 2 + 50) + 2 * 70))


def test_the_search_for_the_rate_is_counted_once(shared_data: Path, tmp_path: Path) -> None:
    train = {"max_steps": 40, "global_batch_size": 8}
    config = small_run(tmp_path, shared_data / "ckpt-eltec/hf", train=train)
    step = step_cost(load_base_config(config.model), config.method)

    def training_s(lr: float | str, **how: bool) -> float:
        told = config.model_copy(update={"train": config.train.model_copy(update={"lr": lr})})
        return estimate(told, step, Device("cpu", 1e9, "stated"), [], **how).training_s

    assert training_s("auto", searches=False) == training_s(1e-3)
    of_a_step = training_s(1e-3) / 40
    assert training_s("auto") == pytest.approx((40 + 24) * of_a_step)
    RunFolder(config.output_dir).checkpoint(4).mkdir(parents=True)
    assert training_s("auto") == pytest.approx(36 * of_a_step)


def test_a_run_that_goes_on_is_estimated_by_what_is_left_of_it(
    shared_data: Path, tmp_path: Path
) -> None:
    """Steps, evaluations and exports that are done take no time again, and the words say so."""
    base = shared_data / "ckpt-eltec/hf"
    train = {"max_steps": 10, "eval_every_steps": 4, "lr": 1e-3}
    config = small_run(
        tmp_path,
        base,
        train=train,
        evaluation={"perplexity": [held_out("old", tmp_path / "old.txt")]},
        export={"format": ["plain"]},
    )
    folder = RunFolder(config.output_dir)
    step = step_cost(load_base_config(config.model), config.method)
    text = HeldOut(role="retention", num_tokens=70, num_in_windows=4, num_compared=20)

    def left() -> Estimate:
        return estimate(config, step, Device("cpu", 1e9, "stated"), [text])

    whole = left()
    assert " left," not in whole.in_words() and whole.evaluated_tokens == 2 * 4 + 70
    folder.checkpoint(4).mkdir(parents=True)
    resumed = left()
    assert resumed.training_s == pytest.approx(0.6 * whole.training_s)
    assert resumed.evaluated_tokens == 4 + 70 and resumed.evaluation_s < whole.evaluation_s
    assert " left, after step 4 of 10: " in resumed.in_words()
    assert resumed.export_s == whole.export_s > 0

    folder.checkpoint(4).rmdir()
    folder.final.mkdir()
    assert left().training_s == 0.0 and left().evaluated_tokens == 70
    folder.evaluation.mkdir()
    folder.export("plain").mkdir(parents=True)
    assert left().total_s == 0.0
