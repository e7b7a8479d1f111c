"""A run's config holds from any folder."""

from pathlib import Path

import pytest

from scale_cli.config.paths import with_absolute_paths


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a base and text; a config lies in another folder, with text of its own."""
    for text in ("work [1]/data/a.txt", "work [1]/base/config.json", "mine/texts/b.txt"):
        (tmp_path / text).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / text).touch()
    monkeypatch.chdir(tmp_path / "work [1]")
    return tmp_path


def test_what_is_read_is_found_from_the_working_folder_or_beside_the_config(here: Path) -> None:
    written = {
        "output_dir": "runs/one",
        "model": {"base": "base", "tokenizer": "owner/model"},
        "corpus": {
            "sources": [
                {"name": "data", "path": "data/a.txt"},
                {"path": ["texts/b.txt", "gone.txt"]},
                {"dataset": "texts"},
                {"dataset": "owner/texts"},
            ]
        },
        "train": {"init_from": None},
    }
    found = with_absolute_paths(written, here / "mine")
    work = here / "work [1]"
    assert found == {
        "output_dir": "runs/one",
        "model": {"base": str(work / "base"), "tokenizer": "owner/model"},
        "corpus": {
            "sources": [
                {"name": "data", "path": str(work / "data" / "a.txt")},
                {"path": [str(here / "mine" / "texts" / "b.txt"), "gone.txt"]},
                {"dataset": str(here / "mine" / "texts")},
                {"dataset": "owner/texts"},
            ]
        },
        "train": {"init_from": None},
    }


def test_a_runs_cache_is_found_from_any_folder_and_any_other_stays_as_it_is_written(
    here: Path,
) -> None:
    final = here / "mine" / "runs" / "one" / "final"
    final.mkdir(parents=True)
    (here / "mine" / "runs" / "tokens").mkdir()
    written = {"cache_dir": "runs/tokens"}
    assert with_absolute_paths(written, final) == written
    (final / "manifest.json").touch()
    found = with_absolute_paths(written, final)
    assert found == {"cache_dir": str(here / "mine" / "runs" / "tokens")}
    for other in ({"cache_dir": "runs/gone"}, {"cache_dir": None}, {"cache_dir": str(here)}):
        assert with_absolute_paths(other, final) == other


def test_a_pattern_stays_one_though_the_folder_above_it_looks_like_one(here: Path) -> None:
    (pattern,) = with_absolute_paths({"path": ["data/*.txt"]}, here)["path"]
    assert list(map(str, Path("/").glob(pattern[1:]))) == [
        str(here / "work [1]" / "data" / "a.txt")
    ]


@pytest.mark.parametrize("written", ["hf://datasets/x/y.parquet", "/data/a.txt", "", "a\0b", 3])
def test_urls_absolute_paths_and_what_is_no_path_stay(here: Path, written: object) -> None:
    assert with_absolute_paths({"path": written}, here) == {"path": written}
