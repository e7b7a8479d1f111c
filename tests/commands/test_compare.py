from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from scale_cli.commands.compare import compare, compare_runs, setup_differences
from scale_cli.commands.evaluate import evaluate
from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.comparison import Option, front, load_runs, mean_interval, non_dominated
from scale_cli.config.schema import RunConfig
from scale_cli.errors import RunFolderError, StorageError
from scale_cli.report import Interval
from scale_cli.storage.atomic import verify_folder
from tests.command_line import Scale
from tests.export.conftest import configured
from tests.finished_run import Made, write_json, write_run

TASKS = {"blimp": (-0.06, 0.001), "kobest_copa": (0.04, 0.5)}
SCRIPT = "<script>alert(1)<|script>"  # a folder's name cannot hold a slash


class Page(HTMLParser):
    """What a page holds; fails where a tag is closed that is not open."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.words = ""
        self.feed(self.text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in ("meta", "img"):
            self.open.append(tag)
        places = ("src", "href", "srcset", "data", "action", "poster", "xlink:href")
        self.references += [value or "" for name, value in attrs if name in places]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words += data


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path]:
    """Runs of every method, one with a name that is markup, one in Korean; and their comparison. No test changes it."""
    root = tmp_path_factory.mktemp("compared")
    made = {
        "full": Made("full", 0.4, 0.95, benchmarks=TASKS),
        SCRIPT: Made("lora", 0.12, 0.6, benchmarks={"blimp": (0.0, 1.0)}, train={"lr": 2e-4}),
        "얼린 층": Made("freeze", 0.3, 0.8),
        "llama-pro": Made("llama-pro", None, None),
        "preserve": Made("preserve", 0.1, 0.7),
        "adapt": Made("adapt", 0.35, 0.9),
        "route": Made("route", 0.2, 0.85, benchmarks=TASKS, continued=True),
    }
    folders = [write_run(root / "runs" / name, run) for name, run in made.items()]
    compare(folders, root / "out")
    return folders, root / "out"


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two runs that can be compared."""
    return [write_run(tmp_path / "runs" / name, Made(benchmarks=TASKS)) for name in ("one", "other")]


def test_the_page_is_whole_names_every_run_and_asks_for_nothing_from_outside(
    compared: tuple[list[Path], Path],
) -> None:
    folders, out = compared
    page = Page(out / "report.html")
    assert page.open == []
    assert page.references and all(place.startswith("data:image/svg+xml;base64,") for place in page.references)
    assert not page.tags & {"script", "link", "iframe", "object", "base"}
    assert not re.search(r"@import|url\(", page.text)
    for told in (*(folder.name for folder in folders), "청원", "no difference shown", "not finite", "50.0 %"):
        assert told in page.words
    assert "forgetting of English" in page.words and "bits/byte" in page.words


def test_the_report_holds_its_inputs_unchanged(compared: tuple[list[Path], Path]) -> None:
    folders, out = compared
    written = json.loads((out / "report.json").read_text(encoding="utf-8"))
    read = [json.loads((folder / "evaluation" / "report.json").read_text(encoding="utf-8")) for folder in folders]
    assert [run["report"] for run in written["runs"]] == read
    for option in written["options"]:
        report = read[[run["name"] for run in written["runs"]].index(option["run"])]
        lost, gained = (corpus["heads"][option["head"]]["bits_per_byte_difference"] for corpus in report["corpora"])
        assert option["bits_per_byte_lost"] == pytest.approx(lost)
        value = gained["value"]
        assert option["bits_per_byte_gained"]["value"] == (None if value is None else pytest.approx(-value))
    verify_folder(out)


def test_the_figure_and_the_tables_are_well_formed_and_a_name_is_text(compared: tuple[list[Path], Path]) -> None:
    _, out = compared
    text = (out / "report.md").read_text(encoding="utf-8")
    root = ElementTree.parse(out / "trade-off.svg").getroot()
    labels = "".join(element.text or "" for element in root.iter() if element.tag.endswith("}text"))
    assert SCRIPT in labels and "얼린 층 + base" in labels
    assert "(trade-off.svg)" in text
    assert "<script>" not in text.replace(r"\<script", "")
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def edit_report(folder: Path, edit: Callable[[dict[str, object]], object]) -> None:
    path = folder / "evaluation" / "report.json"
    report = json.loads(path.read_text(encoding="utf-8"))
    edit(report)
    write_json(path, report)


