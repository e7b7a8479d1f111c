"""Attacks by a base model: none runs code, or reads what it names elsewhere."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command_line import Scale
from tests.torture.attacker import (
    Evil,
    edit_json,
    evil_pickle,
    evil_python,
    remote_model_of_a_known_family,
    remote_model_of_its_own_family,
    write_config,
)


def test_the_payloads_bite(canary: Path) -> None:
    pickle.loads(evil_pickle(canary))  # noqa: S301 (that is the point)
    canary.rmdir()
    exec(evil_python(canary))  # noqa: S102 (the attack)
    assert canary.is_dir()


# A base that is more than weights


def pickled_weights(base: Path, canary: Path) -> None:
    (base / "model.safetensors").write_bytes(evil_pickle(canary))


def pickled_weights_only(base: Path, canary: Path) -> None:
    (base / "model.safetensors").unlink()
    (base / "pytorch_model.bin").write_bytes(evil_pickle(canary))


def torch_weights_only(base: Path, canary: Path) -> None:
    (base / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Evil(canary)}, base / "pytorch_model.bin")


def remote_tokenizer(base: Path, canary: Path) -> None:
    (base / "tokenization_evil.py").write_text(evil_python(canary), encoding="utf-8")
    names = ["tokenization_evil.Evil", "tokenization_evil.Evil"]
    edit_json(base / "tokenizer_config.json", auto_map={"AutoTokenizer": names}, tokenizer_class="Evil")


def pickled_tokenizer(base: Path, canary: Path) -> None:
    (base / "tokenizer.json").unlink()
    for name in ("tokenizer.model", "vocab.json", "tokenizer.pkl", "added_tokens.json"):
        (base / name).write_bytes(evil_pickle(canary))


def custom_generation(base: Path, canary: Path) -> None:
    (base / "custom_generate").mkdir()
    (base / "custom_generate" / "generate.py").write_text(evil_python(canary), encoding="utf-8")
    edit_json(base / "generation_config.json", custom_generate=str(base), do_sample=True)


def escaping_chat_template(base: Path, canary: Path) -> None:
    template = "{{ cycler.__init__.__globals__.os.mkdir(" + repr(str(canary)) + ") }}"
    edit_json(base / "tokenizer_config.json", chat_template=template)
    (base / "chat_template.jinja").write_text(template, encoding="utf-8")


def kernel_of_the_hub(base: Path, canary: Path) -> None:
    edit_json(base / "config.json", attn_implementation="evil/kernel", _attn_implementation="evil/kernel")


def pickled_adapter(base: Path, canary: Path) -> None:
    (base / "adapter_model.bin").write_bytes(evil_pickle(canary))
    edit_json(base / "adapter_config.json", peft_type="LORA", base_model_name_or_path=str(base), r=1)


def quantised_by_code(base: Path, canary: Path) -> None:
    (base / "evil.py").write_text(evil_python(canary), encoding="utf-8")
    edit_json(base / "config.json", quantization_config={"quant_method": "evil.Evil"})


BASE_ATTACKS = [
    pickled_weights,
    pickled_weights_only,
    torch_weights_only,
    remote_model_of_a_known_family,
    remote_model_of_its_own_family,
    remote_tokenizer,
    pickled_tokenizer,
    custom_generation,
    escaping_chat_template,
    kernel_of_the_hub,
    pickled_adapter,
    quantised_by_code,
]
# What a family of ours has without that code, and what no verb asks for, is no error.
HARMLESS = {
    remote_model_of_a_known_family,
    remote_tokenizer,
    custom_generation,
    escaping_chat_template,
    quantised_by_code,
}


@pytest.mark.parametrize("attack", BASE_ATTACKS, ids=lambda attack: attack.__name__)
def test_no_code_of_a_base_is_run(
    scale: Scale, base: Path, tmp_path: Path, canary: Path, attack: Callable[[Path, Path], None]
) -> None:
    attack(base, canary)
    config = write_config(tmp_path, base)
    done = scale("upscale", config)
    assert not canary.exists()
    if done.exit_code == 0:
        assert attack in HARMLESS
        assert scale("train", config).exit_code == 0
        assert scale("generate", tmp_path / "run", "--prompt", "One", "--max-new-tokens", "2").exit_code == 0
    else:
        assert "model.base" in done.error()
        assert done.exit_code == 2
        assert not (tmp_path / "run").exists()
    assert not canary.exists()


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/elsewhere.safetensors", "a/b.safetensors", ["x"]])
def test_an_index_of_shards_names_only_files_of_its_folder(scale: Scale, base: Path, tmp_path: Path, name: Any) -> None:
    (base / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    edit_json(base / "model.safetensors.index.json", metadata={}, weight_map={"model.norm.weight": name})
    done = scale("upscale", write_config(tmp_path, base))
    assert "model.safetensors.index.json names" in done.error()
    assert done.exit_code == 2


def header(size: int, tensors: dict[str, Any]) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", size or len(text)) + text


def tensor(start: int, end: int, num: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [num], "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "content",
    [
        header(2**63, {}),
        header(100_000_001, {}) + bytes(1000),
        header(0, {"a": tensor(0, 16, 4), "b": tensor(8, 24, 4)}) + bytes(24),
        header(0, {"a": tensor(0, 2**40, 2**38)}),
        header(0, {"a": tensor(-4, 4, 1)}) + bytes(8),
        header(0, {"a": {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]}}),
        struct.pack("<Q", 100_000) + b"[" * 100_000,
    ],
    ids=["longest header", "long header", "overlapping", "huge", "negative", "overflowing", "deep"],
)
def test_a_safetensors_bomb_is_one_error(scale: Scale, base: Path, tmp_path: Path, content: bytes) -> None:
    (base / "model.safetensors").write_bytes(content)
    done = scale("upscale", write_config(tmp_path, base))
    assert done.error().startswith("model.base: ")
    assert done.exit_code == 2
    assert not (tmp_path / "run").exists()
