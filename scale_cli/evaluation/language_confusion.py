"""Language confusion: of the letters that each head goes on with after a held-out prompt, those in the prompt's script.

A letter's script is the first word of its name in Unicode, after compatibility forms have become plain ones; Han and
kana, which Japanese mixes, are one. What is no letter of a script (digits, signs, half a character) is not counted.

Shapes: P prompts (B of a batch), T positions, H heads and rules.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from scale_cli.config.schema import ContinuationsConfig
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.evaluation.scoring import Passes
from scale_cli.evaluation.selectable_heads import SelectableHeads, before_end, ends_of, padded_left
from scale_cli.evaluation.statistics import Values
from scale_cli.processes import ALONE, Share, shared_out
from scale_cli.progress import progress_bar

_HAN_AND_KANA = ("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "IDEOGRAPHIC")


@dataclass(frozen=True)
class Letters:
    """What every head, and every rule, went on with, by name."""

    in_script: dict[str, Values]  # (P,) letters in the prompt's script
    all: dict[str, Values]  # (P,) letters


@dataclass(frozen=True)
class Prompt:
    """The beginning of a document."""

    place: int  # among the prompts
    ids: list[int]
    script: str  # of most of its letters


def continue_prompts(
    answers: SelectableHeads,
    names: Sequence[str],  # of the heads and rules that are asked
    corpus: TokenisedCorpus,
    tokenizer: PreTrainedTokenizerBase,
    asked: ContinuationsConfig,
    passes: Passes,  # how many prompts at once, and how precisely
    *,
    progress: str | None = None,  # what to call it on a progress bar; None for no bar
    share: Share = ALONE,  # of the prompts' batches, that is this process's; every one of them returns the whole
) -> Letters:
    """Let heads go on greedily after the beginnings of a corpus's first documents that have a letter; count letters."""
    prompts = sorted(prompts_of(corpus, tokenizer, asked), key=lambda prompt: -len(prompt.ids))
    batches = [prompts[first : first + passes.batch_size] for first in range(0, len(prompts), passes.batch_size)]
    counts_PH2 = np.empty((len(prompts), len(names), 2))
    counted = partial(_counted, answers, names, tokenizer, asked.new_tokens, passes.mixed_precision)
    with progress_bar(total=len(prompts), desc=progress, unit=" prompts", disable=progress is None, leave=False) as bar:
        for prompt, counts_H2 in shared_out(batches, share, counted, bar.update):
            counts_PH2[prompt.place] = counts_H2
    of_each = {name: counts_PH2[:, index] for index, name in enumerate(names)}
    return Letters({name: of[:, 0] for name, of in of_each.items()}, {name: of[:, 1] for name, of in of_each.items()})


def prompts_of(corpus: TokenisedCorpus, tokenizer: Any, asked: ContinuationsConfig) -> Iterator[Prompt]:
    """Yield the beginnings of a corpus's first documents that have a letter."""
    found, markers = 0, corpus.markers
    for index in range(len(corpus)):
        if found == asked.prompts:
            return
        ids = corpus.document(index).tolist()[: asked.prompt_tokens]
        if ids and ids[-1] == markers.eos:
            ids = ids[:-1]  # of a document that is shorter
        scripts = scripts_of(tokenizer.decode(ids, skip_special_tokens=True))
        if not scripts:
            continue
        before = [markers.context] if markers.bos is None and markers.context is not None else []
        yield Prompt(found, before + ids, Counter(scripts).most_common(1)[0][0])
        found += 1


def _counted(
    answers: SelectableHeads,
    names: Sequence[str],
    tokenizer: Any,
    new_tokens: int,
    mixed_precision: str,
    batch: Sequence[Prompt],
) -> list[Tensor]:
    """Return (H, 2) of every prompt: for every head, how many letters are in its script, and how many there are."""
    by_head = []
    for name in names:
        texts = continuations(answers, name, tokenizer, new_tokens, mixed_precision, batch)
        said = [scripts_of(text) for text in texts]
        by_head.append([(of.count(prompt.script), len(of)) for of, prompt in zip(said, batch, strict=True)])
    return [torch.tensor(of_prompt) for of_prompt in zip(*by_head, strict=True)]


@torch.no_grad()
def continuations(
    answers: SelectableHeads,
    head: str,  # or rule, by name
    tokenizer: Any,
    new_tokens: int,
    mixed_precision: str,
    batch: Sequence[Prompt],
) -> list[str]:
    """Return how a head goes on after some prompts, taking the likeliest token every time."""
    ends = ends_of(answers.own_generation_config, tokenizer)
    answers.generation_config = GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, eos_token_id=ends or None, pad_token_id=next(iter(ends), 0)
    )
    answers.head = head
    ids_BT, mask_BT = padded_left([torch.tensor(prompt.ids, device=answers.device) for prompt in batch], padding=0)
    with torch.autocast(answers.device.type, torch.bfloat16, enabled=mixed_precision == "bf16"):
        generated = answers.answers(ids_BT, mask_BT)
    return [tokenizer.decode(before_end(ends, row), skip_special_tokens=True) for row in generated.cpu()]


def scripts_of(text: str) -> list[str]:
    """Return the script of every letter."""
    plain = unicodedata.normalize("NFKC", text)
    return [script for letter in plain if letter.isalpha() and (script := _script(letter))]


@cache
def _script(letter: str) -> str:
    """Return a letter's script; nothing where it is of none."""
    word = unicodedata.name(letter, "").partition(" ")[0]
    return "" if word == "MODIFIER" else "HAN AND KANA" if word in _HAN_AND_KANA else word