def test_runs_with_one_side_say_what_is_missing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Made("full"))
    edit_report(folder, lambda report: report["corpora"].pop())  # type: ignore[attr-defined]
    compare([folder], tmp_path / "out")
    page = Page(tmp_path / "out" / "report.html")
    assert "A trade-off needs a retention and an acquisition corpus" in page.words


@pytest.mark.parametrize(
    ("missing", "verb"),
    [("final/position.json", "train"), ("evaluation/report.json", "evaluate")],
)
def test_a_run_that_is_not_finished_is_named_with_what_is_missing(
    folders: list[Path], tmp_path: Path, missing: str, verb: str
) -> None:
    (folders[1] / missing).unlink()
    with pytest.raises(RunFolderError, match=missing) as refused:
        compare(folders, tmp_path / "out")
    assert str(folders[1]) in str(refused.value) and f"scale {verb}" in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_runs_of_other_tokens_compare_in_bytes_and_not_in_tokens(tmp_path: Path) -> None:
    made = {
        "route": Made("route", 0.1, 0.7),
        "grown": Made("route", 0.1, 0.5, new_tokens=64, base_bits=1.9),
        "full": Made("full", 0.4, 0.6, new_tokens=64, base_bits=1.9),
    }
    compare([write_run(tmp_path / name, run) for name, run in made.items()], tmp_path / "out")
    text = (tmp_path / "out/report.md").read_text(encoding="utf-8")
    tables = {part.partition("\n")[0].partition(":")[0]: part for part in text.split("## ")[1:]}
    rows = {
        name: {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in of_table}
        for name, table in tables.items()
        if (of_table := [line.split("|") for line in table.splitlines() if line.startswith("|")])
    }
    korean, english = rows["청원"], rows["stories"]
    assert [korean[label][:4] for label in ("base", "base, tokens of grown", "grown")] == [
        ["4.00", "2.600", "—", "6.06"],
        ["16.00", "1.900", "-0.7000", "—"],
        ["16.00", "1.400", "-1.1995", "—"],
    ]
    assert "base, tokens of grown" not in english
    assert english["grown"] == english["route"]
    assert "64 new tokens" in text
    assert "Bytes a token, by corpus: route 4.00 4.00, grown 4.00 16.00" in text
    same = write_run(tmp_path / "same", Made("route", new_tokens=64, base_bits=1.7))
    with pytest.raises(RunFolderError, match="sequence_length"):
        compare([tmp_path / "grown", same], tmp_path / "out")


def test_another_base_is_refused_by_both_names(tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "one", Made()), write_run(tmp_path / "other", Made(base="b" * 64))
    with pytest.raises(RunFolderError, match="different base models") as refused:
        compare([one, other], tmp_path / "out")
    assert all(str(folder) in str(refused.value) for folder in (one, other))


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda report: report["corpora"][0].update(num_bytes=1), "num_bytes"),
        (lambda report: report["corpora"][0].update(name="others"), "others"),
        (lambda report: report["corpora"][0]["heads"]["base"].update(nats_per_token=9.0), "sequence_length"),
        (lambda report: report["benchmarks"][0].update(num_items=7), "blimp"),
        (lambda report: report.update(trained_sha256="other"), "scale evaluate"),
    ],
)
def test_what_was_measured_otherwise_is_refused(
    folders: list[Path], tmp_path: Path, edit: Callable[[dict[str, object]], None], named: str
) -> None:
    edit_report(folders[1], edit)
    with pytest.raises(RunFolderError, match=named):
        compare(folders, tmp_path / "out")


def test_a_damaged_report_and_a_run_given_twice_are_one_message(folders: list[Path], tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="given twice"):
        compare([folders[0], folders[0] / "." / "final" / ".."], tmp_path / "out")
    write_json(folders[0] / "evaluation" / "report.json", {"variant": "full"})
    with pytest.raises(StorageError, match=re.escape(str(folders[0]))):
        compare(folders, tmp_path / "out")


def test_runs_of_one_name_are_told_apart_by_their_parents(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / parent / "full", Made()) for parent in ("seed0", "seed1")]
    assert [run.name for run in compare(folders, tmp_path / "out").runs] == ["seed0/full", "seed1/full"]


