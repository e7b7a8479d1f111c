"""Generative tasks of lm-eval: what a head answers, and its marks, are lm-eval's own of that head's model alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from scale_cli.config.schema import ModelConfig
from scale_cli.config.sources import BenchmarkSource
from scale_cli.errors import RunError
from scale_cli.evaluation import benchmark_tasks
from scale_cli.evaluation.benchmark_heads import ObservedHeads
from scale_cli.evaluation.benchmark_summary import BenchmarkItems, Item, summarise_benchmarks
from scale_cli.evaluation.benchmark_tasks import Benchmark, open_benchmarks
from scale_cli.evaluation.benchmarks import measure_items
from scale_cli.evaluation.render import markdown, terminal_lines
from scale_cli.evaluation.results import HEADS, Report
from scale_cli.methods.widened import RouterConfig
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.processes import ALONE, Share
from scale_cli.upscale.tokenizer import load_tokenizer
from tests.evaluation.test_render import ROUTE
from tests.threads_as_processes import in_processes
from tests.widening import as_if_trained, real_base, widen

MEAN = {"aggregation": "mean", "higher_is_better": True}
STORIES = [
    ("Once upon a time, there was a little", "girl named Lily. She loved to play"),
    ("Tom had a big red", "ball. He liked to play"),
    ("One day,", "a little girl named Lily went to the park."),
    ("The dog ran to the", "park."),
    ("Mom said,", '"I am sorry,'),
]


@pytest.fixture
def make_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"begun": begun, "ended": ended} for begun, ended in STORIES]
    (tmp_path / "stories.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    monkeypatch.setattr(benchmark_tasks, "_hub_answers", lambda: False)
    monkeypatch.setattr(benchmark_tasks, "_all_tasks", lambda: TaskManager(include_path=folder, include_defaults=False))

    def make(**keys: Any) -> tuple[list[Benchmark], list[Any]]:
        config = {
            "task": "endings",
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {"test": str(tmp_path / "stories.jsonl")},
                "cache_dir": str(tmp_path / "cache"),
            },
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": "{{begun}}",
            "doc_to_target": "{{ended}}",
            "generation_kwargs": {"until": ["\n", " and", ". "], "max_gen_toks": 24, "do_sample": False},
            "filter_list": [
                {"name": "first-words", "filter": [{"function": "regex", "regex_pattern": r"^\s*(\S+ \S+)"}]},
                {"name": "whole", "filter": [{"function": "take_first"}]},
            ],
            "metric_list": [
                {"metric": "exact_match", **MEAN, "ignore_case": True, "ignore_punctuation": True},
                {"metric": "bleu", "aggregation": "bleu", "higher_is_better": True},
            ],
        } | keys
        (folder / "endings.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        return open_benchmarks([BenchmarkSource.model_validate("endings")])

    return make


@pytest.fixture(scope="module")
def model(shared_data: Path) -> ScaleForCausalLM:
    return as_if_trained(widen(real_base(shared_data, "ckpt-stories260K"), "route", "top:1"), std=0.15)


def answering(model: ScaleForCausalLM, shared_data: Path, max_length: int = 128, share: Share = ALONE) -> ObservedHeads:
    tokenizer = load_tokenizer(ModelConfig(base=str(shared_data / "ckpt-stories260K" / "hf")))
    settings: dict[str, Any] = {"max_length": max_length, "batch_size": 2, "mixed_precision": "no", "share": share}
    return ObservedHeads(model, tokenizer, RouterConfig(), **settings)


def texts(items: list[Item], head: str) -> list[int | str]:
    return [item.heads[head].prediction for item in items]


def test_answers_and_marks_are_lm_evals_own_of_each_heads_model(
    make_task: Any, model: ScaleForCausalLM, shared_data: Path
) -> None:
    """The base, and the model as it serves, each by lm-eval's `hf` model as if nobody had heard of heads."""
    (benchmark,), skipped = make_task()
    assert skipped == []
    items = measure_items(benchmark, answering(model, shared_data))
    tasks = benchmark.tasks
    served: Any = model
    for head, alone in (("base", served.base), ("posterior", served)):
        tokenizer = load_tokenizer(ModelConfig(base=str(shared_data / "ckpt-stories260K" / "hf")))
        theirs = HFLM(alone, backend="causal", tokenizer=tokenizer, max_length=128, batch_size=2)
        found = evaluate(theirs, {"tasks": tasks}, bootstrap_iters=0)
        logged = [sample for sample in found["samples"]["endings"] if sample["filter"] == "whole"]
        assert texts(items, head) == [sample["resps"][0][0] for sample in logged]
        for kept in ("first-words", "whole"):
            mean = np.mean([item.heads[head].metrics[f"exact_match, {kept}"] for item in items])
            assert mean == pytest.approx(found["results"]["endings"][f"exact_match,{kept}"])
    assert len({tuple(texts(items, head)) for head in HEADS}) > 1, "heads that differ"
    assert all(len(outcome.metrics) == 2 for item in items for outcome in item.heads.values()), "bleu is no mean"
    assert not any(stop in str(text) for text in texts(items, "base") for stop in ("\n", " and", ". "))


