from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scale_cli.config.sources import BenchmarkSource
from scale_cli.errors import CorpusError
from scale_cli.evaluation.benchmark_files import LocalItems, read_items


def read(path: Path | str, **keys: Any) -> LocalItems:
    return read_items(BenchmarkSource.model_validate({"name": "x", "path": str(path), "language": "en"} | keys))


def error_of(path: Path, content: str) -> str:
    path.write_bytes(content.encode())
    with pytest.raises(CorpusError) as caught:
        read(path)
    return str(caught.value)


# Lines of the TSVs without their header, as `wc` and the HF card have them.
KOBEST = {"BoolQ": (1404, 2), "COPA": (1000, 2), "HellaSwag": (500, 4), "SentiNeg": (397, 2), "WiC": (1260, 2)}


@pytest.mark.parametrize("task", KOBEST)
@pytest.mark.parametrize("split", ["dev", "test"])
def test_every_line_of_kobest_is_an_item(shared_data: Path, task: str, split: str) -> None:
    file = shared_data / "eval-kobest" / task / f"{split}.tsv"
    items = read(file)
    assert items.task == f"kobest_{task.lower()}"
    num_lines = len([line for line in file.read_bytes().split(b"\n") if line.strip()])
    assert len(items.rows) == len(items.files) == num_lines - 1
    num_items, num_classes = KOBEST[task]
    assert split == "dev" or len(items.rows) == num_items
    assert {row["label"] for row in items.rows} == set(range(num_classes))


def test_quotation_marks_in_a_tsv_quote_nothing(tmp_path: Path) -> None:
    file = tmp_path / "mc.tsv"
    file.write_text('query\tchoice1\tchoice2\tgold\n"He said\t"yes\tno"\t1\n', encoding="utf-8")
    assert read(file).rows == [{"query": '"He said', "choices": ['"yes', 'no"'], "gold": 1}]


def test_blimp_is_read_from_its_zip_paradigm_by_paradigm(shared_data: Path) -> None:
    items = read(shared_data / "eval-blimp" / "BLiMP.zip", limit=3)
    assert items.task == "minimal_pairs"
    assert len(set(items.files)) == 67 and len(items.rows) == 67 * 3
    assert items.files[:3] == ["adjunct_island"] * 3
    assert all(row["sentence_good"] != row["sentence_bad"] for row in items.rows)


def test_a_glob_is_read_file_by_file(tmp_path: Path) -> None:
    for name in ("b", "a"):
        pair = {"sentence_good": f"{name} is", "sentence_bad": f"{name} are", "UID": name}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(pair) + "\n\n", encoding="utf-8")
    assert read(tmp_path / "*.jsonl").files == ["a", "b"]


def test_arc_easy_is_multiple_choice(shared_data: Path) -> None:
    items = read(shared_data / "eval-arc-easy" / "arc_easy.jsonl")
    assert items.task == "multiple_choice"
    assert len(items.rows) == 2376
    assert {len(row["choices"]) for row in items.rows} <= {3, 4, 5}


def test_a_separator_within_a_json_string_does_not_end_a_line(tmp_path: Path) -> None:
    pair = {"sentence_good": "one\u2028line", "sentence_bad": "two\x85lines"}
    (tmp_path / "x.jsonl").write_text(json.dumps(pair, ensure_ascii=False), encoding="utf-8")
    assert read(tmp_path / "x.jsonl").rows == [pair]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.jsonl", '{"sentence_good": "a", "sentence_bad": "b"}\n{"sentence_good": "a"}', "x.jsonl:2: .*sentence_bad"),
        ("x.jsonl", '{"sentence_good": "a", "sentence_bad": " "}', "x.jsonl:1: .*is no text"),
        ("x.jsonl", '{"query": "q", "choices": ["a", "b"], "gold": 2}', "x.jsonl:1: .*2 is not one of 0 to 1"),
        ("x.jsonl", '{"query": "q", "choices": ["a", "b"], "gold": 0.7}', "x.jsonl:1: .*0.7 is not one of 0 to 1"),
        ("x.jsonl", '{"query": "q", "choices": ["a"], "gold": 0}', "x.jsonl:1: .*at least two"),
        ("x.jsonl", "{nonsense", "x.jsonl:1: not JSON"),
        ("x.jsonl", "[1]", "x.jsonl:1: not a JSON object"),
        ("x.jsonl", '{"text": "a"}', r"x.jsonl:1: neither minimal pairs .*\(it has: text\)"),
        ("x.jsonl", "\n", "no item"),
        ("x.tsv", "query\tchoice1\tchoice2\tgold\nq\ta\tb\n", "x.tsv:2: not as many columns"),
        ("x.tsv", "query\tchoice1\tchoice2\tgold\nq\ta\tb\t1\t2\n", "x.tsv:2: not as many columns"),
        ("x.tsv", "query\tchoice1\tchoice2\tgold\nq\ta\tb\tyes\n", "x.tsv:2: .*yes"),
        ("x.tsv", "query\tchoice1\tchoice2\tgold\n" + "q" * 200_000, "x.tsv:2: not TSV"),
        ("x.zip", "no zip", "x.zip: cannot be read"),
        ("x.csv", "a,b", "x.csv: not a benchmark format"),
    ],
)
def test_what_cannot_be_read_is_named_by_file_and_line(tmp_path: Path, name: str, content: str, said: str) -> None:
    message = error_of(tmp_path / name, content)
    assert re.search(said, message), message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"x: no file matches .*nothing\.jsonl"):
        read(tmp_path / "nothing.jsonl")
