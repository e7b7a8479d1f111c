import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationMixin

from scale_cli.commands import verify as verb
from scale_cli.commands.upscale import upscale
from scale_cli.commands.verify import FolderCheck, check_folders, verify
from scale_cli.config.load import dump, load_config
from scale_cli.config.schema import RunConfig
from scale_cli.errors import CheckFailed, CorpusError, ExportParityError, RunFolderError
from scale_cli.model.cache_scale import CACHE
from scale_cli.storage.atomic import load_tensors, read_json, save_tensors, write_json
from tests.command_line import Scale
from tests.small_runs import changed, export, petitions_run, train_run
from tests.torture.attacker import reseal
from tests.widening import lower_stories


@pytest.fixture(scope="module")
def finished(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A widened run with an export."""
    folder = tmp_path_factory.mktemp("verified")
    shutil.copytree(lower_stories(shared_data), folder / "base")
    config = petitions_run(shared_data, folder / "run", collaboration={"layers": "top:1"})
    config = train_run(changed(config, f"model.base={folder / 'base'}", "corpus.cache_dir=null"))
    export(config)
    return config


@pytest.fixture
def run(finished: RunConfig, tmp_path: Path) -> Path:
    """A copy of that run, to be damaged."""
    return Path(shutil.copytree(finished.output_dir, tmp_path / "run"))


@pytest.fixture
def base(finished: RunConfig) -> Iterator[Path]:
    """The base of that run, which is put back afterwards."""
    base = Path(finished.model.base)
    shutil.copytree(base, base.with_name("kept"))
    yield base
    shutil.rmtree(base, ignore_errors=True)
    base.with_name("kept").rename(base)


def found(path: Path) -> dict[str, FolderCheck]:
    return {check.folder.name: check for check in check_folders(path)}


def test_a_run_that_nobody_touched_holds_everything(run: Path) -> None:
    checks = found(run)
    assert not [line for check in checks.values() for line in (*check.failed, *check.unchecked)]
    assert checks["final"].held == ["hashes", "base"]
    assert checks["plain"].held == ["hashes", "parity"]
    assert checks["upscaled"].held == ["hashes", "base"]
    verify(run)


def test_a_whole_folder_is_good_wherever_it_lies(run: Path, tmp_path: Path) -> None:
    for name in ("final", "tokens"):
        moved = Path(shutil.copytree(run / name, tmp_path / "elsewhere" / name / "mine"))
        assert all("hashes" in of_folder.held for of_folder in found(moved).values())
        verify(moved)


def test_another_tokenizer_or_base_is_found(run: Path, base: Path) -> None:
    tokenizer = read_json(base / "tokenizer.json")
    fewer = tokenizer["model"] | {"merges": tokenizer["model"]["merges"][:-1]}
    write_json(base / "tokenizer.json", {**tokenizer, "model": fewer})
    assert "the tokenizer of" in found(run / "upscaled")["upscaled"].failed[0]
    write_json(base / "tokenizer.json", tokenizer)
    tensors = load_tensors(base / "model.safetensors")
    tensors["model.norm.weight"][0] += 1e-3
    save_tensors(base / "model.safetensors", tensors)
    assert "model.norm.weight differs" in found(run / "final")["final"].failed[0]


def test_a_run_whose_base_is_gone_does_not_pass(run: Path, base: Path, scale: Scale) -> None:
    shutil.rmtree(base)
    done = scale("verify", run)
    assert f"part  {run / 'final'}: hashes\n" in done.stdout
    told = done.error(exit_code=3)
    assert told.startswith("not everything could be checked: ")
    assert told.endswith(f"model.base: {base} is not a folder with a config.json")


def test_an_export_away_from_its_run_does_not_pass(run: Path, tmp_path: Path) -> None:
    alone = shutil.copytree(run / "export" / "plain", tmp_path / "alone")
    with pytest.raises(CheckFailed, match="final/") as refused:
        verify(Path(alone))
    assert refused.value.exit_code == 3


def test_an_export_that_no_held_out_text_judges_does_not_pass(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise CorpusError("held.txt: no such file")

    monkeypatch.setattr("scale_cli.commands.export._judged_by", gone)
    check = found(run)["plain"]
    assert check.held == ["hashes", "parity"]
    assert check.unchecked == ["parity on held-out text: held.txt: no such file"]
    with pytest.raises(CheckFailed, match="not everything could be checked"):
        verify(run)


def test_a_moved_run_of_relative_paths_holds_from_any_folder(
    finished: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished.model.base, "base")
    tree = finished.model_dump(mode="json") | {"output_dir": "run", "model": {"base": "base"}}
    Path("mine.yaml").write_text(dump(tree))
    upscale(load_config(Path("mine.yaml")))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "run").rename("moved")
    (check,) = [each for each in check_folders(Path("moved")) if each.folder.name == "upscaled"]
    assert check.held == ["hashes", "base"]


def test_a_verdict_is_told_before_the_next_folder_is_checked(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def check(folder: Path) -> FolderCheck:
        order.append("checked")
        return FolderCheck(folder)

    monkeypatch.setattr(verb, "_check", check)
    monkeypatch.setattr(verb, "log", lambda _: order.append("told"))
    verify(run)
    assert order[:4] == ["checked", "told"] * 2


def test_an_export_of_another_model_is_found_by_its_logits_though_its_manifest_fits(
    run: Path, base: Path
) -> None:
    for name in ("model.safetensors", "config.json"):
        shutil.copy(base / name, run / "export" / "plain" / name)
    reseal(run / "export" / "plain")
    assert "logits differ" in found(run / "export" / "plain")["plain"].failed[0]


def test_a_folder_that_is_not_ours_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="scale did not write this folder"):
        verify(tmp_path)


def test_a_transformers_that_loses_the_cache_fails_the_export_and_its_verification(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = GenerationMixin.prepare_inputs_for_generation

    def without_cache(*args: Any, **kwargs: Any) -> Any:
        inputs = prepare(*args, **kwargs)
        inputs.pop(CACHE, None)
        return inputs

    monkeypatch.setattr(GenerationMixin, "prepare_inputs_for_generation", without_cache)
    (failed,) = found(run / "export" / "plain")["plain"].failed
    assert "cached decoding" in failed
    config = load_config(run / "final" / "scale.yaml").model_copy(update={"output_dir": run})
    shutil.rmtree(run / "export")
    with pytest.raises(ExportParityError, match="cached decoding") as caught:
        export(config)
    assert caught.value.exit_code == 3
    assert not (run / "export" / "plain").exists()
