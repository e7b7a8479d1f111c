from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scale_cli.commands.upscale import upscale, upscale_is_finished
from scale_cli.config.schema import ModelConfig, RunConfig
from scale_cli.errors import BaseModelError, PreservationError, RunFolderError
from scale_cli.model.branches_scale import FinalStates
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.storage.records import BaseRecord
from scale_cli.upscale.method import MethodModel
from scale_cli.upscale.run import Run, check_tokenizer, load_tokenizer
from tests.widening import load_model

ROUTE: dict[str, Any] = {"variant": "route", "collaboration": {"layers": "top:1"}}


@pytest.fixture
def base(shared_data: Path, tmp_path: Path) -> Path:
    """A copy of a real checkpoint that may be tampered with."""
    return Path(shutil.copytree(shared_data / "ckpt-stories260K" / "hf", tmp_path / "base"))


def configured(base: Path, output_dir: Path, dtype: str = "float32", seed: int = 0, **method: Any) -> RunConfig:
    text = output_dir.parent / "text.txt"
    text.write_text("It is not read here.", encoding="utf-8")
    return RunConfig.model_validate(
        {
            "output_dir": output_dir,
            "seed": seed,
            "model": {"base": str(base), "dtype": dtype},
            "method": method or ROUTE,
            "corpus": {"sequence_length": 32, "sources": [{"name": "text", "path": str(text), "language": "ko"}]},
            "train": {"max_steps": 1},
        }
    )


@pytest.fixture
def config(base: Path, tmp_path: Path) -> RunConfig:
    return configured(base, tmp_path / "run")


