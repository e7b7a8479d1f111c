import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scale_cli.commands.compare import compare, notes
from scale_cli.comparison.options import mean_interval, options_of
from scale_cli.comparison.runs import load_runs
from scale_cli.comparison.tables import corpus_table
from scale_cli.errors import RunFolderError, StorageError
from scale_cli.methods.lora import LoraConfig
from scale_cli.report import Interval
from scale_cli.storage.atomic import read_json, verify_folder, write_json
from tests.finished_run import Made, write_run

TASKS = {"blimp": (-0.06, 0.001), "kobest_copa": (0.04, 0.5)}
SCRIPT = "<script>alert(1)<|script>"  # a folder's name cannot hold a slash


def write_runs(folder: Path, made: dict[str, Made]) -> list[Path]:
    return [write_run(folder / name, run) for name, run in made.items()]


@pytest.fixture(scope="module")
def every_method(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Runs of every method, one with a name that is markup, one in Korean. No test changes them."""
    made = {
        "full": Made("full", 0.4, 0.95, benchmarks=TASKS),
        SCRIPT: Made("lora", 0.12, 0.6, benchmarks={"blimp": (0.0, 1.0)}, train={"lr": 2e-4}),
        "얼린 층": Made("freeze", 0.3, 0.8),
        "llama-pro": Made("llama-pro", None, None),
        "preserve": Made("preserve", 0.1, 0.7),
        "adapt": Made("adapt", 0.35, 0.9),
        "route": Made("route", 0.2, 0.85, benchmarks=TASKS),
    }
    return write_runs(tmp_path_factory.mktemp("compared") / "runs", made)


@pytest.fixture(scope="module")
def out(every_method: list[Path]) -> Path:
    """Their comparison."""
    out = every_method[0].parents[1] / "out"
    compare(every_method, out)
    return out


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two runs that can be compared."""
    return write_runs(tmp_path / "runs", dict.fromkeys(("one", "other"), Made(benchmarks=TASKS)))


def test_the_page_names_every_run_as_text_and_asks_for_nothing_from_outside(
    every_method: list[Path], out: Path
) -> None:
    page = (out / "report.html").read_text(encoding="utf-8")
    body = ElementTree.fromstring(re.search(r"<main>.*</main>", page, re.DOTALL)[0])  # type: ignore[index]
    places = re.findall(r' (?:src|href)="(.*?)"', ElementTree.tostring(body, "unicode"))
    assert places and all(place.startswith("data:image/svg+xml;base64,") for place in places)
    assert not re.search(r"@import|url\(|<(script|link|iframe|object|base)\b", page)
    words = "".join(body.itertext())
    for told in (
        *(folder.name for folder in every_method),
        "청원",
        "no difference shown",
        "not finite",
    ):
        assert told in words
    assert "forgetting of English" in words and "bits/byte" in words


def test_the_markdown_says_what_the_page_says(every_method: list[Path], out: Path) -> None:
    told = (out / "report.md").read_text(encoding="utf-8")
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "![What each lost and gained](lost-and-gained.svg)" in told
    assert (out / "lost-and-gained.svg").is_file()
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert [f"## {heading}" for heading in headings] == re.findall(r"^## .*$", told, re.MULTILINE)
    assert SCRIPT not in told and all(
        folder.name in told for folder in every_method if folder.name != SCRIPT
    )
    assert "llama-pro: Korean (청원) was not learned: the loss of the trained head is not" in told
    rows = [line for line in told.splitlines() if line.startswith("| route")]
    assert rows and all("[" in row for row in rows), "with intervals"


def test_the_report_holds_its_inputs_unchanged(every_method: list[Path], out: Path) -> None:
    written = read_json(out / "report.json")
    read = {folder.name: read_json(folder / "evaluation/report.json") for folder in every_method}
    assert {run["name"]: run["report"] for run in written["runs"]} == read
    for option in written["options"]:
        english, korean = (of["heads"][option["head"]] for of in read[option["run"]]["corpora"])
        assert option["bits_per_byte_lost"] == pytest.approx(english["bits_per_byte_difference"])
        change = korean["bits_per_byte_difference"]["value"]
        gained = None if change is None else pytest.approx(-change)
        assert option["bits_per_byte_gained"]["value"] == gained
    verify_folder(out)


def test_a_name_is_text_in_the_figure(out: Path) -> None:
    labels = [*ElementTree.parse(out / "lost-and-gained.svg").getroot().itertext()]
    assert SCRIPT in labels and "얼린 층 + base" in labels


def edit_report(folder: Path, path: str, value: Any) -> None:
    """Give a key of a report, such as `corpora.0.name`, another value."""
    *above, last = path.split(".")
    node = report = read_json(folder / "evaluation/report.json")
    for key in above:
        node = node[int(key) if key.isdigit() else key]
    node[last] = value
    write_json(folder / "evaluation/report.json", report)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("corpora.0.num_bytes", 1, "num_bytes"),
        ("corpora.0.num_base_tokens", 1, "num_base_tokens"),
        ("corpora.0.name", "others", "others"),
        ("corpora.0.heads.base.nats_per_token", 9.0, "sequence_length"),
        ("benchmarks.0.num_items", 7, "blimp"),
        ("trained_sha256", "x", "scale evaluate"),
        ("corpora", None, "damaged"),
        ("another base", None, "different base models"),
        ("a quantised base", "int8", "in int8"),
        ("no final/", None, "scale train"),
    ],
)
def test_what_cannot_stand_beside_the_others_is_refused_by_its_name(
    folders: list[Path], tmp_path: Path, path: str, value: Any, named: str
) -> None:
    folder = folders[1]
    if path == "no final/":
        (folder / "final/manifest.json").unlink()
    elif path.endswith(" base"):
        shutil.rmtree(folder)
        write_run(folder, Made(base="b" * 64, quantisation=value))
    else:
        edit_report(folder, path, value)
    with pytest.raises((RunFolderError, StorageError), match=named) as refused:
        compare(folders, tmp_path / "out")
    assert str(folder) in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_runs_of_one_name_are_told_apart_and_none_is_written_over_or_given_twice(
    tmp_path: Path,
) -> None:
    folders = [write_run(tmp_path / parent / "full", Made()) for parent in ("seed0", "seed1")]
    runs = compare(folders, tmp_path / "out").runs
    assert [run.name for run in runs] == ["seed0/full", "seed1/full"]
    with pytest.raises(RunFolderError, match="--output"):
        compare(folders, folders[0])
    with pytest.raises(RunFolderError, match="given twice"):
        compare([folders[0], folders[0] / "final" / ".."], tmp_path / "out")


