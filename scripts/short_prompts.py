"""Which head answers a short prompt: the base's or the trained one's, by the prompt's length and language.

    python scripts/short_prompts.py RUN --english TEXT --korean TEXT [--prompts N] [--template]

Prompts are the beginnings of lines of two texts, cut to a number of characters. A choice is right if the
base's head has more than half of the weight after an English prompt, and less after a Korean one.
"""

from __future__ import annotations

import argparse
import lzma
from collections.abc import Iterator
from pathlib import Path

import torch

from scale_cli.generation import Generator

LENGTHS = (4, 8, 12, 20, 40, 80)
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def prompts_of(path: Path, length: int, count: int) -> Iterator[str]:
    """Yield the beginnings of `count` lines of a text that are longer than `length` characters."""
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        text = str(file.read(2_000_000))
    lines = [line.strip() for line in text.splitlines() if len(line.strip()) > length]
    step = max(1, len(lines) // count)
    for line in lines[: count * step : step]:
        yield line[:length]


@torch.no_grad()
def base_share(generator: Generator, prompt: str, *, in_chat: bool) -> float:
    """Return the base head's weight after a prompt, as it is served."""
    asked = [{"role": "user", "content": prompt}] if in_chat else prompt
    return generator.shares_after(asked)["base"]


def main() -> None:
    """Print a row for each language and length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--english", type=Path, required=True)
    parser.add_argument("--korean", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=20)
    asked = parser.parse_args()
    generator = Generator(asked.run)
    generator.tokenizer.chat_template = generator.tokenizer.chat_template or _TEMPLATE
    print("| language | characters | alone: right | base weight | in chat: right | base weight |")
    print("|---|---:|---:|---:|---:|---:|")
    for language, path in (("Korean", asked.korean), ("English", asked.english)):
        for length in LENGTHS:
            cells = []
            for in_chat in (False, True):
                shares = [
                    base_share(generator, prompt, in_chat=in_chat)
                    for prompt in prompts_of(path, length, asked.prompts)
                ]
                right = [(share > 0.5) == (language == "English") for share in shares]
                cells += [f"{sum(right) / len(right):.0%}", f"{sum(shares) / len(shares):.3f}"]
            print(f"| {language} | {length} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
