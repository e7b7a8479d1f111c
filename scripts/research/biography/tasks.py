"""The training data of each stage: biographies, and questions about people, as token sequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from scale_cli.data.batches import PackedWindows
from scripts.from_scratch import train_tokenizer
from scripts.research.biography.config import BiographyConfig
from scripts.research.biography.people import (
    ATTRIBUTES,
    Person,
    answer,
    biography,
    generate_people,
    question,
)


class SequenceWindows(PackedWindows):
    """Sequences that each have a window of their own, padded to the longest."""

    def __init__(self, sequences: list[list[int]], longest: int = 0) -> None:
        assert sequences and min(map(len, sequences)) >= 2, "a sequence needs an input and a target"
        self.sequences = sequences
        self.offsets = None  # a window is one text
        self.sequence_length = max(longest, max(map(len, sequences))) - 1
        self.num_targets = np.array(
            [len(sequence) - 1 for sequence in sequences]
        )  # every token but the first

    @classmethod
    def alike(cls, sources: list[list[list[int]]]) -> list[SequenceWindows]:
        """Return the windows of several sources, all as long as the longest of any."""
        longest = max(len(sequence) for sequences in sources for sequence in sequences)
        return [cls(sequences, longest) for sequences in sources]

    def window(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return a window's inputs and targets, both (T,)."""
        return PackedWindows(np.array(self.sequences[index]), self.sequence_length).window(0)


@dataclass(frozen=True)
class Question:
    """One question with its answer, as token ids."""

    prompt: list[int]  # the document boundary and the question
    answer: list[int]  # the answer; first-token accuracy uses only its first token


@dataclass(frozen=True)
class Curriculum:
    """All biographies and questions, in the order in which they are learned."""

    tokenizer: PreTrainedTokenizerBase  # trained on all of it
    biographies: list[list[int]]  # pre-training sequences
    task_0: list[Question]  # questions on people whose biographies were told
    task_1: list[Question]  # questions on people never seen before

    def sequences(self, questions: list[Question]) -> list[list[int]]:
        """Return the training sequences of questions: boundary, question, answer, boundary."""
        boundary = self.tokenizer.eos_token_id
        return [[*asked.prompt, *asked.answer, boundary] for asked in questions]


def write_curriculum(config: BiographyConfig) -> Curriculum:
    """Draw a config's people, and tokenise their biographies and questions; a pure function of the config."""
    sizes, language = config.people, config.language
    people = generate_people(sizes.pretraining + sizes.task_1, config.seed)
    shown, asked_0, asked_1 = (
        people[: sizes.pretraining],
        people[: sizes.task_0],
        people[sizes.pretraining :],
    )
    biographies = [
        biography(person, language, telling)
        for person in shown
        for telling in range(sizes.biographies_each)
    ]
    texts = {"task_0": _questions(asked_0, config), "task_1": _questions(asked_1, config)}
    every_text = [*biographies, *("".join(pair) for pairs in texts.values() for pair in pairs)]
    tokenizer = train_tokenizer(every_text, config.model.vocab_size)
    boundary = tokenizer.eos_token_id
    told_ids = [[boundary, *ids, boundary] for ids in _encode(tokenizer, biographies)]
    tasks = {}
    for task, pairs in texts.items():
        prompts, answers = (_encode(tokenizer, part) for part in zip(*pairs, strict=True))
        tasks[task] = [Question([boundary, *q], a) for q, a in zip(prompts, answers, strict=True)]
    return Curriculum(tokenizer, told_ids, tasks["task_0"], tasks["task_1"])


def _questions(people: list[Person], config: BiographyConfig) -> list[tuple[str, str]]:
    """Return every question on every person, with its answer and the space before it."""
    language = config.language
    return [
        (question(person, attribute, language), f" {answer(person, attribute, language)}")
        for person in people
        for attribute in ATTRIBUTES
    ]


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> list[list[int]]:
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"]
