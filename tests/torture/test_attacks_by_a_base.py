"""Attacks by a base model: none runs code, or reads what it names elsewhere."""

import json
import pickle
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command_line import Scale
from tests.small_runs import write_config
from tests.torture.attacker import REMOTE_MODEL, Evil, edit_json, evil_pickle, evil_python


def test_the_payloads_bite(canary: Path) -> None:
    pickle.loads(evil_pickle(canary))  # noqa: S301 (that is the point)
    canary.rmdir()
    exec(evil_python(canary))  # noqa: S102 (the attack)
    assert canary.is_dir()


@dataclass(frozen=True)
class Attack:
    """What is done to a base: files that go, files that come, and keys that its files get."""

    gone: tuple[str, ...] = ()
    pickles: tuple[str, ...] = ()
    code: str | None = None
    keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    harmless: bool = (
        False  # what a family of ours has without that code, and what no verb asks for, is no error
    )


_TEMPLATE = "{{ cycler.__init__.__globals__.os.mkdir('CANARY') }}"
_TOKENIZER = {
    "auto_map": {"AutoTokenizer": ["tokenization_evil.Evil"] * 2},
    "tokenizer_class": "Evil",
}
_NEW_FAMILY = {"model_type": "evil", "architectures": ["Evil"]}
ATTACKS = {
    "pickled weights": Attack(pickles=("model.safetensors",)),
    "pickled weights only": Attack(gone=("model.safetensors",), pickles=("pytorch_model.bin",)),
    "a model's code": Attack(
        code="modeling_evil.py", keys={"config.json": REMOTE_MODEL}, harmless=True
    ),
    "a new family's code": Attack(
        code="modeling_evil.py", keys={"config.json": REMOTE_MODEL | _NEW_FAMILY}
    ),
    "a tokenizer's code": Attack(
        code="tokenization_evil.py", keys={"tokenizer_config.json": _TOKENIZER}, harmless=True
    ),
    "a pickled tokenizer": Attack(
        gone=("tokenizer.json",),
        pickles=("tokenizer.model", "vocab.json", "tokenizer.pkl", "added_tokens.json"),
    ),
    "its own way to generate": Attack(
        code="custom_generate/generate.py",
        keys={"generation_config.json": {"custom_generate": "BASE", "do_sample": True}},
        harmless=True,
    ),
    "a template that escapes": Attack(
        keys={"tokenizer_config.json": {"chat_template": _TEMPLATE}}, harmless=True
    ),
    "a kernel from the hub": Attack(keys={"config.json": {"attn_implementation": "evil/kernel"}}),
    "a pickled adapter": Attack(
        pickles=("adapter_model.bin",),
        keys={
            "adapter_config.json": {"peft_type": "LORA", "base_model_name_or_path": "BASE", "r": 1}
        },
    ),
    "quantised by code": Attack(
        code="evil.py",
        keys={"config.json": {"quantization_config": {"quant_method": "evil.Evil"}}},
        harmless=True,
    ),
}


def attack_base(base: Path, canary: Path, attack: Attack) -> None:
    for name in attack.gone:
        (base / name).unlink()
    for name in attack.pickles:
        (base / name).write_bytes(evil_pickle(canary))
    if attack.code is not None:
        (base / attack.code).parent.mkdir(exist_ok=True)
        (base / attack.code).write_bytes(evil_python(canary))
    for name, keys in attack.keys.items():
        told = json.dumps(keys).replace("BASE", str(base)).replace("CANARY", str(canary))
        edit_json(base / name, json.loads(told))


def check_that_no_code_is_run(scale: Scale, base: Path, canary: Path, *, harmless: bool) -> None:
    config = write_config(canary.parent, base)
    done = scale("upscale", config)
    if done.exit_code == 0:
        assert harmless
        assert scale("train", config).exit_code == 0
        asked = ("--prompt", "One", "--max-new-tokens", "2")
        assert scale("generate", canary.parent / "run", *asked).exit_code == 0
    else:
        assert "model.base" in done.error()
        assert not (canary.parent / "run").exists()
    assert not canary.exists()


@pytest.mark.parametrize("name", ATTACKS)
def test_no_code_of_a_base_is_run(scale: Scale, base: Path, canary: Path, name: str) -> None:
    attack_base(base, canary, ATTACKS[name])
    check_that_no_code_is_run(scale, base, canary, harmless=ATTACKS[name].harmless)


def test_nor_is_what_torch_has_pickled(scale: Scale, base: Path, canary: Path) -> None:
    (base / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Evil(canary)}, base / "pytorch_model.bin")
    check_that_no_code_is_run(scale, base, canary, harmless=False)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/elsewhere.safetensors", ["x"]])
def test_an_index_of_shards_names_only_files_of_its_folder(
    scale: Scale, base: Path, tmp_path: Path, name: Any
) -> None:
    (base / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    index = base / "model.safetensors.index.json"
    edit_json(index, {"metadata": {}, "weight_map": {"model.norm.weight": name}})
    told = scale("upscale", write_config(tmp_path, base)).error()
    assert "model.safetensors.index.json names" in told


def of_tensors(**ends: tuple[int, int]) -> bytes:
    tensors = {
        name: {"dtype": "F32", "shape": [(end - at) // 4], "data_offsets": [at, end]}
        for name, (at, end) in ends.items()
    }
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + bytes(24)


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**63) + b"{}",
        of_tensors(a=(0, 16), b=(8, 24)),
        of_tensors(a=(0, 2**40)),
        struct.pack("<Q", 100_000) + b"[" * 100_000,
    ],
    ids=["longest header", "overlapping", "huge", "deep"],
)
def test_a_safetensors_bomb_is_one_error(
    scale: Scale, base: Path, tmp_path: Path, content: bytes
) -> None:
    (base / "model.safetensors").write_bytes(content)
    assert scale("upscale", write_config(tmp_path, base)).error().startswith("model.base: ")
    assert not (tmp_path / "run").exists()
