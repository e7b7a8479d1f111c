import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scale_cli.commands.upscale import upscale, upscale_is_finished
from scale_cli.config.schema import RunConfig
from scale_cli.data.corpora import open_sources, text_to_learn
from scale_cli.errors import BaseModelError, PreservationError, RunFolderError
from scale_cli.export.sizes import served_size
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.model.pass_scale import FinalStates
from scale_cli.report import quantity
from scale_cli.runs.opened import Run
from scale_cli.upscale.base import load_base
from scale_cli.upscale.base_tokenizer import load_tokenizer
from scale_cli.upscale.building import MethodModel, start_model
from scripts.from_scratch import train_tokenizer, write_base
from tests.small_runs import small_run
from tests.widening import load_model, random_ids, tiny_llama


@pytest.fixture
def configured(base: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """A function from overrides to a config."""
    route = {"variant": "route", "collaboration": {"layers": "top:1"}}
    return lambda *overrides: small_run(tmp_path, base, *overrides, method=route)


@pytest.fixture
def config(configured: Callable[..., RunConfig]) -> RunConfig:
    return configured()


def served(model: MethodModel) -> Tensor:
    ids = random_ids(2, 20, below=512)
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize(
    "overrides",
    [
        ["method={variant: preserve}"],
        ["method={variant: adapt}", "model.dtype=bfloat16"],
        ["model.dtype=bfloat16"],
    ],
)
def test_what_is_loaded_is_what_was_made_bit_for_bit(
    configured: Callable[..., RunConfig], overrides: list[str]
) -> None:
    config = configured(*overrides)
    loaded = load_model(upscale(config).path, config.model)
    sources = config.corpus.sources
    corpora = open_sources(config, sources, Run(config).tokenizer)
    base = load_base(config.model)
    text = text_to_learn(sources, corpora, base.config.vocab_size)
    model = start_model(base, config.method, config.seed, text=text)
    made, read = model.state_dict(), loaded.state_dict()
    assert made.keys() == read.keys()
    for name, tensor in made.items():
        assert torch.equal(tensor, read[name]) and tensor.dtype == read[name].dtype
    assert loaded.config.to_dict() | {"dtype": None} == model.config.to_dict() | {"dtype": None}
    assert torch.equal(served(loaded), served(model.eval()))
    assert not loaded.training
    for name, parameter in loaded.named_parameters():
        assert parameter.requires_grad == name.startswith("expansion.")


def test_the_folder_holds_the_expansion_and_names_its_base_which_is_as_it_was(
    config: RunConfig, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, before = upscale(config), load_file(base / "model.safetensors")
    names = {file.name for file in made.path.iterdir()}
    files = "config.json base.json trained.safetensors manifest.json scale.yaml tokenizer.json"
    assert names >= {*files.split()}
    assert not any(name.endswith((".bin", ".pt", ".pkl", ".py")) for name in names)
    parameters = dict(made.load_to_train().named_parameters())
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    assert load_file(made.path / "trained.safetensors").keys() == trained.keys()
    assert {f"base.{name}" for name in made.record.tensors} == parameters.keys() - trained.keys()
    for name in made.record.tensors:
        assert torch.equal(parameters[f"base.{name}"], before[name])
    lines = capsys.readouterr().out.splitlines()
    told = dict(line.split(maxsplit=1) for line in lines if not line.startswith("base hash"))
    assert told["frozen"] == "260,032 parameters"
    num_trained = sum(parameter.numel() for parameter in trained.values())
    assert told["trainable"] == f"{num_trained:,} parameters"
    assert told["sizes"] == "hidden 64 + 16, MLP 172 + 43, heads 8 + 2, KV heads 4 + 1"


def test_the_real_ratio_and_the_size_served_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nine heads in groups of three: 0.25 of the channels becomes one group, a third."""
    tokenizer = train_tokenizer(["Once upon a time there was a cat."], 280)
    nine_heads = tiny_llama(
        vocab_size=len(tokenizer), hidden_size=72, num_attention_heads=9, num_key_value_heads=3
    )
    write_base(tmp_path / "base", nine_heads, tokenizer)

    def told(ratio: float) -> dict[str, str]:
        config = small_run(tmp_path, tmp_path / "base", f"method.expansion.ratio={ratio:.17g}")
        made = upscale(config)
        lines = capsys.readouterr().out.splitlines()
        size = served_size(made.load(), made.run.base_config, "float32")
        assert f"served         {size}" in lines
        return dict(line.split(maxsplit=1) for line in lines)

    rounded = told(0.25)
    assert rounded["ratio"] == "0.333: 0.25, rounded to whole heads"
    base_bytes = 4 * nine_heads.num_parameters()
    assert f"the base: {quantity(base_bytes / 4)}, {quantity(base_bytes, 'B')}" in rounded["served"]
    assert "ratio" not in told(1 / 3)


def test_the_same_config_makes_the_same_files(configured: Callable[..., RunConfig]) -> None:
    one, again, other = (
        (upscale(configured(f"seed={seed}")).path / "trained.safetensors").read_bytes()
        for seed in (0, 0, 1)
    )
    assert one == again != other


def test_base_logits_that_are_not_preserved_leave_nothing_behind(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = ScaleForCausalLM.base_logits

    def off_by_a_bit(model: ScaleForCausalLM, states: FinalStates) -> Tensor:
        logits = exact(model, states)
        logits[0, -1, 0] = torch.nextafter(logits[0, -1, 0], torch.tensor(torch.inf))
        return logits

    monkeypatch.setattr(ScaleForCausalLM, "base_logits", off_by_a_bit)
    with pytest.raises(PreservationError, match="not preserved on 'It was the best of times"):
        upscale(config)
    assert not (config.output_dir / "upscaled").exists()


def test_a_base_with_a_weight_that_is_not_finite_or_too_many_ids_is_refused(
    base: Path, config: RunConfig
) -> None:
    tensors = load_file(base / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 4] = torch.nan
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BaseModelError, match=rf"{name} .* not finite \(1 of 11,008\)"):
        upscale(config)
    tokenizer = load_tokenizer(config.model)
    tokenizer.add_tokens(["Lily"])
    tokenizer.save_pretrained(base)
    with pytest.raises(BaseModelError, match="has the id 512, but"):
        upscale(config)
    assert not (config.output_dir / "upscaled").exists()


def test_upscaling_again_replaces_the_folder_until_training_has_begun(config: RunConfig) -> None:
    folder = upscale(config).path
    (folder / "left-over").write_text("")
    assert upscale(config).path == folder
    assert not (folder / "left-over").exists()
    (config.output_dir / "checkpoints" / "step-00000001").mkdir(parents=True)
    with pytest.raises(RunFolderError, match="training from this folder has already begun"):
        upscale(config)


def test_upscaling_is_finished_for_the_same_base_and_method_only(
    configured: Callable[..., RunConfig],
) -> None:
    assert not upscale_is_finished(Run(configured()))
    upscale(configured())
    assert upscale_is_finished(Run(configured()))
    for other in ("method={variant: adapt}", "seed=1", "model.dtype=bfloat16"):
        assert not upscale_is_finished(Run(configured(other)))


def test_a_tokenizer_of_its_own_place_may_move_but_not_change(
    base: Path, configured: Callable[..., RunConfig], tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    for file in base.glob("tokenizer*"):
        file.rename(tmp_path / "one" / file.name)

    def given(place: str) -> RunConfig:
        return configured(f"model.tokenizer={tmp_path / place}")

    assert (upscale(given("one")).path / "tokenizer.json").is_file()
    shutil.copytree(tmp_path / "one", tmp_path / "moved")
    assert upscale_is_finished(Run(given("moved")))
    other = load_tokenizer(given("one").model)
    other.eos_token = "<unk>"
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(BaseModelError, match=r"the tokenizer of .*other is not the one"):
        upscale_is_finished(Run(given("other")))