def test_of_one_role_alone_the_other_side_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Made())
    english = read_json(folder / "evaluation/report.json")["corpora"][:1]
    edit_report(folder, "corpora", english)
    compare([folder], tmp_path / "out")
    told = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert "forgetting of English" in told and "gain in" not in told and "not finite" not in told


def test_of_benchmarks_alone_there_are_tables_and_no_figure(folders: list[Path]) -> None:
    for folder in folders:
        edit_report(folder, "corpora", [])
    out = folders[0].parent / "out"
    compare(folders, out)
    assert "blimp" in (out / "report.md").read_text()
    assert not list(out.glob("*.svg"))
    for page in ("report.md", "report.html"):
        assert "What each lost and gained" not in (out / page).read_text()


def test_runs_of_other_tokens_compare_in_bytes_and_not_in_tokens(tmp_path: Path) -> None:
    made = {"route": Made("route", 0.1, 0.7), "grown": Made("route", 0.1, 0.5, new_tokens=64)}
    runs = load_runs(write_runs(tmp_path, made))
    options = [option for run in runs for option in options_of(run)]
    table = corpus_table(options, runs[0].report.corpus("청원"))
    rows = {str(row[0]): " ".join(map(str, row[1:5])) for row in table.rows}
    assert rows["base"] == "4.00 2.600 — 6.06"
    assert rows["grown"] == "16.00 2.101 -0.4995 [-0.5095, -0.4895] —"


# How models can be served


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("full", [("posterior", 2, "2"), ("trained", 1, "1")]),
        ("lora", [("posterior", 1, "1, of twice the rows"), ("trained", 1, "1")]),
        ("preserve", [("trained", 1, "1"), ("posterior", 1, "1")]),
        ("adapt", [("trained", 1, "1"), ("posterior", 1, "1 + 4/4")]),
        ("route", [("posterior", 1, "1 + 1/4")]),
    ],
)
def test_only_a_model_without_its_base_needs_a_second_one_to_be_mixed(
    tmp_path: Path, variant: str, expected: list[tuple[str, int, str]]
) -> None:
    (run,) = load_runs([write_run(tmp_path / "run", Made(variant=variant))])
    assert [(way.head, way.num_models, way.passes) for way in options_of(run)] == expected


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


