from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from scale_cli.config.schema import MethodConfig
from scale_cli.errors import ConfigError
from scale_cli.export.dense import plain_model
from scale_cli.methods import METHODS
from scale_cli.methods.llama_pro import LlamaPro, LlamaProConfig
from scale_cli.methods.recipes import trainable_parameters
from scale_cli.upscale.building import MethodModel, build_model
from tests.model.test_families import answered
from tests.widening import move, random_ids, real_base

STORIES = "ckpt-stories260K"
IDS = random_ids(3, 40, below=512)
# The embedding that is the head too, as PEFT names what it trains whole.
_PEFTS_TIED = "base_model.model.model.embed_tokens.modules_to_save.default.weight"


def prepared(base: PreTrainedModel, variant: str, **settings: Any) -> MethodModel:
    return build_model(
        base, MethodConfig.model_validate({"variant": variant, **settings}), seed=0
    ).eval()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "variant", [name for name, method in METHODS.items() if method.trains and not method.widens]
)
def test_a_baseline_starts_as_its_base_trains_in_float32_and_is_exported_as_a_model_of_the_bases_class(
    shared_data: Path, tmp_path: Path, variant: str, dtype: str
) -> None:
    model = prepared(real_base(shared_data, STORIES, dtype), variant)
    base = real_base(shared_data, STORIES)
    if dtype == "float32":
        assert torch.equal(answered(METHODS[variant].as_base(model), IDS), answered(base, IDS))
    assert {parameter.dtype for parameter in trainable_parameters(model).values()} == {
        torch.float32
    }
    move(model, 0.02)
    trained = answered(model, IDS)
    assert not torch.equal(trained, answered(base, IDS))
    plain_model(model, "float32").save_pretrained(tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(exported).__name__ == "LlamaForCausalLM"
    if dtype == "float32":
        assert (answered(exported, IDS) - trained).abs().max() <= 1e-4
    assert torch.equal(answered(model, IDS), trained), (
        "exporting changes nothing in the trained model"
    )


def test_each_baseline_trains_what_its_table_says(shared_data: Path) -> None:
    names = {name for name, _ in real_base(shared_data, STORIES).named_parameters()}
    assert trainable_parameters(prepared(real_base(shared_data, STORIES), "full")).keys() == names
    frozen = ("model.embed_tokens.", "model.layers.0.", "model.layers.1.", "model.layers.2.")
    kept = {name for name in names if not name.startswith(frozen)}
    assert trainable_parameters(prepared(real_base(shared_data, STORIES), "freeze")).keys() == kept
    adapters = trainable_parameters(
        prepared(real_base(shared_data, STORIES), "lora", lora={"targets": ["q_proj"]})
    )
    assert len(adapters) == 2 * 5 and all("q_proj.lora_" in name for name in adapters)
    whole = trainable_parameters(
        prepared(real_base(shared_data, STORIES), "lora", lora={"embeddings": True, "rank": 2})
    )
    assert [name for name in whole if "lora_" not in name] == [_PEFTS_TIED]
    deeper = trainable_parameters(
        prepared(real_base(shared_data, STORIES), "llama-pro", llama_pro={"num_blocks": 2})
    )
    assert {name.split(".")[2] for name in deeper} == {"2", "6"}, "above layers 1 and 4 of 5"


@given(num_layers=st.integers(1, 64), data=st.data())
def test_copies_stand_at_even_spacing_and_the_base_keeps_its_order(
    num_layers: int, data: st.DataObject
) -> None:
    num_blocks = data.draw(st.integers(1, num_layers))
    settings = LlamaProConfig(num_blocks=num_blocks)
    order = LlamaPro().plain_training(settings, num_layers).layers
    assert [layer for layer, new in order if not new] == list(range(num_layers))
    copies = [layer for layer, new in order if new]
    assert len(copies) == num_blocks and copies[-1] == num_layers - 1
    gaps = {after - before for before, after in zip([-1, *copies], copies, strict=False)}
    assert max(gaps) - min(gaps) <= 1
    assert all(
        order[place - 1] == (layer, False) for place, (layer, new) in enumerate(order) if new
    )


@pytest.mark.parametrize(
    ("variant", "settings", "field"),
    [
        ("llama-pro", {"llama_pro": {"num_blocks": 6}}, "method.llama_pro.num_blocks"),
        ("freeze", {"freeze": {"num_layers": 6}}, "method.freeze.num_layers"),
        ("lora", {"lora": {"targets": ["no_such_proj"]}}, "method.lora.targets"),
        (
            "lora",
            {"lora": {"targets": ["q_proj", "wrong", "9.mlp.up_proj"]}},
            r"method.lora.targets: the base has no 9\.mlp\.up_proj, wrong; it has q_proj, ",
        ),
    ],
)
def test_what_the_base_does_not_have_is_refused_by_field(
    shared_data: Path, variant: str, settings: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError, match=field):
        prepared(real_base(shared_data, STORIES), variant, **settings)
