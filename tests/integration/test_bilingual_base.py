"""`scripts/bilingual_base.py`: a base from random weights, of the shape asked for, with the same bits for its seed."""

import lzma
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from scale_cli.storage.atomic import file_sha256


def small_data(shared_data: Path, folder: Path) -> Path:
    """The folder of data with a few documents of each corpus."""
    folder.mkdir()
    (folder / "ckpt-eltec").symlink_to(shared_data / "ckpt-eltec")
    for corpus, part in (
        ("en-eltec", "train"),
        ("en-eltec", "valid"),
        ("ko-petitions", "valid"),
        ("ko-mixed", "valid"),
    ):
        (folder / corpus).mkdir(exist_ok=True)
        with lzma.open(shared_data / corpus / f"{part}.txt.xz", "rt") as file:
            text = "\n\n".join(file.read(60_000).split("\n\n")[:6])
        with lzma.open(folder / corpus / f"{part}.txt.xz", "wt") as file:
            file.write(text)
    (folder / "ko-mixed/train.txt.xz").symlink_to(folder / "ko-mixed/valid.txt.xz")
    return folder


def test_a_base_has_the_shape_asked_for_and_the_same_bits_for_its_seed(
    shared_data: Path, tmp_path: Path
) -> None:
    data, hashes = small_data(shared_data, tmp_path / "data"), []
    for name in ("one", "other"):
        command = [sys.executable, "-m", "scripts.bilingual_base", str(tmp_path / name), str(data)]
        command += ["--hidden=64", "--layers=1", "--steps=2"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        base = tmp_path / name / "run/export/plain"
        hashes.append(file_sha256(base / "model.safetensors"))
    assert len(set(hashes)) == 1
    config = AutoModelForCausalLM.from_pretrained(base).config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (64, 1, 2)
    assert len(AutoTokenizer.from_pretrained(base)) == config.vocab_size