def test_runs_set_up_otherwise_are_told_key_by_key(tmp_path: Path) -> None:
    made = {"one": Made(), "other": Made(train={"max_hours": 3.0, "attention": "eager"})}
    runs = load_runs(write_runs(tmp_path, made))
    (note,) = notes(runs)
    assert "other" in note and "train.attention: not set -> 'eager'" in note and "hours" not in note


def test_settings_of_one_method_are_told_and_those_of_two_are_not(tmp_path: Path) -> None:
    runs = load_runs(write_runs(tmp_path, {"one": Made("lora"), "other": Made("lora")}))
    lora = runs[1].config.method.model_copy(update={"lora": LoraConfig(alpha=1)})
    config = runs[1].config.model_copy(update={"method": lora})
    (note,) = notes([runs[0], replace(runs[1], config=config)])
    assert "method.lora.alpha: 32" in note
    both = load_runs(write_runs(tmp_path / "both", {"one": Made("lora"), "full": Made("full")}))
    assert list(notes(both)) == []


def test_a_base_that_scored_otherwise_is_told_of_each_benchmark(folders: list[Path]) -> None:
    path = "benchmarks.0.heads.base.metrics"
    metrics = read_json(folders[1] / "evaluation/report.json")["benchmarks"][0]
    edit_report(folders[1], f"{path}.{metrics['judged_by']}.value", 0.125)
    (note,) = notes(load_runs(folders))
    assert (
        note.startswith("blimp: the base has ")
        and "and 0.125 in other, so items, settings or" in note
    )


def test_one_run_by_two_rules_has_a_row_of_its_own_for_each(tmp_path: Path) -> None:
    made = {name: Made("full", router={"rule": name}) for name in ("posterior", "cosine")}
    options = [
        option for run in load_runs(write_runs(tmp_path, made)) for option in options_of(run)
    ]
    assert len({option.label for option in options}) == len(options)


def test_another_text_under_the_same_path_is_told(folders: list[Path]) -> None:
    for folder, text in zip(folders, ("held-1", "held-2"), strict=True):
        report = folder / "evaluation" / "report.json"
        write_json(report, read_json(report) | {"texts": ["stories-1", text]})
    (note,) = notes(load_runs(folders))
    assert note.startswith("other and one do not have the same text") and note.endswith(": 청원.")

    for folder, text in zip(folders, ("web-1", "web-2"), strict=True):
        write_json(folder / "final" / "corpora.json", [text])
    (note,) = notes(load_runs(folders))
    assert note.endswith(": 청원, what was trained on.")


def test_runs_that_were_measured_with_other_routers_are_told_apart(tmp_path: Path) -> None:
    made = {"one": Made(), "other": Made(router={"prior": 0.999})}
    (note,) = notes(load_runs(write_runs(tmp_path, made)))
    assert "other" in note and "method.router.prior: 0.5 -> 0.999" in note


def test_layers_from_the_first_collaborating_one_on_run_twice(tmp_path: Path) -> None:
    (run,) = load_runs([write_run(tmp_path / "run", Made("route"))])
    model_config = {
        "base_config": {"num_hidden_layers": 5},
        "attention_collaboration_layers": [3],
        "mlp_collaboration_layers": [1, 3],
    }
    (option,) = options_of(replace(run, model_config=model_config))
    assert option.passes == "1 + 4/5"


def test_unequal_tokens_and_other_devices_are_told(folders: list[Path]) -> None:
    one, other = load_runs(folders)
    assert list(notes([one, other])) == []
    longer = replace(other, report=replace(other.report, num_tokens_trained=204_800))
    (note,) = notes([one, longer])
    assert "same number of tokens: one 102,400, other 204,800." in note
    elsewhere = replace(other, cost=replace(other.cost, num_processes=8, device="NVIDIA H200"))
    (note,) = notes([one, elsewhere])
    assert "different devices" in note and note.endswith("one 1 x cpu, other 8 x NVIDIA H200.")
