from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
import yaml
from lm_eval.tasks import TaskManager
from lm_eval.tasks.kobest import utils as kobest

from scale_cli.config.sources import BenchmarkSource
from scale_cli.errors import ConfigError, CorpusError
from scale_cli.evaluation import benchmark_tasks
from scale_cli.evaluation.benchmark_tasks import Benchmark, open_benchmarks
from tests.evaluation.task_files import some_of_blimp, task_of

MEAN = {"aggregation": "mean", "higher_is_better": True}
ACCURACY = [{"metric": "acc", **MEAN}]


def source(name: str, **keys: Any) -> BenchmarkSource:
    return BenchmarkSource.model_validate({"name": name} | keys)


def opened(task: dict[str, Any]) -> Benchmark:
    (benchmark,), skipped = open_benchmarks([BenchmarkSource.model_validate(task)])
    assert skipped == []
    return benchmark


@pytest.fixture
def own_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose YAML files are all the tasks that lm-eval knows (its own take it ten seconds), and no hub."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"question": f"{number} + 1 =", "choices": ["0", str(number + 1)], "answer": 1} for number in range(6)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    manager = TaskManager(include_path=folder, include_defaults=False)
    monkeypatch.setattr(benchmark_tasks, "_hub_answers", lambda: False)
    monkeypatch.setattr(benchmark_tasks, "_all_tasks", lambda: TaskManager(include_path=folder, include_defaults=False))
    assert manager.all_tasks == []
    return folder


def add_task(folder: Path, name: str, **keys: Any) -> None:
    config = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(folder.parent / "sums.jsonl")},
            "cache_dir": str(folder.parent / "cache"),
        },
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": ACCURACY,
    } | keys
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "language", "role"),
    [
        ("arc_easy", "en", "retention"),
        ("kobest", "ko", "acquisition"),
        ("kobest_copa", "ko", "acquisition"),
        ("kmmlu", "ko", "acquisition"),
        ("haerae_history", "ko", "acquisition"),
        ("click", "ko", "acquisition"),
    ],
)
def test_a_suites_name_says_its_language_and_the_config_may_say_otherwise(name: str, language: str, role: str) -> None:
    read = BenchmarkSource.model_validate(name)
    assert (read.language, read.role) == (language, role)
    said = source(name, language="de", role="retention")
    assert (said.language, said.role) == ("de", "retention")


# Lines of the TSVs without their header, and the choices, as the HF card has them.
KOBEST = {"boolq": (1404, 2), "copa": (1000, 2), "hellaswag": (500, 4), "sentineg": (397, 2), "wic": (1260, 2)}


@pytest.mark.parametrize("task", KOBEST)
def test_every_line_of_kobest_is_an_item_and_is_asked_in_lm_evals_own_words(
    shared_data: Path, tmp_path: Path, task: str
) -> None:
    benchmark = opened(task_of(shared_data, tmp_path, f"kobest_{task}"))
    (made,) = benchmark.tasks.values()
    num_items, num_choices = KOBEST[task]
    docs = list(made.test_docs())
    assert len(docs) == num_items and benchmark.reports_macro_f1
    assert {made.doc_to_target(doc) for doc in docs} == set(range(num_choices))
    assert {len(made.doc_to_choice(doc)) for doc in docs} == {num_choices}
    for doc in docs[:5]:
        assert made.doc_to_text(doc) == THEIR_TEXT[task](doc)


# lm-eval's prompts, of its own columns.
THEIR_TEXT: dict[str, Callable[[dict[str, Any]], str]] = {
    "boolq": lambda doc: f"{doc['Text']} 질문: {doc['Question']} 답변: ",
    "copa": lambda doc: kobest.copa_doc_to_text({"premise": doc["sentence"], "question": doc["question"]}),
    "hellaswag": lambda doc: f"문장: {doc['context']}",
    "sentineg": lambda doc: kobest.sentineg_doc_to_text({"sentence": doc["Text"]}),
    "wic": lambda doc: kobest.wic_doc_to_text(
        {"word": doc["Target"], "context_1": doc["SENTENCE1"], "context_2": doc["SENTENCE2"]}
    ),
}


