"""Which head answers a short prompt: the base's or the trained one's, by the prompt's length and language.

    python scripts/short_prompts.py RUN --english TEXT --korean TEXT [--prompts N] [--lengths 12 20]

Prompts are the beginnings of lines of two texts, cut to a number of characters. Each is read as `scale generate` reads
it, as a text and as the first turn of a chat, with the prior 1/2 and with the prior of its script. A choice is right if
the base's head has more than half of the weight in the first new token after an English prompt, and less after a
Korean one.
"""

from __future__ import annotations

import argparse
import lzma
from pathlib import Path

import torch

from scale_cli.generation.generator import Generator, HeadShares, Sampling

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def prompts_of(path: Path, length: int, count: int) -> list[str]:
    """Return the beginnings of `count` lines of a text that are longer than `length` characters."""
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        text = str(file.read(2_000_000))
    lines = [line.strip() for line in text.splitlines() if len(line.strip()) > length]
    step = max(1, len(lines) // count)
    return [line[:length] for line in lines[: count * step : step]]


@torch.no_grad()
def base_shares(generator: Generator, prompt: str, *, in_chat: bool) -> list[float]:
    """Return the base head's weight after a prompt: with the even prior, and as it is served."""
    framed = generator.framed([{"role": "user", "content": prompt}] if in_chat else prompt)
    assert framed.base_prior is not None, "give a run with a router"
    seen = HeadShares(generator.model)
    generator.generate([framed], Sampling(max_new_tokens=1), seen=seen)
    ((of_base, of_trained),) = seen.of_row(0)
    # Of the same evidence with equal weights at the start, by Bayes' rule.
    base, trained = of_base / framed.base_prior, of_trained / (1 - framed.base_prior)
    return [base / (base + trained), of_base]


def main() -> None:
    """Print a row for each language and length; a cell is the right choices and the base's mean weight."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--english", type=Path, required=True)
    parser.add_argument("--korean", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4, 8, 12, 20, 40])
    asked = parser.parse_args()
    generator = Generator(asked.run)
    generator.tokenizer.chat_template = generator.tokenizer.chat_template or _TEMPLATE
    print("| prompts | characters | text, 1/2 | text, by script | chat, 1/2 | chat, by script |")
    print("|---|---:|---:|---:|---:|---:|")
    for language, path in (("Korean", asked.korean), ("English", asked.english)):
        for length in asked.lengths:
            prompts, cells = prompts_of(path, length, asked.prompts), []
            for in_chat in (False, True):
                each = [base_shares(generator, prompt, in_chat=in_chat) for prompt in prompts]
                for shares in zip(*each, strict=True):
                    right = sum((share > 0.5) == (language == "English") for share in shares)
                    mean = sum(shares) / len(shares)
                    cells.append(f"{right} of {len(shares)} ({mean:.3f})")
            print(f"| {language} | {length} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