def test_an_earlier_comparison_is_replaced_and_nothing_else_is(folders: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    compare(folders, out)
    compare(folders[:1], out)
    assert len(json.loads((out / "report.json").read_text(encoding="utf-8"))["runs"]) == 1
    (out / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(RunFolderError, match="something other"):
        compare(folders, out)
    before = sorted(folders[0].rglob("*"))
    with pytest.raises(RunFolderError, match="--output"):
        compare(folders, folders[0])
    assert sorted(folders[0].rglob("*")) == before


def test_two_real_runs_end_to_end(shared_data: Path, tmp_path: Path, scale: Scale) -> None:
    configs = [configured(shared_data, tmp_path / name, {"variant": name}) for name in ("full", "route")]
    for config in configs:
        upscale(config)
        train(config, None, print)
        with patch.object(AutoModelForCausalLM, "from_pretrained", wraps=AutoModelForCausalLM.from_pretrained) as read:
            evaluate(config)
        assert read.call_count == 1, "of a rival, too"
    done = scale("compare", *(config.output_dir for config in configs), "--output", tmp_path / "out")
    assert done.exit_code == 0
    assert "full + base" in done.stdout and str(tmp_path / "out" / "report.html") in done.stdout
    full, route = (run["cost"] for run in json.loads((tmp_path / "out" / "report.json").read_text())["runs"])
    assert full["trainable_parameters"] == full["total_parameters"] > 0
    assert route["total_parameters"] == route["trainable_parameters"] + full["total_parameters"]


# How models can be served, and which of these ways no other beats


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=12))  # few values, so ties
def test_no_kept_point_is_dominated_and_every_other_is_by_a_kept_one(points: list[tuple[float, float]]) -> None:
    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one != other and one[0] <= other[0] and one[1] >= other[1]

    kept = non_dominated(points)
    best = [point for point, keep in zip(points, kept, strict=True) if keep]
    assert best and not any(beats(other, point) for point in best for other in points)
    dropped = [point for point, keep in zip(points, kept, strict=True) if not keep]
    assert all(any(beats(other, point) for other in best) for point in dropped)


def options(tmp_path: Path, *made: Made) -> list[Option]:
    folders = [write_run(tmp_path / f"{index}-{m.variant}", m) for index, m in enumerate(made)]
    return compare_runs(load_runs(folders), tmp_path / "out").options


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("full", [("adapted", 1, "1"), ("posterior", 2, "2")]),
        ("preserve", [("adapted", 1, "1"), ("posterior", 1, "1")]),
        ("adapt", [("adapted", 1, "1"), ("posterior", 1, "1 + 4/4")]),
        ("route", [("posterior", 1, "1 + 1/4")]),
    ],
)
def test_only_methods_that_widen_nothing_need_a_second_model_to_be_mixed(
    tmp_path: Path, variant: str, expected: list[tuple[str, int, str]]
) -> None:
    assert [(o.head, o.num_models, o.passes) for o in options(tmp_path, Made(variant=variant))] == expected


def test_the_front_leaves_out_what_the_base_itself_beats_and_what_is_not_finite(tmp_path: Path) -> None:
    found = options(tmp_path, Made("full", 0.4, 0.9), Made("preserve", 0.1, -0.2), Made("lora", None, None))
    assert [option.label for option in front([o for o in found if o.head == "adapted"], 2)] == ["0-full"]


@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=5))
def test_a_mean_lies_in_its_interval_and_one_corpus_keeps_its_own(parts: list[tuple[float, float, float]]) -> None:
    intervals = [Interval(value, value - below, value + above) for value, below, above in parts]
    mean = mean_interval(intervals)
    assert mean.value is not None and mean.low is not None and mean.high is not None
    assert mean.low <= mean.value <= mean.high
    # Never wider than if all corpora erred together.
    assert mean.high - mean.value <= sum(above for *_, above in parts) / len(parts) + 1e-6
    if len(parts) == 1:
        assert (mean.low, mean.high) == pytest.approx((intervals[0].low, intervals[0].high))
    nothing = Interval(None, None, None)
    assert mean_interval([*intervals, nothing]) == mean_interval([]) == nothing


def test_runs_set_up_otherwise_are_told_in_a_line_a_key_and_sources_by_their_names() -> None:
    web: dict[str, object] = {"name": "web", "path": "web.txt", "language": "ko"}
    old: dict[str, object] = {"name": "old", "path": "old.txt", "language": "en"}

    def config(sources: list[dict[str, object]], **train: object) -> RunConfig:
        sections = {"model": {"base": "b"}, "corpus": {"sources": sources}, "train": {"max_steps": 1, **train}}
        return RunConfig.model_validate({"output_dir": "x", **sections})

    first, more = config([old, web]), config([web, {**old, "name": "new"}], max_hours=3.0, attention="eager")
    assert setup_differences(first, more) == ["train.attention: not set -> 'eager'", "corpus.sources: new, old"]
    assert setup_differences(first, config([web, old])) == []