def test_all_of_blimp_is_read_and_nothing_is_written_for_it(shared_data: Path, tmp_path: Path) -> None:
    (task,) = opened(some_of_blimp(shared_data, tmp_path, None)).tasks.values()
    assert len(task.test_docs()) == 67_000
    assert {path.name for path in tmp_path.iterdir()} == {"blimp.yaml", "blimp.jsonl"}


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"doc_to_text": "{{query"}, "unexpected end of template"),
        ({"doc_to_text": "{{question}}"}, "'question' is undefined"),
        ({"dataset_kwargs": {"data_files": {"test": "nowhere.jsonl"}}}, "nowhere.jsonl"),
        ({"dataset_path": "pandas"}, "dataset_path: local files are read, as one of arrow, csv"),
        ({"include": "other.yaml"}, "not a task of lm-eval that stands by itself"),
        ({"dataset_kwargs": {"data_files": {"test": "x"}, "cache_dir": "elsewhere"}}, "cache_dir"),
    ],
)
def test_a_task_that_cannot_be_opened_is_one_line_that_names_its_file(
    shared_data: Path, tmp_path: Path, keys: dict[str, Any], told: str
) -> None:
    task = task_of(shared_data, tmp_path, "arc_easy", **keys)
    with pytest.raises(ConfigError) as caught:
        opened(task)
    message = str(caught.value)
    assert message.startswith(f"{task['path']}: ") and told in message and "\n" not in message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"x: no such file: .*nothing\.yaml"):
        opened({"name": "x", "path": str(tmp_path / "nothing.yaml"), "language": "en"})


def test_a_task_whose_data_is_not_there_is_one_line_at_once_and_the_rest_are_opened(
    own_tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_task(own_tasks, "sums")
    add_task(own_tasks, "far", dataset_path="nobody/has-this-dataset", dataset_kwargs={})
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("retries"))
    benchmarks, skipped = open_benchmarks([source("far"), source("sums")])
    assert [benchmark.name for benchmark in benchmarks] == ["sums"]
    (line,) = skipped
    assert line.name == "far"
    assert line.reason.startswith("its data is not here, and the hub cannot be reached (")
    assert "nobody/has-this-dataset" in line.reason and "\n" not in line.reason
    assert not huggingface_hub.constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE


def test_a_task_that_neither_chooses_nor_generates_is_skipped(own_tasks: Path) -> None:
    exact = [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}]
    add_task(own_tasks, "reads", output_type="loglikelihood", doc_to_target="{{answer}}", metric_list=exact)
    benchmarks, (line,) = open_benchmarks([source("reads")])
    assert benchmarks == []
    assert (
        line.reason == "only multiple choice and generate_until are measured, one at a time, and this is loglikelihood"
    )


def test_the_tasks_of_a_group_are_one_benchmark_unless_they_have_a_macro_f1(own_tasks: Path) -> None:
    f1 = {"metric": "f1", "aggregation": "macro_f1", "hf_evaluate": True, "higher_is_better": True}
    for name in ("sums_a", "sums_b"):
        add_task(own_tasks, name)
        add_task(own_tasks, f"f1_{name}", metric_list=[*ACCURACY, f1])
        text = (own_tasks / f"f1_{name}.yaml").read_text(encoding="utf-8")
        macro = "!function lm_eval.tasks.kobest.utils.macro_f1_score"
        (own_tasks / f"f1_{name}.yaml").write_text(text.replace("aggregation: macro_f1", f"aggregation: {macro}"))
    for group, tasks in (("sums", ["sums_a", "sums_b"]), ("f1_sums", ["f1_sums_a", "f1_sums_b"])):
        (own_tasks / f"{group}.yaml").write_text(yaml.safe_dump({"group": group, "task": tasks}), encoding="utf-8")
    benchmarks, skipped = open_benchmarks([source("sums", limit=2), source("f1_sums")])
    assert skipped == []
    assert [(b.name, list(b.tasks), b.reports_macro_f1) for b in benchmarks] == [
        ("sums", ["sums_a", "sums_b"], False),
        ("f1_sums_a", ["f1_sums_a"], True),
        ("f1_sums_b", ["f1_sums_b"], True),
    ]
    with pytest.raises(ConfigError, match="f1_sums_a is named twice"):
        open_benchmarks([source("f1_sums"), source("f1_sums_a")])


def test_a_name_that_lm_eval_does_not_know_is_an_error_with_a_suggestion(own_tasks: Path) -> None:
    add_task(own_tasks, "sums")
    with pytest.raises(ConfigError, match=r"no task 'sumz' \(did you mean sums\?\)"):
        open_benchmarks([source("sumz")])


def test_few_shot_examples_are_asked_for_as_in_lm_eval(own_tasks: Path) -> None:
    add_task(own_tasks, "sums")
    add_task(own_tasks, "never", num_fewshot=0)
    benchmarks, _ = open_benchmarks([source("sums", num_fewshot=2), source("never", num_fewshot=2)])
    sums, never = (next(iter(benchmark.tasks.values())) for benchmark in benchmarks)
    assert (sums.get_config("num_fewshot"), never.get_config("num_fewshot")) == (2, 0)
    asked = []
    for _ in range(2):
        benchmarks[0].seed_examples()
        sums.build_all_requests()
        asked.append([request.args for request in sums.instances])
    assert asked[0] == asked[1], "every head is asked the same"
    assert asked[0][0][0].count("+ 1 =") == 3
