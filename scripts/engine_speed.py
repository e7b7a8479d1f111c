"""Measure vLLM's engines beside each other, in turns: what `serving_throughput` and `adapter_throughput` share.

A prefill is the time of prompts with one new token each. A decode is the time of one step of a batch after short
prompts. Both are processor time of the one computing thread, so that other users of the machine matter little. Ratios
are formed within turns; a table has their medians.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BATCHES = (1, 8, 32)  # prompts
PROMPT, SHORT = 128, 16  # tokens of a prompt
ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "max_num_seqs": max(BATCHES),
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": False,
}

Took = Mapping[tuple[str, int, str], Sequence[float]]  # seconds of each turn


def one_thread() -> None:
    """Have engines run in this process, on one thread; before vLLM is imported."""
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }


@dataclass(frozen=True)
class Served:
    """An engine, and what its requests carry."""

    engine: Any
    request: dict[str, Any] = field(default_factory=dict)

    def prefill(self, batch: int) -> float:
        """Return the seconds of a batch of prompts."""
        return sum(self._steps(batch, PROMPT, 1))

    def decode(self, batch: int, new: int) -> float:
        """Return the seconds of a step in which every document of a batch gets a token."""
        return statistics.median(self._steps(batch, SHORT, 1 + new)[1:])

    def _steps(self, batch: int, length: int, new: int) -> list[float]:
        """Return the processor time of every step of a batch, in seconds."""
        from vllm import SamplingParams

        prompts = [
            {"prompt_token_ids": [1 + (at * 7 + row) % 900 for at in range(length)]}
            for row in range(batch)
        ]
        sampling = SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        self.engine.enqueue(prompts, sampling, use_tqdm=False, **self.request)
        taken = []
        while self.engine.llm_engine.has_unfinished_requests():
            began = time.process_time()
            self.engine.llm_engine.step()
            taken.append(time.process_time() - began)
        return taken


def measured(
    served: Mapping[str, Served], turns: int, new: int, prefills: Sequence[int] = BATCHES
) -> Took:
    """Return the seconds of prefills of some batches and of decoding steps of all, of every engine."""
    took: dict[tuple[str, int, str], list[float]] = {}
    for of in served.values():  # compiles what is compiled
        of.prefill(1)
        of.decode(2, 2)
    for turn in range(turns):
        in_order = list(served.items())[:: -1 if turn % 2 else 1]
        for batch in prefills:
            for name, of in in_order:
                took.setdefault((name, batch, "prefill"), []).append(of.prefill(batch))
        for batch in BATCHES:
            for name, of in in_order:
                took.setdefault((name, batch, "decode"), []).append(of.decode(batch, new))
    return took


def show(took: Took, names: Sequence[str], ratios: Iterable[tuple[str, str, str, int]]) -> None:
    """Print a table: tokens a second of every engine, and ratios, each of (title, slower, faster, factor)."""
    ratios = list(ratios)
    titles = ["", "batch", f"{names[0]}, tokens/s", *names[1:], *(title for title, *_ in ratios)]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for what, tokens in (("prefill", PROMPT), ("decode", 1)):
        for batch in BATCHES:
            if (names[0], batch, what) not in took:
                continue
            of = {name: took[name, batch, what] for name in names}
            cells = [f"{batch * tokens / statistics.median(of[name]):.1f}" for name in names]
            for _, other, name, factor in ratios:
                pairs = zip(of[other], of[name], strict=True)
                cells.append(f"{factor * statistics.median(a / b for a, b in pairs):.2f}x")
            print(f"| {what} | {batch} | {' | '.join(cells)} |")
