import json
import os
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from threading import local
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from scale_cli.config.schema import ModelConfig
from scale_cli.data.tokens import tokenizer_sha256
from scale_cli.errors import BaseModelError, StorageError
from scale_cli.processes import Share
from scale_cli.upscale import base as base_module
from scale_cli.upscale import base_hashes
from scale_cli.upscale.base import load_base, load_base_config, load_hashed_base, load_written
from scale_cli.upscale.base_files import BaseRecord, looks_local
from scale_cli.upscale.base_hashes import (
    changed_tensors,
    check_same_base,
    record_base,
    tensor_sha256,
)
from scale_cli.upscale.base_tokenizer import load_tokenizer
from tests.command_line import refused
from tests.threads_as_processes import in_processes
from tests.torture.attacker import edit_json
from tests.widening import tiny_llama


def named(folder: Path | str, dtype: Any = "float32") -> ModelConfig:
    return ModelConfig(base=str(folder), dtype=dtype)


@pytest.fixture
def model(base: Path) -> ModelConfig:
    return named(base)


def no_base(told: str, model: ModelConfig) -> str:
    """Return the message of a base that cannot be one, in which this is told."""
    with pytest.raises(BaseModelError, match=told) as error:
        load_base_config(model)
    return str(error.value)


def edit_config(folder: Path, **changes: Any) -> None:
    edit_json(folder / "config.json", changes)


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def flip_bit(tensor: Tensor, byte: int = 0, bit: int = 0) -> None:
    tensor.view(-1).view(torch.uint8)[byte] ^= 1 << bit


def test_a_hash_hangs_on_every_byte_on_shape_and_dtype_and_not_on_memory_layout() -> None:
    zeros = torch.zeros(2, 6)
    tensor = torch.arange(12.0).reshape(3, 4)
    others = [
        zeros.reshape(3, 4),
        zeros.reshape(12),
        zeros.to(torch.int32),
        torch.zeros(2, 12, dtype=torch.bfloat16),
    ]
    assert len({tensor_sha256(one) for one in [zeros, -zeros, *others]}) == 6
    assert tensor_sha256(tensor.T.contiguous().T) == tensor_sha256(tensor)
    before = tensor_sha256(tensor)
    for byte in range(tensor.numel() * tensor.element_size()):
        flip_bit(tensor, byte, byte % 8)
        assert tensor_sha256(tensor) != before
        flip_bit(tensor, byte, byte % 8)
    assert tensor_sha256(torch.empty(0, 3)) != tensor_sha256(torch.empty(3, 0))


@pytest.mark.parametrize("tied", [True, False])
def test_a_record_names_every_tensor_a_tied_one_once_and_its_content_hash_hangs_on_tensors_alone(
    tied: bool,
) -> None:
    base = tiny_llama(tie_word_embeddings=tied)
    record = record_base(base, named("tiny"))
    assert ("lm_head.weight" in record.tensors) is not tied
    assert len(record.tensors) == 2 + 3 * 9 + (not tied)
    assert BaseRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
    base.config._commit_hash = "0123abcd"
    elsewhere = record_base(base, named("there"))
    assert (record.revision, elsewhere.revision) == (None, "0123abcd")
    assert elsewhere.content_sha256 == record.content_sha256
    renamed = {f"{name}x": sha256 for name, sha256 in record.tensors.items()}
    other = BaseRecord("tiny", None, "float32", renamed, "", "")
    assert other.content_sha256 != record.content_sha256


