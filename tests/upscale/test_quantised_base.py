"""A base in 8 bits: what holds of a whole base, bit for bit, holds of what transformers quantises."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TorchAoConfig

from scale_cli.commands.plan import plan
from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.config.schema import MethodConfig, ModelConfig, RunConfig
from scale_cli.errors import BaseModelError, ConfigError, RunFolderError
from scale_cli.planning.step import step_cost
from scale_cli.runs.opened import Run
from scale_cli.training.objective import for_training
from scale_cli.upscale.base import (
    base_without_weights,
    check_finite,
    load_base,
    load_base_config,
)
from scale_cli.upscale.base_hashes import changed_tensors, record_base
from scale_cli.upscale.building import start_model
from scale_cli.upscale.preservation import trained_logits
from scale_cli.upscale.quantised_base import (
    is_quantised,
    parts_of,
    torchao_settings,
)
from scripts.benchmark.counting import kept_for_backward, num_bytes
from tests.small_runs import export, petitions_run, train_run
from tests.training.conftest import are_equal, trained
from tests.widening import lower_layers, real_ids

checkpoints = pytest.mark.parametrize("checkpoint", ["ckpt-stories260K", "ckpt-eltec"])


def named(shared_data: Path, checkpoint: str) -> ModelConfig:
    base = str(shared_data / checkpoint / "hf")
    return ModelConfig(base=base, dtype="bfloat16", quantisation="int8")


def without_weights(model: ModelConfig) -> Any:
    return base_without_weights(load_base_config(model), model.dtype, model.quantisation)


def whole(model: ModelConfig) -> ModelConfig:
    return model.model_copy(update={"quantisation": None})


def loaded_plainly(model: ModelConfig) -> Any:
    """The quantised base as anybody loads it, by transformers alone."""
    settings = TorchAoConfig(torchao_settings())
    dtype = getattr(torch, model.dtype)
    return AutoModelForCausalLM.from_pretrained(
        model.base, dtype=dtype, quantization_config=settings
    ).eval()


def run_config(
    shared_data: Path,
    folder: Path,
    variant: str = "route",
    dtype: Any = "bfloat16",
    **train: Any,
) -> RunConfig:
    config = petitions_run(shared_data, folder, variant=variant).model_dump()
    base = lower_layers(shared_data, "ckpt-eltec", 2)
    config["model"] |= ModelConfig(base=str(base), dtype=dtype, quantisation="int8").model_dump()
    config["train"] |= {"max_steps": 4, "save_every_steps": 2, "keep_checkpoints": 2, **train}
    return RunConfig.model_validate(config)


@checkpoints
def test_a_quantised_base_is_the_one_that_transformers_loads_bit_for_bit(
    shared_data: Path, checkpoint: str
) -> None:
    model = named(shared_data, checkpoint)
    base = load_base(model)
    plainly = loaded_plainly(model)
    ids = real_ids(shared_data, checkpoint)[:200].reshape(4, 50)
    with torch.no_grad():
        assert torch.equal(base(ids).logits, plainly(ids).logits)
    record = record_base(base, model)
    assert changed_tensors(plainly, record) == []
    assert changed_tensors(load_base(whole(model)), record)
    held = [name for name, tensor in base.named_parameters() if is_quantised(tensor)]
    assert len(held) == 7 * base.config.num_hidden_layers
    assert "quantization_config" not in base.config.to_diff_dict()


@checkpoints
def test_every_bit_that_a_quantised_weight_is_held_in_is_hashed_and_checked(
    shared_data: Path, checkpoint: str
) -> None:
    model = named(shared_data, checkpoint)
    base = load_base(model)
    record = record_base(base, model)
    weight = base.model.layers[1].mlp.up_proj.weight
    for part in parts_of(weight):
        before = part.clone()
        part.reshape(-1)[-1:].view(torch.uint8)[0] ^= 1
        assert changed_tensors(base, record) == ["model.layers.1.mlp.up_proj.weight"]
        part.copy_(before)
    assert changed_tensors(base, record) == []
    next(part for part in parts_of(weight) if part.is_floating_point()).fill_(torch.nan)
    with pytest.raises(BaseModelError, match=r"here: \S*up_proj.weight .* not finite"):
        check_finite(base.named_parameters(), "here")


@pytest.mark.parametrize("variant", ["lora", "route"])
def test_training_and_resuming_leave_a_quantised_base_as_it_was_and_an_export_holds_numbers(
    shared_data: Path, tmp_path: Path, variant: str
) -> None:
    config = train_run(run_config(shared_data, tmp_path / "run", variant, "float32"))
    broken_off = config.model_copy(update={"output_dir": tmp_path / "resumed"})
    shutil.copytree(config.output_dir, broken_off.output_dir)
    for later in ("final", "checkpoints/step-00000004"):
        shutil.rmtree(broken_off.output_dir / later)
    train(broken_off, "auto", print)
    assert are_equal(*(trained(one.output_dir / "final") for one in (config, broken_off)))
    model: Any = Run(config).open_final().load()
    ids = real_ids(shared_data, "ckpt-eltec")[:100].reshape(2, 50)
    with torch.no_grad():
        of_base = loaded_plainly(config.model)(ids).logits
        learned = trained_logits(model, ids)
        assert not torch.equal(learned, of_base)
        if variant == "route":
            assert torch.equal(
                model.base_logits(model.final_states(ids, with_base_head=True)), of_base
            )
    folder = export(config).folder
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    assert [any(map(is_quantised, of.parameters())) for of in (model, plain)] == [True, False]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, learned, rtol=0.0, atol=1e-3)
    assert "linear maps in int8, by torchao" in (folder / "README.md").read_text()
    with pytest.raises(RunFolderError, match=r"model\.quantisation: 'int8' -> None"):
        Run(config.model_copy(update={"model": whole(config.model)})).open_final()


def test_blocks_start_from_what_quantised_weights_stand_for(shared_data: Path) -> None:
    model: Any = start_model(load_base(named(shared_data, "ckpt-eltec")), MethodConfig(), seed=0)
    frozen = model.base.model.layers[0].mlp.up_proj
    added = model.expansion.layers[0].up_proj
    rows = frozen.weight.dequantize().to(added.weight_21)
    copied = (added.weight_21[:, None] == rows[None]).all(dim=2)
    assert copied.any(dim=1).all()
    eye = torch.eye(frozen.in_features, dtype=torch.bfloat16)
    torch.testing.assert_close(frozen(eye).T, frozen.weight.dequantize(), rtol=2**-7, atol=0.0)


@pytest.mark.parametrize("variant", ["lora", "adapt"])
def test_a_plan_counts_the_bytes_that_a_quantised_base_takes_and_lets_a_step_keep(
    shared_data: Path, variant: Any
) -> None:
    model = named(shared_data, "ckpt-eltec")
    method = MethodConfig(variant=variant)
    base = load_base(model)
    planned = step_cost(base.config, method, "bf16", dtype="bfloat16", quantisation="int8")
    parts = [part for parameter in base.parameters() for part in parts_of(parameter)]
    assert planned.frozen_bytes == sum(part.untyped_storage().nbytes() for part in parts)
    assert planned.num_frozen == sum(parameter.numel() for parameter in base.parameters())
    real = start_model(base, method, 0)
    step = for_training(real.train(), petitions_run(shared_data, Path("unused")).train)
    ids = torch.zeros(1, 89, dtype=torch.long)  # a window that no width is a multiple of
    with kept_for_backward(real, "cpu", "bf16") as kept:
        step(input_ids=ids, labels=ids, shift_labels=ids, num_items_in_batch=89, use_cache=False)
    of_weights = [tensor for tensor in kept.values() if tensor.untyped_storage().nbytes() % 89]
    assert planned.copies_bytes == pytest.approx(num_bytes(of_weights), rel=0.02)


def test_a_plan_of_a_quantised_base_says_what_cannot_be_had(
    shared_data: Path, tmp_path: Path
) -> None:
    config = run_config(shared_data, tmp_path / "run")
    planned = plan(config, flops=1e12, num_processes=1, compared=True)
    of_quantised = planned.methods[0]
    base = without_weights(config.model)
    assert "model.quantisation" in planned.refused["full"]
    parts = [part for parameter in base.parameters() for part in parts_of(parameter)]
    assert of_quantised.memory.frozen == sum(part.nbytes for part in parts)


@pytest.mark.parametrize("variant", ["full", "llama-pro"])
def test_what_trains_weights_of_the_base_is_refused_before_anything_is_written(
    shared_data: Path, tmp_path: Path, variant: str
) -> None:
    config = run_config(shared_data, tmp_path / "run", variant)
    with pytest.raises(ConfigError, match=f"method.variant: {variant} trains weights of the base"):
        upscale(config)
    assert not config.output_dir.exists()


def test_a_base_that_is_quantised_already_is_refused_by_name(
    shared_data: Path, tmp_path: Path
) -> None:
    quantised = tmp_path / "quantised"
    loaded_plainly(named(shared_data, "ckpt-eltec")).save_pretrained(quantised)
    with pytest.raises(BaseModelError, match="is already quantised"):
        load_base(ModelConfig(base=str(quantised)))
