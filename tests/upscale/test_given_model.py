"""What the files of a model that others trained say of its base."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

from scale_cli.config.schema import ModelConfig
from scale_cli.errors import BaseModelError
from scale_cli.generation.generator import Generator, Sampling
from scale_cli.model.script_prior import PriorByScript
from scale_cli.storage.atomic import write_json
from scale_cli.upscale.given_model import GivenModel, beside_its_base, load_given
from tests.generation.test_routed_runs import PROMPTS, plain

ROUTER: dict[str, Any] = {
    "kind": "copy",
    "base": "some/base",
    "revision": "v1",
    "dtype": "bfloat16",
    "sha256": "ab",
    "prior": 0.9,
    "script_prior": 0.02,
    "script": [[0xAC00, 0xD7A3]],
}


def test_an_export_names_its_base_with_revision_dtype_hash_and_prior(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"scale_router": ROUTER})
    given = beside_its_base(str(tmp_path), None)
    assert given is not None
    assert given.base == ModelConfig(base="some/base", revision="v1", dtype="bfloat16")
    assert (given.sha256, given.prior) == ("ab", PriorByScript(0.9, 0.02, ROUTER["script"]))

    elsewhere = beside_its_base(str(tmp_path), "an/other")
    assert elsewhere is not None and elsewhere.sha256 == "ab"
    assert elsewhere.base == ModelConfig(base="an/other", dtype="bfloat16")


@pytest.mark.parametrize(
    ("named", "asked", "revision"),
    [("some/base", None, "v1"), ("some/base", "some/base", None), ("/a/folder", None, None)],
)
def test_an_adapter_names_the_revision_of_a_base_on_the_hub(
    tmp_path: Path, named: str, asked: str | None, revision: str | None
) -> None:
    keys = {"base_model_name_or_path": named, "revision": "v1"}
    write_json(tmp_path / "adapter_config.json", keys)
    given = beside_its_base(str(tmp_path), asked)
    assert given is not None and given.base == ModelConfig(base=named, revision=revision)


def test_an_adapters_own_tokenizer_is_used_and_its_padding_needs_no_row(
    stories: Path, tmp_path: Path
) -> None:
    settings = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    get_peft_model(plain(stories), settings).save_pretrained(str(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(stories)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path)

    few = Sampling(max_new_tokens=3)
    generator = Generator(tmp_path, base=str(stories))
    assert generator.tokenizer.chat_template == "{{ messages }}"
    assert generator.tokenizer.pad_token_id >= generator.model.config.vocab_size
    together = generator.continue_all(PROMPTS, few)
    assert len({len(generator.framed(prompt).ids_T) for prompt in PROMPTS}) > 1
    assert [one.completion for one in together] == [
        generator.continue_all([prompt], few)[0].completion for prompt in PROMPTS
    ]


@pytest.mark.parametrize("kind", ["adapter", "copy"])
def test_numbers_that_are_not_finite_are_told_by_their_tensor(
    stories: Path, tmp_path: Path, kind: str
) -> None:
    base = ModelConfig(base=str(stories))
    model = plain(stories)
    if kind == "adapter":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    trained = [
        one for name, one in model.named_parameters() if "q_proj" in name and one.requires_grad
    ]
    trained[-1].data[0, 1] = torch.nan
    model.save_pretrained(str(tmp_path))
    with pytest.raises(BaseModelError, match=r"q_proj\S*weight holds .* not finite \(1 of"):
        load_given(GivenModel(str(tmp_path), base))
