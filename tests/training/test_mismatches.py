"""A run goes on as what it was begun as: what differs is named, with what can be done."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale, upscale_is_finished
from scale_cli.config.load import load_config
from scale_cli.config.schema import ACCEPTABLE, TRAIN_SECTIONS, RunConfig, differences
from scale_cli.data.corpora import WINDOWS
from scale_cli.errors import BaseModelError, ConfigError, RunFolderError, ScaleError
from scale_cli.runs.folder import TRAINED, RunFolder
from scale_cli.runs.opened import Run
from scale_cli.storage.atomic import file_sha256, load_tensors, save_tensors
from scale_cli.training.records import TrainState
from tests.small_runs import small_run
from tests.training.conftest import finished, go_on
from tests.widening import lower_stories

Make = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def begun_once(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that is not finished: `final/` is still to be written."""
    folder = tmp_path_factory.mktemp("begun")
    shutil.copytree(lower_stories(shared_data), folder / "base")
    (folder / "news.txt").write_text(
        "Once upon a time there was a cat.\n\nThe cat was happy.\n" * 9
    )
    steps = {"max_steps": 2, "global_batch_size": 2, "save_every_steps": 1}
    rate = {"lr": 1e-3, "schedule": "constant"}
    cache = {"cache_dir": str(folder / "tokens")}
    finished(small_run(folder, folder / "base", corpus=cache, train=steps | rate))
    return folder


@pytest.fixture
def folder(begun_once: Path, tmp_path: Path) -> Path:
    """A copy of its output folder, to be gone on from."""
    shutil.copytree(begun_once / "run", tmp_path / "run")
    return tmp_path


@pytest.fixture
def make(begun_once: Path, folder: Path) -> Make:
    """A function from overrides to the config of that copy."""
    return lambda *overrides: load_config(
        begun_once / "config.yaml", [f"output_dir={folder / 'run'}", *overrides]
    )


def resumed(config: RunConfig, *accepted: str) -> list[str]:
    shutil.rmtree(RunFolder(config.output_dir).final)
    return go_on(config, *accepted)


def refusal(config: RunConfig, kind: type[ScaleError], *accepted: str) -> str:
    shutil.rmtree(RunFolder(config.output_dir).final)
    with pytest.raises(kind) as caught:
        go_on(config, *accepted)
    assert "\n" not in str(caught.value)
    assert not RunFolder(config.output_dir).final.exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("seed=1", "seed: 0 -> 1"),
        ("model.dtype=bfloat16", "model.dtype: 'float32' -> 'bfloat16'"),
        ("method.expansion.ratio=0.5", "method.expansion.ratio: 0.25 -> 0.5"),
        ("corpus.sources.0.name=old", "corpus.sources.0.name: 'news' -> 'old'"),
        ("train.lr=0.01", "train.lr: 0.001 -> 0.01"),
        ("train.decay_steps=1", "train.decay_steps: None -> 1"),
    ],
)
def test_a_key_that_changes_the_run_is_named_with_the_ways_out(
    make: Make, begun_once: Path, override: str, told: str
) -> None:
    message, key = refusal(make(override), RunFolderError), override.partition("=")[0]
    assert told in message
    assert "start anew in another output_dir" in message
    assert (f"--accept {key}" in message) == (key in ACCEPTABLE)


def test_a_key_that_makes_another_run_cannot_be_accepted(make: Make) -> None:
    message = refusal(make(), ConfigError, "seed")
    assert message.startswith("--accept seed: ")
    assert "train.lr" in message
    for resume in (None, str(RunFolder(make().output_dir).checkpoint(2))):
        with pytest.raises(ConfigError, match=r"^--accept seed: "):
            train(make("seed=1"), resume, print, ("seed",))


def test_an_accepted_change_is_said_and_written_down(make: Make, folder: Path) -> None:
    said = resumed(make("train.lr=0.01", "train.max_steps=3"), "train.lr", "train.max_steps")
    assert "changed        train.lr: 0.001 -> 0.01" in said
    assert "changed        train.max_steps: 2 -> 3" in said
    for written in ("checkpoints/step-00000003", "final"):
        assert load_config(folder / "run" / written / "scale.yaml").train.lr == 0.01
    before = folder / "run" / "checkpoints" / "step-00000002"
    assert load_config(before / "scale.yaml").train.lr == 0.001


def test_a_finished_run_that_goes_on_ends_as_one_that_was_longer_from_the_start(
    make: Make, folder: Path
) -> None:
    longer = make("train.max_steps=4")
    assert (folder / "run" / "final").is_dir()
    go_on(longer, "train.max_steps")
    other = make("train.max_steps=4", f"output_dir={folder / 'other'}")
    finals = [RunFolder(longer.output_dir).final, finished(other).final]
    assert [TrainState.load(final).step for final in finals] == [4, 4]
    assert file_sha256(finals[0] / TRAINED) == file_sha256(finals[1] / TRAINED)


