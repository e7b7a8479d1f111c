"""`model.base` that is a finished run: every verb, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from scale_cli.commands.export import export
from scale_cli.commands.plan import plan
from scale_cli.commands.upscale import upscale
from scale_cli.commands.verify import check_folders
from scale_cli.config.load import dump_config
from scale_cli.config.schema import ModelConfig, RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.errors import BaseModelError, ConfigError, StorageError
from scale_cli.export.dense import dense_model
from scale_cli.runs.folder import TRAINED
from scale_cli.runs.method_folder import load_any_base
from scale_cli.storage.atomic import load_tensors, new_folder, save_tensors
from scale_cli.training.sharding import shard_model
from scale_cli.upscale.base import root_model
from tests.command_line import Scale
from tests.export.conftest import configured
from tests.join.conftest import trained
from tests.widening import as_if_trained, load_model, load_widened, tiny_llama, widen


@pytest.fixture(scope="module")
def below(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A finished run that writes into its base's last layer."""
    folder = tmp_path_factory.mktemp("below") / "korean"
    return trained(shared_data, folder, collaboration={"layers": "top:1"})


def stacked(shared_data: Path, folder: Path, base: Path, **method: Any) -> RunConfig:
    config = configured(shared_data, folder, {"variant": "route", **method})
    return config.model_copy(update={"model": config.model.model_copy(update={"base": str(base)})})


def test_every_verb_takes_a_finished_run_for_its_base(
    shared_data: Path, below: RunConfig, tmp_path: Path, scale: Scale
) -> None:
    config = stacked(shared_data, tmp_path / "upon", below.output_dir)
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    before = {file: file.read_bytes() for file in (below.output_dir / "final").iterdir()}
    done = [scale(verb, path) for verb in ("upscale", "train", "evaluate")]
    assert [of_verb.exit_code for of_verb in done] == [0, 0, 0]
    assert "hidden 64 + 16 + 16" in done[0].stdout
    for name in ("llama", "transformers", "adapter"):
        assert scale("export", str(path), f"export.format={name}").exit_code == 0
    parity = json.loads((tmp_path / "upon" / "export" / "llama" / "parity.json").read_text())
    assert parity["max_logit_difference"] <= 1e-4
    assert not [
        check for check in check_folders(tmp_path / "upon") if check.failed or check.unchecked
    ]
    assert (
        scale(
            "generate", str(tmp_path / "upon"), "--prompt", "Lily", "--max-new-tokens", "3"
        ).exit_code
        == 0
    )
    assert {file: file.read_bytes() for file in before} == before

    report = json.loads((tmp_path / "upon" / "evaluation" / "report.json").read_text())
    assert scale("evaluate", str(below.output_dir / "final" / "scale.yaml")).exit_code == 0
    of_parent = json.loads((below.output_dir / "evaluation" / "report.json").read_text())
    for mine, parents in zip(report["corpora"], of_parent["corpora"], strict=True):
        adapted = parents["heads"]["adapted"]["nats_per_token"]
        assert mine["heads"]["base"]["nats_per_token"] == adapted, (
            "its base head is the parent's trained head"
        )


@torch.no_grad()
def test_a_dense_export_of_a_stack_has_its_logits() -> None:
    first = as_if_trained(
        widen(tiny_llama(attention_bias=True, mlp_bias=True), "route", "top:1", ratio=0.5)
    )
    second = as_if_trained(widen(first, "preserve", ratio=1.0), seed=2)
    third = as_if_trained(widen(second, "route", ratio=0.5), seed=3)
    ids = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(3))
    dense = dense_model(third, "float32", [ids])
    expected = third.adaptation_logits(third.final_states(ids, preserved=False))
    assert type(dense) is type(third.root)
    assert dense.config.hidden_size == 32 + 16 + 32 + 16
    assert (dense(input_ids=ids, use_cache=False).logits - expected).abs().max() <= 1e-4
    assert (
        expected - second.adaptation_logits(second.final_states(ids, preserved=False))
    ).abs().max() > 0.1


def test_a_run_its_final_folder_and_its_adapter_are_one_base_and_an_altered_one_is_refused(
    shared_data: Path, below: RunConfig, tmp_path: Path
) -> None:
    base = tmp_path / "korean"
    shutil.copytree(below.output_dir, base)
    config = stacked(shared_data, tmp_path / "upon", base)
    summary = upscale(config)
    assert set(summary.record.tensors) == {
        name for name, _ in load_any_base(config.model).named_parameters()
    }
    adapter = export(
        below.model_copy(update={"export": below.export.model_copy(update={"format": "adapter"})})
    ).folder
    for same in (base / "final", adapter):
        load_widened(config.output_dir / "upscaled", ModelConfig(base=str(same)))

    tensors = load_tensors(base / "final" / TRAINED)
    tensors["expansion.norm.weight"][0] += 1e-3
    altered = tmp_path / "altered"
    with new_folder(altered / "final") as partial:  # whole by its manifest, and yet another
        shutil.copytree(base / "final", partial, dirs_exist_ok=True)
        save_tensors(partial / TRAINED, tensors)
    for other in (ModelConfig(base=str(altered)), root_model(config.model)):
        with pytest.raises(BaseModelError, match="not the base that was widened"):
            load_model(config.output_dir / "upscaled", other)
    (base / "final" / TRAINED).write_bytes((base / "final" / TRAINED).read_bytes()[:-1] + b"\x01")
    with pytest.raises(StorageError, match="damaged"):
        load_model(config.output_dir / "upscaled", config.model)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            {"variant": "adapt"},
            r"^method\.collaboration\.layers: adapt writes into layers 0, 1, .* on a widened base may only read",
        ),
        ({"variant": "lora"}, r"^method\.variant: lora: a widened base can only be widened again"),
    ],
)
def test_a_method_that_would_change_what_is_below_is_refused(
    shared_data: Path, below: RunConfig, tmp_path: Path, method: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        upscale(stacked(shared_data, tmp_path / "upon", below.output_dir, **method))
    assert not (tmp_path / "upon" / "upscaled").exists()


def test_what_is_no_base_and_what_a_widened_one_is_not_for_are_refused(
    shared_data: Path, below: RunConfig, tmp_path: Path
) -> None:
    begun = configured(shared_data, tmp_path / "begun", {"variant": "route"})
    upscale(begun)
    baseline = trained(shared_data, tmp_path / "baseline", variant="freeze")
    refused: list[tuple[Path, Literal["float32", "bfloat16"], str]] = [
        (begun.output_dir, "float32", r"begun is an unfinished run, as it has no final/"),
        (
            baseline.output_dir,
            "float32",
            r"baseline has no expansion; export it as llama, and widen that export",
        ),
        (
            below.output_dir,
            "bfloat16",
            r"^model\.dtype: bfloat16, but .*korean was trained on a base in float32",
        ),
    ]
    for base, dtype, message in refused:
        with pytest.raises(BaseModelError, match=message):
            load_any_base(ModelConfig(base=str(base), dtype=dtype))
    with pytest.raises(
        ConfigError, match=r"korean is already widened, but `scale plan` takes only plain bases"
    ):
        plan(stacked(shared_data, tmp_path / "upon", below.output_dir), 1e9, 1)
    model = widen(widen(tiny_llama(), "preserve"), "preserve")
    mesh: Any = None  # it does not come to that
    with pytest.raises(
        ConfigError, match=r"^train\.sharding: all cannot split a base that is already widened"
    ):
        shard_model(model, TrainConfig(max_steps=1, sharding="all"), mesh)