def test_the_answers_do_not_hang_on_how_many_processes_share_the_requests(
    make_task: Any, model: ScaleForCausalLM, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (benchmark,), _ = make_task(generation_kwargs={"until": ["."], "max_gen_toks": 6, "do_sample": False})
    (task,) = benchmark.tasks.values()
    task.build_all_requests()
    requests = [request for request in task.instances for _ in range(2)]  # as of a task that repeats them

    def answered(share: Share) -> list[str]:
        answers = answering(model, shared_data, share=share)
        answers.generate(requests)
        answers.head = "base"
        return answers.generate_until(requests)

    alone = answered(ALONE)
    assert len(alone) == 2 * len(STORIES) and any(alone)
    assert in_processes(monkeypatch, 4, answered) == [alone] * 4


def test_the_report_judges_by_the_first_metric_and_shows_all(
    make_task: Any, model: ScaleForCausalLM, shared_data: Path
) -> None:
    (benchmark,), _ = make_task()
    items = measure_items(benchmark, answering(model, shared_data), max_items=3)
    assert len(items) == 3
    measured = [BenchmarkItems(benchmark.name, benchmark.source, items, benchmark.reports_macro_f1)]
    results, averages = summarise_benchmarks(measured, num_resamples=200, seed=0)
    assert results[0].judged_by == "exact_match, first-words"
    report = Report("route", "posterior", 3, 384, "0" * 64, [], results, averages)
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report
    page = markdown(report, ROUTE, None)
    assert "| endings | 3 | exact_match, first-words |" in page.replace("\\", "")
    assert any("exact_match, whole" in line for line in terminal_lines(report))
    assert json.loads(items[0].to_json_line())["heads"]["base"]["prediction"] == texts(items, "base")[0]


def test_what_cannot_be_measured_is_one_line(make_task: Any, model: ScaleForCausalLM, shared_data: Path) -> None:
    _, (skipped,) = make_task(unsafe_code=True)
    assert skipped.reason == "it runs code that the model has written"
    _, (skipped,) = make_task(output_type="loglikelihood_rolling")
    assert skipped.reason.startswith("only multiple choice and generate_until are measured")
    _, (skipped,) = make_task(metric_list=[{"metric": "of_the_hub", **MEAN}])
    assert "of_the_hub" in skipped.reason
    (benchmark,), _ = make_task(metric_list=[{"metric": "bleu", "aggregation": "bleu", "higher_is_better": True}])
    with pytest.raises(RunError, match=r"^lm-eval reports nothing by which an item is right or wrong$"):
        measure_items(benchmark, answering(model, shared_data))
    (benchmark,), _ = make_task()
    with pytest.raises(RunError, match=r"^answers of 24 tokens are asked of a model that reads 24$"):
        measure_items(benchmark, answering(model, shared_data, max_length=24))
