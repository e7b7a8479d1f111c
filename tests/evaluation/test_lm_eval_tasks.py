from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lm_eval.tasks.kobest import utils as kobest

from scale_cli.config.sources import BenchmarkSource
from scale_cli.errors import ConfigError, CorpusError
from scale_cli.evaluation.lm_eval_heads import open_benchmarks
from tests.evaluation.task_files import MEAN, add_task, know_only, opened, task_of

SUMS = [
    {"question": f"{number} + 1 =", "choices": ["0", str(number + 1)], "answer": 1}
    for number in range(6)
]


def source(name: str, **keys: Any) -> BenchmarkSource:
    return BenchmarkSource.model_validate({"name": name} | keys)


@pytest.fixture
def own_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    know_only(tmp_path, monkeypatch)
    return tmp_path


# Lines of the TSVs and the choices, as the HF card has them; lm-eval's own prompts.
KOBEST: dict[str, tuple[int, int, Callable[[dict[str, Any]], str]]] = {
    "boolq": (1404, 2, lambda doc: f"{doc['Text']} 질문: {doc['Question']} 답변: "),
    "hellaswag": (500, 4, lambda doc: f"문장: {doc['context']}"),
    "sentineg": (397, 2, lambda doc: kobest.sentineg_doc_to_text({"sentence": doc["Text"]})),
}


@pytest.mark.parametrize("task", KOBEST)
def test_every_line_of_kobest_is_an_item_and_is_asked_in_lm_evals_own_words(
    shared_data: Path, tmp_path: Path, task: str
) -> None:
    benchmark = opened(task_of(shared_data, tmp_path, f"kobest_{task}"))
    (made,) = benchmark.tasks.values()
    num_items, num_choices, their_text = KOBEST[task]
    docs = list(made.test_docs())
    assert len(docs) == num_items
    assert made.aggregation()["f1"]([(0, 0), (1, 0)]) == pytest.approx(1 / 3), "macro-F1"
    assert {made.doc_to_target(doc) for doc in docs} == set(range(num_choices))
    assert {len(made.doc_to_choice(doc)) for doc in docs} == {num_choices}
    for doc in docs[:5]:
        assert made.doc_to_text(doc) == their_text(doc)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"doc_to_text": "{{query"}, "unexpected end of template"),
        ({"doc_to_text": "{{question}}"}, "'question' is undefined"),
        ({"dataset_kwargs": {"data_files": {"test": "nowhere.jsonl"}}}, "nowhere.jsonl"),
        ({"include": "other.yaml"}, "other.yaml"),
        ({"task": None}, "not a registered task"),
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


def test_a_file_that_is_not_trusted_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "utils.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nsaid = str")
    path = tmp_path / "evil.yaml"
    path.write_text("task: evil\ndoc_to_text: !function utils.said\n")
    asked = [source("evil", path=str(path), language="en")]
    with pytest.raises(ConfigError, match=r"evil\.yaml may run code; .* --trust-tasks"):
        open_benchmarks(asked, trust_tasks=False)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ConfigError, match=r"evil\.yaml: "):
        open_benchmarks(asked, trust_tasks=True)
    assert (tmp_path / "ran").exists()


def test_a_name_or_a_file_that_is_not_there_is_named(own_tasks: Path) -> None:
    with pytest.raises(CorpusError, match=r"x: no such file: .*nothing\.yaml"):
        opened({"name": "x", "path": str(own_tasks / "nothing.yaml"), "language": "en"})
    with pytest.raises(ConfigError, match="no task 'sumz'"):
        opened("sumz")


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (
            {"dataset_path": "nobody/has-this-dataset", "dataset_kwargs": {}},
            "nobody/has-this-dataset",
        ),
        (
            {"output_type": "loglikelihood_rolling"},
            "only multiple_choice and generate_until are measured",
        ),
        ({"unsafe_code": True}, "it runs code that the model writes"),
        (
            {"output_type": "generate_until", "metric_list": [{"metric": "of_the_hub", **MEAN}]},
            "of_the_hub",
        ),
    ],
)
def test_a_task_that_cannot_be_measured_is_one_line_and_the_rest_are_opened(
    own_tasks: Path, keys: dict[str, Any], reason: str
) -> None:
    add_task(own_tasks, "sums", SUMS)
    add_task(own_tasks, "odd", SUMS, **keys)
    found = open_benchmarks([source("odd"), source("sums")], trust_tasks=False)
    assert [benchmark.source.name for benchmark in found.ready] == ["sums"]
    (line,) = found.skipped
    assert line.name == "odd" and reason in line.reason and "\n" not in line.reason


def test_the_tasks_of_a_group_are_one_benchmark(own_tasks: Path) -> None:
    for name in ("sums_a", "sums_b"):
        add_task(own_tasks, name, SUMS)
    group = {"group": "sums", "task": ["sums_a", "sums_b"]}
    (own_tasks / "sums.yaml").write_text(yaml.safe_dump(group), encoding="utf-8")
    (benchmark,) = open_benchmarks([source("sums", limit=2)], trust_tasks=False).ready
    assert (list(benchmark.tasks), benchmark.num_items) == (["sums_a", "sums_b"], 4)


def test_as_many_few_shot_examples_are_shown_as_by_lm_eval(own_tasks: Path) -> None:
    add_task(own_tasks, "sums", SUMS)
    add_task(own_tasks, "never", SUMS, num_fewshot=0)
    shown = {}
    for benchmark in open_benchmarks(
        [source("sums", num_fewshot=2), source("never", num_fewshot=2)], trust_tasks=False
    ).ready:
        (task,) = benchmark.tasks.values()
        task.build_all_requests()
        shown[benchmark.source.name] = task.instances[0].args[0].count("+ 1 =") - 1
    assert shown == {"sums": 2, "never": 0}