def test_what_changed_is_named_and_nothing_else() -> None:
    base: Any = tiny_llama()
    record = record_base(base, named("tiny"))
    assert changed_tensors(base, record) == []
    check_same_base(base, record, "here")
    known = dict(record.tensors)
    sha256 = known.pop("model.norm.weight")
    other = BaseRecord("tiny", None, "float32", {**known, "gone.weight": sha256}, "", "")
    assert changed_tensors(base, other) == ["gone.weight", "model.norm.weight"]
    flip_bit(base.model.layers[1].mlp.up_proj.weight.data)
    assert changed_tensors(base, record) == ["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(BaseModelError, match=r"here: .*tiny in float32.*\.1\.mlp\.up_proj"):
        check_same_base(base, record, "here")
    assert len(changed_tensors(base.to(torch.bfloat16), record)) == len(record.tensors)


EMBEDDING = "model.embed_tokens.weight"
# What is changed in config.json, or of the tensors.
DAMAGED_CONFIGS: list[dict[str, Any]] = [
    {"model_type": "gpt2"},
    {"model_type": "nonesuch"},
    {"num_attention_heads": 7},
    {"num_key_value_heads": 3},
    {"model_type": "gemma3_text", "final_logit_softcapping": 30.0},
    {"rope_parameters": {"rope_type": "none"}},
    {"num_hidden_layers": 4},
]
UNASKED = {"model.layers.1.self_attn.q_proj.bias": torch.ones(64)}
DAMAGED_TENSORS: list[Callable[[dict[str, Tensor]], object]] = [
    lambda tensors: tensors.pop("model.norm.weight"),
    lambda tensors: tensors.update(UNASKED),
    lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING] + 1}),
    lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}),
]
DAMAGE: list[Callable[[Path], object]] = [
    *(partial(edit_config, **changes) for changes in DAMAGED_CONFIGS),
    *(partial(edit_tensors, edit=edit) for edit in DAMAGED_TENSORS),
    lambda folder: (folder / "config.json").unlink(),
    lambda folder: (folder / "config.json").write_text("{"),
    lambda folder: (folder / "model.safetensors").unlink(),
    lambda folder: os.truncate(folder / "model.safetensors", 5000),
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_base_that_is_damaged_or_not_supported_is_one_line_that_names_it(
    base: Path, damage: Callable[[Path], object]
) -> None:
    damage(base)
    with refused(BaseModelError, rf"^model\.base: .*{base}"):
        load_base(named(base))


def test_a_load_report_names_what_was_not_read_and_why_that_matters(
    base: Path, model: ModelConfig
) -> None:
    edit_tensors(base, lambda tensors: tensors.update(UNASKED))
    with pytest.raises(BaseModelError, match=r"layers\.1\.self_attn\.q_proj\.bias.*attention_bias"):
        load_base(model)
    with pytest.raises(StorageError, match=r"layers\.1\.self_attn\.q_proj\.bias"):
        load_written(AutoModelForCausalLM, base)


def test_leftovers_of_old_checkpoints_and_a_second_copy_of_a_tied_head_do_no_harm(
    base: Path, model: ModelConfig
) -> None:
    before = record_base(load_base(model), model)
    leftovers = {
        "lm_head.weight": load_file(base / "model.safetensors")[EMBEDDING].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.0.self_attn.rotary_emb.cos_cached": torch.ones(4),
        "model.position_ids": torch.ones(4),
    }
    edit_tensors(base, lambda tensors: tensors.update(leftovers))
    assert record_base(load_base(model), model) == before


def only(folder: Path, *names: str) -> None:
    """Leave only these files in a folder; the new ones are empty."""
    for file in folder.iterdir():
        if file.name not in names:
            file.unlink()
    for name in names:
        (folder / name).touch()


def test_what_is_no_base_is_said_to_be_what_it_is_with_what_to_do(
    base: Path, model: ModelConfig
) -> None:
    edit_json(base / "adapter_config.json", {"base_model_name_or_path": "org/base"})
    no_base(r"PEFT adapter.*org/base.*merge", model)
    only(base, "config.json", "pytorch_model.bin")
    no_base(r"pickled.*pytorch_model\.bin.*save_pretrained", model)
    only(base, "q4.gguf")
    no_base(r"GGUF.*made", model)
    for name in ("model.gguf", "owner/Model-7B-GGUF"):
        no_base("GGUF", named(name))


def test_a_relative_base_that_is_not_here_is_not_said_to_be_a_matter_of_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = no_base(r"neither a folder in .* nor", named("smol/base"))
    assert str(tmp_path) in told and "connect" not in told


def test_a_tokenizer_in_sentencepiece_alone_is_told_what_to_do(base: Path) -> None:
    (base / "tokenizer.json").unlink()
    (base / "tokenizer.model").write_bytes(b"\n\x03abc")
    with pytest.raises(BaseModelError, match=r"SentencePiece.*tokenizer\.json") as error:
        load_tokenizer(named(base))
    assert "tiktoken" not in str(error.value)


def test_a_size_that_no_model_has_is_refused_before_memory_is_asked_for(base: Path) -> None:
    wrong: list[object] = [0, 10**30, 1.5, True, []]
    whole = (base / "config.json").read_text()
    for name, size in product(base_module._SIZES, wrong):
        (base / "config.json").write_text(whole)
        edit_config(base, **{name: size})
        no_base(r"model\.base", named(base))


def test_a_base_without_a_tokenizer_may_be_given_one(base: Path, shared_data: Path) -> None:
    (base / "tokenizer.json").write_text("{")
    with refused(BaseModelError, r"^model\.base: the tokenizer of .* cannot be loaded"):
        load_tokenizer(named(base))
    for file in base.glob("tokenizer*"):
        file.unlink()
    with refused(BaseModelError, r"^model\.base: .* cannot be loaded; set model\.tokenizer"):
        load_tokenizer(named(base))
    elsewhere = shared_data / "ckpt-stories260K" / "hf"
    given = ModelConfig(base=str(base), tokenizer=str(elsewhere))
    its_own = named(elsewhere)
    assert len({tokenizer_sha256(load_tokenizer(model)) for model in (given, its_own)}) == 1
    with refused(BaseModelError, r"^model\.tokenizer: the tokenizer of nowhere cannot be loaded"):
        load_tokenizer(given.model_copy(update={"tokenizer": "nowhere"}))


def test_folders_and_hub_ids_are_told_apart(base: Path) -> None:
    assert all(looks_local(name) for name in ("./x", "../x", "/x", "~/x", "a/b/c", str(base)))
    assert not any(looks_local(name) for name in ("org/model", "gpt2"))
    no_base(r"\./nowhere is not a folder with a config\.json", named("./nowhere"))


def test_processes_of_a_machine_hash_a_base_once_between_them_and_all_are_told_what_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = tiny_llama()
    hashed = list[int]()
    current = local()
    record = record_base(base, named("tiny"))
    flip_bit(base.model.layers[2].mlp.down_proj.weight.data)
    hash_of = tensor_sha256

    def counting(tensor: Tensor) -> str:
        hashed.append(tensor.data_ptr())
        return hash_of(tensor)

    monkeypatch.setattr(base_hashes, "tensor_sha256", counting)
    monkeypatch.setattr(base_hashes, "share", lambda: current.place)

    def changed(place: Share) -> list[str]:
        current.place = place
        return changed_tensors(base, record, place)

    assert in_processes(monkeypatch, 3, changed) == [["model.layers.2.mlp.down_proj.weight"]] * 3
    assert sorted(hashed) == sorted(parameter.data_ptr() for parameter in base.parameters())


def test_a_base_is_hashed_once_in_a_process_and_again_when_its_files_change(
    base: Path, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, known = load_hashed_base(model)
    record = record_base(loaded, model, known=known)

    def refuse(_: Tensor) -> str:
        raise AssertionError("hashed again")

    with monkeypatch.context() as patched:
        patched.setattr(base_hashes, "tensor_sha256", refuse)
        again, known = load_hashed_base(model)
        check_same_base(again, record, "here", known=known)
        with pytest.raises(AssertionError, match="hashed again"):
            check_same_base(again, record, "here")

    assert load_hashed_base(named(base, "bfloat16"))[1] == {}

    edit_tensors(base, lambda tensors: flip_bit(tensors["model.norm.weight"]))
    changed, known = load_hashed_base(model)
    with pytest.raises(BaseModelError, match=r"model\.norm\.weight differs"):
        check_same_base(changed, record, "here", known=known)


def test_hashes_are_not_kept_where_files_change_while_they_are_read(
    base: Path, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_and_touch(model: ModelConfig) -> Any:
        loaded = load_base(model)
        edit_tensors(base, len)
        return loaded

    monkeypatch.setattr(base_module, "load_base", load_and_touch)
    loaded, known = load_hashed_base(model)
    record_base(loaded, model, known=known)
    monkeypatch.undo()
    assert load_hashed_base(model)[1] == {}


@pytest.mark.parametrize("place", ["", "final", "upscaled"])
def test_a_run_is_no_base(tmp_path: Path, place: str) -> None:
    folder = tmp_path / place
    folder.mkdir(exist_ok=True)
    record_base(tiny_llama(), ModelConfig(base="a base")).save(folder)
    with refused(BaseModelError, "is a run, which is no base for another"):
        load_base_config(named(tmp_path))