def served(model: MethodModel) -> Tensor:
    ids = torch.randint(0, 512, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


@pytest.mark.parametrize(
    ("method", "dtype"), [({"variant": "preserve"}, "float32"), ({"variant": "adapt"}, "bfloat16"), (ROUTE, "bfloat16")]
)
def test_what_is_loaded_is_what_was_made_bit_for_bit(
    base: Path, tmp_path: Path, dtype: str, method: dict[str, Any]
) -> None:
    config = configured(base, tmp_path / "run", dtype, **method)
    summary = upscale(config)
    loaded = load_model(summary.folder, config.model)
    made, read = summary.model.state_dict(), loaded.state_dict()
    assert made.keys() == read.keys()
    assert all(torch.equal(made[name], read[name]) and made[name].dtype == read[name].dtype for name in made)
    assert loaded.config.to_dict() | {"dtype": None} == summary.model.config.to_dict() | {"dtype": None}
    assert torch.equal(served(loaded), served(summary.model.eval()))
    assert not loaded.training
    assert all(
        parameter.requires_grad == name.startswith("expansion.") for name, parameter in loaded.named_parameters()
    )


def test_the_folder_holds_the_expansion_and_what_it_belongs_to_and_the_base_is_as_it_was(
    config: RunConfig, base: Path
) -> None:
    summary, before = upscale(config), load_file(base / "model.safetensors")
    names = {file.name for file in summary.folder.iterdir()}
    assert names >= {"config.json", "base.json", "trained.safetensors", "manifest.json", "scale.yaml", "tokenizer.json"}
    assert not any(file.suffix in (".bin", ".pt", ".pkl", ".py") for file in summary.folder.iterdir())
    parameters = dict(summary.model.named_parameters())
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    assert load_file(summary.folder / "trained.safetensors").keys() == trained.keys()
    assert BaseRecord.load(summary.folder) == summary.record
    assert {f"base.{name}" for name in summary.record.tensors} == parameters.keys() - trained.keys()
    assert all(torch.equal(parameters[f"base.{name}"], before[name]) for name in summary.record.tensors)
    lines = dict(line.split(maxsplit=1) for line in summary.lines() if not line.startswith("base hash"))
    assert lines["frozen"] == "260,032 parameters"
    assert lines["trainable"] == f"{sum(parameter.numel() for parameter in trained.values()):,} parameters"
    assert lines["sizes"] == "hidden 64 + 16, MLP 172 + 43, heads 8 + 2, KV heads 4 + 1"
    assert lines["collaboration"] == "layers 4"


def test_the_same_config_makes_the_same_files(base: Path, tmp_path: Path) -> None:
    one, again, other = (
        upscale(configured(base, tmp_path / name, seed=seed)).folder / "trained.safetensors"
        for name, seed in (("one", 0), ("again", 0), ("other", 1))
    )
    assert one.read_bytes() == again.read_bytes()
    assert one.read_bytes() != other.read_bytes()


def test_a_base_in_another_dtype_or_of_another_bit_configuration_or_tokenizer_is_refused(
    config: RunConfig, base: Path
) -> None:
    summary, weights, told = upscale(config), base / "model.safetensors", base / "config.json"
    with pytest.raises(BaseModelError, match="not the base that was widened"):
        load_model(summary.folder, ModelConfig(base=config.model.base, dtype="bfloat16"))
    before = told.read_text(encoding="utf-8")
    told.write_text(json.dumps(json.loads(before) | {"rms_norm_eps": 1e-3}), encoding="utf-8")
    with pytest.raises(BaseModelError, match=r"config\.json differs"):
        load_model(summary.folder, config.model)
    told.write_text(before, encoding="utf-8")
    load_model(summary.folder, config.model)
    check_tokenizer(load_tokenizer(config.model), summary.record)
    changed = load_tokenizer(config.model)
    changed.add_tokens(["Lily"])
    with pytest.raises(BaseModelError, match="tokenizer"):
        check_tokenizer(changed, summary.record)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(BaseModelError, match=r"not the base that was widened .* differs"):
        load_model(summary.folder, config.model)


def test_base_logits_that_are_not_preserved_leave_nothing_behind(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = ScaleForCausalLM.base_logits

    def off_by_a_bit(model: ScaleForCausalLM, states: FinalStates) -> Tensor:
        logits = exact(model, states)
        logits[0, -1, 0] = torch.nextafter(logits[0, -1, 0], torch.tensor(torch.inf))
        return logits

    monkeypatch.setattr(ScaleForCausalLM, "base_logits", off_by_a_bit)
    with pytest.raises(PreservationError, match="the base logits are not preserved on 'It was the best of times"):
        upscale(config)
    assert not (config.output_dir / "upscaled").exists()


def test_a_base_with_a_weight_that_is_not_finite_is_refused_by_its_name(base: Path, config: RunConfig) -> None:
    tensors = load_file(base / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 4] = torch.nan
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BaseModelError, match=rf"{name} of .*base holds numbers that are not finite \(1 of 11,008\)"):
        upscale(config)
    assert not (config.output_dir / "upscaled").exists()


def test_upscaling_again_replaces_the_folder_until_training_has_begun(config: RunConfig) -> None:
    folder = upscale(config).folder
    (folder / "left-over").write_text("", encoding="utf-8")
    assert upscale(config).folder == folder
    assert not (folder / "left-over").exists()
    (config.output_dir / "checkpoints").mkdir()
    with pytest.raises(RunFolderError, match="training has begun"):
        upscale(config)


def test_upscaling_is_finished_for_the_same_base_and_method_only(base: Path, config: RunConfig) -> None:
    assert not upscale_is_finished(Run(config))
    upscale(config)
    assert upscale_is_finished(Run(config))
    others = [
        configured(base, config.output_dir, variant="adapt"),
        configured(base, config.output_dir, seed=1),
        configured(base, config.output_dir, "bfloat16"),
    ]
    assert not any(upscale_is_finished(Run(other)) for other in others)


def test_a_tokenizer_with_more_ids_than_the_embedding_is_refused(base: Path, config: RunConfig) -> None:
    tokenizer = load_tokenizer(config.model)
    tokenizer.add_tokens(["Lily"])
    tokenizer.save_pretrained(base)
    with pytest.raises(BaseModelError, match="513 ids, the base's embedding 512"):
        upscale(config)


def test_a_folder_that_is_not_ours_is_never_replaced(config: RunConfig) -> None:
    thesis = config.output_dir / "upscaled" / "thesis.txt"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("precious", encoding="utf-8")
    with pytest.raises(RunFolderError, match="not a folder of ours"):
        upscale(config)
    assert thesis.read_text(encoding="utf-8") == "precious"


def test_a_tokenizer_of_its_own_place_may_move_but_not_change(base: Path, config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    for file in base.glob("tokenizer*"):
        file.rename(tmp_path / "one" / file.name)

    def given(place: str) -> RunConfig:
        model = config.model.model_copy(update={"tokenizer": str(tmp_path / place)})
        return config.model_copy(update={"model": model})

    assert (upscale(given("one")).folder / "tokenizer.json").is_file()
    shutil.copytree(tmp_path / "one", tmp_path / "moved")
    assert upscale_is_finished(Run(given("moved")))
    other = load_tokenizer(given("one").model)
    other.eos_token = "<unk>"
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(BaseModelError, match=r"the tokenizer of .*other is not the one"):
        upscale_is_finished(Run(given("other")))