def test_a_run_of_a_version_that_cut_other_windows_is_refused_by_name(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scale_cli.training.opening.WINDOWS", WINDOWS + 1)
    assert "another version, which cut text into other windows" in refusal(make(), RunFolderError)


def test_a_checkpoint_of_another_base_is_no_place_to_go_on_from(make: Make, folder: Path) -> None:
    first = make()
    other = Path(shutil.copytree(first.model.base, folder / "other"))
    weights = load_tensors(other / "model.safetensors")
    save_tensors(other / "model.safetensors", {key: 1.5 * x for key, x in weights.items()})
    config = make(f"model.base={other}", f"output_dir={folder / 'of other'}")
    upscale(config)
    with pytest.raises(RunFolderError, match=r"^--resume: .*its base is not this run's"):
        train(config, str(RunFolder(first.output_dir).checkpoint(1)), print)


def test_a_run_does_not_go_back(make: Make) -> None:
    message = refusal(make("train.max_steps=1"), RunFolderError, "train.max_steps")
    assert "beyond train.max_steps 1; set it to at least 2" in message


def test_a_base_and_a_corpus_may_lie_elsewhere(make: Make, begun_once: Path, folder: Path) -> None:
    shutil.copytree(begun_once / "base", folder / "moved")
    shutil.copy(begun_once / "news.txt", folder / "moved.txt")
    before = file_sha256(folder / "run" / "final" / TRAINED)
    moved = make(f"model.base={folder / 'moved'}", f"corpus.sources.0.path={folder / 'moved.txt'}")
    assert upscale_is_finished(Run(moved))
    go_on(moved)  # it is finished, and the same
    said = resumed(moved)
    assert [line for line in said if line.startswith("changed        model.base: ")]
    assert [line for line in said if line.startswith("changed        corpus.sources.0.path: ")]
    assert file_sha256(folder / "run" / "final" / TRAINED) == before


def test_what_was_made_for_another_text_is_made_again_and_not_trained(
    make: Make, folder: Path
) -> None:
    (folder / "other.txt").write_text("Another text altogether, of some length.\n" * 9)
    for part in ("final", "checkpoints"):
        shutil.rmtree(folder / "run" / part)
    other = make(f"corpus.sources.0.path={folder / 'other.txt'}")
    assert upscale_is_finished(Run(make())) and not upscale_is_finished(Run(other))
    with pytest.raises(RunFolderError, match=r"upscaled: was made for another training text; run"):
        train(other, None, print)
    more = [source.model_dump(mode="json") for source in make().corpus.sources]
    more.append(more[0] | {"name": "more"})
    with pytest.raises(RunFolderError, match=r"upscaled: was made for another training text; run"):
        train(make(f"corpus.sources={json.dumps(more)}"), None, print)
    upscale(other)
    train(other, None, print)


def test_a_finished_run_whose_text_has_changed_since_says_so(make: Make, begun_once: Path) -> None:
    text = begun_once / "news.txt"
    before = text.read_text()
    told = "the training text of news has changed since"
    assert not any(told in line for line in go_on(make()))
    try:
        text.write_text(before + "\n\nMore of it.\n")
        assert any(told in line for line in go_on(make()))
        text.unlink()
        assert not any(told in line for line in go_on(make()))
    finally:
        text.write_text(before)


def test_a_relative_path_whose_target_is_gone_is_the_one_that_was_recorded(make: Make) -> None:
    recorded = make("train.init_from=/gone/runs/trunk/final")
    for written, changes in (("runs/trunk/final", 0), ("runs/other/final", 1), ("/x/final", 1)):
        now = make(f"train.init_from={written}")
        assert len(differences(recorded, now, TRAIN_SECTIONS)) == changes


@pytest.mark.parametrize("finished", [False, True])
def test_another_base_and_another_text_are_named(
    make: Make, shared_data: Path, folder: Path, finished: bool
) -> None:
    other = shared_data / "ckpt-eltec" / "hf"
    (folder / "other.txt").write_text("Another text altogether, of some length.\n" * 9)
    if not finished:
        shutil.rmtree(folder / "run" / "final")
    with pytest.raises(BaseModelError, match=rf"{re.escape(str(other))}.* in another output_dir"):
        go_on(make(f"model.base={other}"))
    with pytest.raises(
        RunFolderError, match=r"changed: news-\w+ -> news-\w+.* in another output_dir"
    ):
        go_on(make(f"corpus.sources.0.path={folder / 'other.txt'}"))
