"""What a text costs a base by what stands before it: nothing or a mark, whole or cut into windows.

    python scripts/window_boundary.py BASE TEXT --before none '<bos>' [--window 256] [--documents N] [--bytes FROM TO]

By plain transformers, in float32. TEXT has documents between blank lines; those of FROM to TO bytes are taken. A window
begins with the mark and the token before the cut, and each token is scored once. A document's first token, which
nothing precedes without a mark, is left out everywhere.
"""

from __future__ import annotations

import argparse
import lzma
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def documents_of(path: Path, num_bytes: range, count: int) -> list[str]:
    """Return the first documents of a text that have so many bytes."""
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        parts = str(file.read()).split("\n\n")
    return [part for part in parts if len(part.encode()) in num_bytes][:count]


@torch.no_grad()
def nats_of(model: Any, ids: list[int], mark: list[int], window: int) -> float:
    """Return what the tokens of a document cost after its first one."""
    nats = 0.0
    for start in range(0, len(ids), window):
        before = mark + ids[max(start - 1, 0) : start]
        read = torch.tensor([before + ids[start : start + window]])
        log_probs = model(input_ids=read).logits[0, :-1].float().log_softmax(-1)
        said = log_probs.gather(-1, read[0, 1:, None])[:, 0]
        first_scored = max(start, 1) - start + len(before)
        nats -= said[first_scored - 1 :].sum().item()
    return nats


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base")
    parser.add_argument("text", type=Path)
    parser.add_argument("--before", nargs="+", default=["none"])
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--bytes", type=int, nargs=2, default=[1200, 2600])
    asked = parser.parse_args()

    tokenizer: Any = AutoTokenizer.from_pretrained(asked.base)
    model = AutoModelForCausalLM.from_pretrained(asked.base, dtype=torch.float32).eval()
    texts = documents_of(asked.text, range(*asked.bytes), asked.documents)
    documents: list[list[int]] = [
        tokenizer(text, add_special_tokens=False).input_ids for text in texts
    ]
    num_tokens = sum(len(ids) - 1 for ids in documents)
    for name in asked.before:
        mark = [] if name == "none" else tokenizer.convert_tokens_to_ids([name])
        longest = max(map(len, documents))
        for words, window in (("whole", longest), (f"windows of {asked.window}", asked.window)):
            nats = sum(nats_of(model, ids, mark, window) for ids in documents)
            print(f"{name:16} {words:16} {num_tokens:,} tokens, {nats / num_tokens:.4f} nats/token")


if __name__ == "__main__":
    main()
