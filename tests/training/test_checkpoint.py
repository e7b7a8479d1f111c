"""What a run begins with: its own checkpoint, or what another run has trained."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from scale_cli.commands.run import run_pipeline
from scale_cli.commands.train import train
from scale_cli.errors import ConfigError, Interrupted, RunFolderError, StorageError
from scale_cli.runs.folder import RunFolder
from scale_cli.storage.atomic import MANIFEST, file_sha256, load_tensors, read_json
from tests.command_line import refused
from tests.training.conftest import (
    MakeConfig,
    are_equal,
    before_each_step,
    configs_in,
    finished,
    go_on,
    trained,
    upscaled,
)

TRUNK = (
    "train.schedule=constant",
    "train.max_steps=6",
    "train.save_every_steps=2",
    "train.keep_checkpoints=9",
)


@pytest.fixture(scope="module")
def trunk_once(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trunk")
    make = configs_in(folder, shared_data, tmp_path_factory.getbasetemp() / "tokens")
    return finished(make("trunk", *TRUNK)).root


@pytest.fixture
def trunk(trunk_once: Path, tmp_path: Path) -> RunFolder:
    """A copy of a run of six steps with all its checkpoints."""
    shutil.copytree(trunk_once, tmp_path / "trunk")
    return RunFolder(tmp_path / "trunk")


def counted_steps(checkpoint: Path) -> set[float]:
    moments = load_tensors(checkpoint / "optimiser.safetensors")
    return {float(tensor) for name, tensor in moments.items() if name.startswith("step.")}


def test_a_run_that_is_stopped_in_its_first_step_goes_on_from_step_0(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = (make_config(name, "train.max_steps=2") for name in ("whole", "cut"))
    run = upscaled(cut)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        before_each_step(patch, lambda _done, _model: os.kill(os.getpid(), signal.SIGTERM))
        train(cut, None, print)
    assert run.saved == [run.checkpoint(0)]
    go_on(cut)
    assert are_equal(trained(run.final), trained(finished(whole).final))


def test_a_branch_of_no_rate_ends_as_the_trunk_was_and_says_what_it_began_with(
    make_config: MakeConfig, trunk: RunFolder
) -> None:
    keys = ("train.max_steps=1", "train.warmup_steps=0", "train.lr=1e-30", "seed=7")
    branch = finished(make_config("branch", *keys, f"train.init_from={trunk.final}"))
    assert are_equal(trained(branch.final), trained(trunk.final))
    assert not are_equal(trained(branch.final), trained(branch.upscaled))
    record = read_json(branch.final / "init_from.json")
    assert record["step"] == 6
    assert record["content_sha256"] == file_sha256(trunk.final / MANIFEST)
    sizes = [read_json(run.final / "config.json") for run in (branch, trunk)]
    # The rates follow the start of the trunk.
    assert sizes[0]["start"] == sizes[1]["start"]
    assert counted_steps(branch.checkpoint(1)) == {1}


def test_a_branch_goes_on_bitwise_without_what_it_began_with(
    make_config: MakeConfig, trunk: RunFolder
) -> None:
    keys = (
        "train.max_steps=3",
        "train.save_every_steps=1",
        "train.schedule=wsd",
        "train.decay_steps=3",
        "train.warmup_steps=0",
        "train.keep_checkpoints=9",
        "seed=5",
    )
    config = make_config("branch", *keys, f"train.init_from={trunk.checkpoint(4)}")
    said = list[str]()
    run = finished(config, said)
    assert any("step 4 of a run, " in line for line in said)
    assert counted_steps(run.checkpoint(3)) == {3}
    before, record = trained(run.final), (run.final / "init_from.json").read_bytes()
    for gone in (trunk.root, run.final, run.checkpoint(2), run.checkpoint(3)):
        shutil.rmtree(gone)
    go_on(config)
    assert are_equal(trained(run.final), before)
    assert (run.final / "init_from.json").read_bytes() == record
    shutil.rmtree(run.final)
    with pytest.raises(RunFolderError, match=r"train\.init_from: .* -> None"):
        go_on(make_config("branch", *keys))


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (("method.expansion.ratio=0.5",), r"method\.expansion\.ratio: 0\.25 -> 0\.5"),
        (
            ("method.variant=full", "method.collaboration.layers=null"),
            "method.variant: 'route' -> 'full'",
        ),
        (("train.init_from=nowhere",), "nowhere: is neither a checkpoint"),
        (("train.init_from=https://example.org/x",), "is a URL"),
    ],
)
def test_what_a_run_cannot_begin_with_is_refused_in_one_line_before_anything_is_written(
    make_config: MakeConfig, trunk_once: Path, tmp_path: Path, keys: tuple[str, ...], told: str
) -> None:
    with refused((ConfigError, RunFolderError), told):
        run_pipeline(make_config("branch", f"train.init_from={trunk_once}/final", *keys))
    assert not (tmp_path / "branch" / "upscaled").exists()


def test_another_base_and_a_damaged_trunk_are_refused(
    make_config: MakeConfig, trunk: RunFolder, shared_data: Path
) -> None:
    checkpoint = f"train.init_from={trunk.checkpoint(6)}"
    with pytest.raises(RunFolderError, match="its base is not this run's"):
        finished(make_config("base", checkpoint, f"model.base={shared_data / 'ckpt-eltec' / 'hf'}"))
    (trunk.checkpoint(6) / "trained.safetensors").write_bytes(b"")
    with pytest.raises(StorageError, match=r"trained\.safetensors"):
        finished(make_config("damaged", checkpoint))
