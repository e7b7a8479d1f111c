"""`scale generate --samples`: texts that a base writes itself, for replay where there is no old data."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

from tqdm import tqdm

from scale_cli.config.schema import ModelConfig
from scale_cli.errors import ConfigError
from scale_cli.generate import Generator, Sampling
from scale_cli.storage.atomic import write_text
from scale_cli.storage.layout import check_folder

_AT_ONCE = 32
_SEEDS_APART = 1_000_003


@dataclass(frozen=True)
class SamplesSummary:
    """What was written, for the terminal."""

    file: Path
    num_samples: int
    num_texts: int

    def lines(self) -> list[str]:
        """Return aligned lines, and how to train on the file."""
        empty = self.num_samples - self.num_texts
        left_out = f"; {empty:,} that ended at once are left out" if empty else ""
        return [
            f"written        {self.file}: {self.num_texts:,} texts{left_out}",
            f"a source       {{name: replay, path: {self.file}, language: ..., weight: 0.1, role: replay}}",
        ]


def write_samples(
    base: ModelConfig, num_samples: int, file: Path, sampling: Sampling, prompts: list[str]
) -> SamplesSummary:
    """Let a base write texts, and write them as a corpus: one object with its `text` a line.

    The same base, seed and sizes give the same texts on the same machine.

    Args:
        base: which one; widened already or not.
        num_samples: how many texts.
        file: a new .jsonl.
        sampling: how tokens are chosen; every batch has a seed of its own.
        prompts: what the texts begin with, in turn; an empty one leaves it to the base.

    Raises:
        ConfigError: the file is there already or no .jsonl, or a prompt cannot be begun with.
        RunFolderError: it cannot be written there.
        BaseModelError: the base is not at hand.
    """
    if file.suffix != ".jsonl":
        raise ConfigError(f"--output {file}: is read as a source only if it is named .jsonl")
    if os.path.lexists(file):
        raise ConfigError(f"--output {file}: is there already; give a new file")
    check_folder("--output", file.parent)
    generator = Generator(base)
    rows = islice(cycle(prompts), num_samples)
    texts: list[str] = []
    with tqdm(total=num_samples, desc="writing", unit=" texts") as bar:
        for number, batch in enumerate(iter(lambda: list(islice(rows, _AT_ONCE)), [])):
            seed = (sampling.seed * _SEEDS_APART + number) % 2**32  # a CPU's generator takes no more of it
            drawn = generator.continue_all(batch, replace(sampling, seed=seed))
            texts += [text for written in drawn if (text := written.prompt + written.completion).strip()]
            bar.update(len(batch))
    write_text(file, "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))
    return SamplesSummary(file, num_samples, len(texts))
