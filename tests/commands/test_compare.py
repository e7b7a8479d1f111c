import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scale_cli.commands.compare import compare, compare_runs, setup_differences
from scale_cli.comparison import Option, front, load_runs, mean_interval
from scale_cli.config.load import dump_config, load_config
from scale_cli.errors import RunFolderError, StorageError
from scale_cli.report import Interval
from scale_cli.storage.atomic import read_json, verify_folder, write_json, write_text
from tests.finished_run import Made, write_run
from tests.small_runs import SMALLEST, changed, load_text

TASKS = {"blimp": (-0.06, 0.001), "kobest_copa": (0.04, 0.5)}
SCRIPT = "<script>alert(1)<|script>"  # a folder's name cannot hold a slash


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
        "route": Made("route", 0.2, 0.85, benchmarks=TASKS),
    }
    folders = [write_run(root / "runs" / name, run) for name, run in made.items()]
    compare(folders, root / "out")
    return folders, root / "out"


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two runs that can be compared."""
    return [
        write_run(tmp_path / "runs" / name, Made(benchmarks=TASKS)) for name in ("one", "other")
    ]


def test_the_page_is_whole_names_every_run_and_asks_for_nothing_from_outside(
    compared: tuple[list[Path], Path],
) -> None:
    folders, out = compared
    page = (out / "report.html").read_text(encoding="utf-8")
    body = ElementTree.fromstring(re.search(r"<main>.*</main>", page, re.DOTALL)[0])  # type: ignore[index]
    references = [
        value for element in body.iter() for key, value in element.items() if key in ("src", "href")
    ]
    assert references and all(
        place.startswith("data:image/svg+xml;base64,") for place in references
    )
    assert not re.search(r"@import|url\(|<(script|link|iframe|object|base)\b", page)
    words = "".join(body.itertext())
    for told in (
        *(folder.name for folder in folders),
        "청원",
        "no difference shown",
        "not finite",
    ):
        assert told in words
    assert "forgetting of English" in words and "bits/byte" in words


def test_the_report_holds_its_inputs_unchanged(compared: tuple[list[Path], Path]) -> None:
    folders, out = compared
    written, read = (
        read_json(out / "report.json"),
        [read_json(of / "evaluation/report.json") for of in folders],
    )
    assert [run["report"] for run in written["runs"]] == read
    for option in written["options"]:
        report = read[[run["name"] for run in written["runs"]].index(option["run"])]
        lost, gained = (
            corpus["heads"][option["head"]]["bits_per_byte_difference"]
            for corpus in report["corpora"]
        )
        assert option["bits_per_byte_lost"] == pytest.approx(lost)
        value = gained["value"]
        assert option["bits_per_byte_gained"]["value"] == (
            None if value is None else pytest.approx(-value)
        )
    verify_folder(out)


def test_the_figure_and_the_tables_are_well_formed_and_a_name_is_text(
    compared: tuple[list[Path], Path],
) -> None:
    _, out = compared
    text = (out / "report.md").read_text(encoding="utf-8")
    root = ElementTree.parse(out / "trade-off.svg").getroot()
    labels = "".join(element.text or "" for element in root.iter() if element.tag.endswith("}text"))
    assert SCRIPT in labels and "얼린 층 + base" in labels
    assert "(trade-off.svg)" in text
    assert "<script>" not in text.replace(r"\<script", "")
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def edit_report(folder: Path, edit: Callable[[Any], object]) -> None:
    path = folder / "evaluation" / "report.json"
    report = read_json(path)
    edit(report)
    write_json(path, report)


def of_base(report: Any) -> Any:
    return report["corpora"][0]["heads"]["base"]


def another_base(folder: Path) -> None:
    shutil.rmtree(folder)
    write_run(folder, Made(base="b" * 64))


def quantised_base(folder: Path) -> None:
    another_base(folder)
    config = folder / "final" / "scale.yaml"
    write_text(config, dump_config(changed(load_config(config), "model.quantisation=int8")))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda folder: edit_report(
                folder, lambda report: report["corpora"][0].update(num_bytes=1)
            ),
            "num_bytes",
        ),
        (
            lambda folder: edit_report(
                folder, lambda report: report["corpora"][0].update(name="others")
            ),
            "others",
        ),
        (
            lambda folder: edit_report(
                folder, lambda report: of_base(report).update(nats_per_token=9.0)
            ),
            "sequence_len",
        ),
        (
            lambda folder: edit_report(
                folder, lambda report: report["benchmarks"][0].update(num_items=7)
            ),
            "blimp",
        ),
        (
            lambda folder: edit_report(folder, lambda report: report.update(trained_sha256="x")),
            "scale evaluate",
        ),
        (
            lambda folder: (folder / "final/manifest.json").unlink(),
            r"manifest\.json is missing \(`scale train`",
        ),
        (another_base, "different base models"),
        (quantised_base, r"\(some/base and some/base in int8\)"),
        (
            lambda folder: write_json(folder / "evaluation" / "report.json", {"variant": "full"}),
            "damaged",
        ),
    ],
)
def test_what_cannot_stand_beside_the_others_is_refused_by_its_name(
    folders: list[Path], tmp_path: Path, change: Callable[[Path], None], named: str
) -> None:
    change(folders[1])
    with pytest.raises((RunFolderError, StorageError), match=named) as refused:
        compare(folders, tmp_path / "out")
    assert str(folders[1]) in str(refused.value)
    assert not (tmp_path / "out").exists()
    with pytest.raises(RunFolderError, match="given twice"):
        compare([folders[0], folders[0] / "." / "final" / ".."], tmp_path / "out")


def test_runs_of_one_name_are_told_apart_by_their_parents_and_no_run_is_written_over(
    tmp_path: Path,
) -> None:
    folders = [write_run(tmp_path / parent / "full", Made()) for parent in ("seed0", "seed1")]
    edit_report(folders[0], lambda report: report["corpora"].pop())
    edit_report(folders[1], lambda report: report["corpora"].pop())
    assert [run.name for run in compare(folders, tmp_path / "out").runs] == [
        "seed0/full",
        "seed1/full",
    ]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "A trade-off needs a retention and an acquisition corpus" in page
    with pytest.raises(RunFolderError, match="--output"):
        compare(folders, folders[0])


def test_runs_of_other_tokens_compare_in_bytes_and_not_in_tokens(tmp_path: Path) -> None:
    made = {
        "route": Made("route", 0.1, 0.7),
        "grown": Made("route", 0.1, 0.5, new_tokens=64),
    }
    compare([write_run(tmp_path / name, run) for name, run in made.items()], tmp_path / "out")
    text = (tmp_path / "out/report.md").read_text(encoding="utf-8")
    tables = {part.partition("\n")[0].partition(":")[0]: part for part in text.split("## ")[1:]}
    rows = {
        name: {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in of_table}
        for name, table in tables.items()
        if (of_table := [line.split("|") for line in table.splitlines() if line.startswith("|")])
    }
    assert [rows["청원"][label][:4] for label in ("base", "grown")] == [
        ["4.00", "2.600", "—", "6.06"],
        ["16.00", "2.101", "-0.4995 [-0.5095, -0.4895]", "—"],
    ]


# How models can be served, and which of these ways no other beats


def options(tmp_path: Path, *made: Made) -> list[Option]:
    folders = [write_run(tmp_path / f"{index}-{m.variant}", m) for index, m in enumerate(made)]
    return compare_runs(load_runs(folders), tmp_path / "out").options


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("full", [("trained", 1, "1"), ("posterior", 2, "2")]),
        ("preserve", [("trained", 1, "1"), ("posterior", 1, "1")]),
        ("adapt", [("trained", 1, "1"), ("posterior", 1, "1 + 4/4")]),
        ("route", [("posterior", 1, "1 + 1/4")]),
    ],
)
def test_only_methods_that_widen_nothing_need_a_second_model_to_be_mixed(
    tmp_path: Path, variant: str, expected: list[tuple[str, int, str]]
) -> None:
    assert [
        (o.head, o.num_models, o.passes) for o in options(tmp_path, Made(variant=variant))
    ] == expected


@given(
    st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), max_size=12)
)  # few values, so ties
def test_the_front_is_what_neither_another_nor_the_base_beats(
    points: list[tuple[int, int]],
) -> None:
    def beats(one: tuple[int, int], other: tuple[int, int]) -> bool:
        return one != other and one[0] <= other[0] and one[1] >= other[1]

    def option(lost: float | None, gained: float | None) -> Any:
        either = Interval(lost, None, None), Interval(gained, None, None)
        return SimpleNamespace(
            num_models=1, lost=either[0], gained=either[1], is_finite=lost is not None
        )

    best = front([*(option(*point) for point in points), option(None, None)], 1)
    kept = [(of.lost.value, of.gained.value) for of in best]
    assert kept == sorted(
        point for point in points if not any(beats(other, point) for other in [*points, (0, 0)])
    )


@given(
    st.lists(
        st.tuples(st.floats(-10, 10), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=5
    )
)
def test_a_mean_lies_in_its_interval_and_one_corpus_keeps_its_own(
    parts: list[tuple[float, float, float]],
) -> None:
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
    web, old, new = (
        f"{{name: {name}, path: web.txt, language: ko}}" for name in ("web", "old", "new")
    )
    first, swapped = (
        load_text(SMALLEST, f"corpus.sources=[{both}]")
        for both in (f"{old}, {web}", f"{web}, {old}")
    )
    assert setup_differences(first, swapped) == []
    more = changed(
        first, f"corpus.sources=[{web}, {new}]", "train.max_hours=3", "train.attention=eager"
    )
    assert setup_differences(first, more) == [
        "train.attention: not set -> 'eager'",
        "corpus.sources: new, old",
    ]


def test_points_that_lie_on_each_other_share_one_label(tmp_path: Path) -> None:
    made = {
        "a": Made("full", 0.3, 0.7),
        "b": Made("full", 0.301, 0.701),
        "c": Made("full", 0.1, 0.2),
    }
    folders = [write_run(tmp_path / "runs" / name, run) for name, run in made.items()]
    compare(folders, tmp_path / "out")
    root = ElementTree.parse(tmp_path / "out/trade-off.svg").getroot()
    labels = [element.text for element in root.iter() if element.tag.endswith("}text")]
    assert "1, 3" in labels and "5" in labels  # each run is shown beside its base too
    assert "1" not in labels and "3" not in labels
