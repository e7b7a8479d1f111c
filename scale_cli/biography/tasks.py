"""What each stage trains on: tellings of people, and questions about them, as token sequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from scale_cli.config.biography import BiographyConfig
from scale_cli.data.biography import ATTRIBUTES, Person, answer, biography, generate_people, question
from scale_cli.training.from_scratch import train_tokenizer


@dataclass(frozen=True)
class Question:
    """One question with its answer, as token ids."""

    prompt: list[int]  # the boundary of documents and the question
    answer: list[int]  # what follows it; first-token accuracy looks at the first of them alone


@dataclass(frozen=True)
class Curriculum:
    """Everything that is told and asked, in the order in which it is learned."""

    tokenizer: PreTrainedTokenizerBase  # learned on all of it
    biographies: list[list[int]]  # pre-training sequences
    task_0: list[Question]  # questions on people whose biographies were told
    task_1: list[Question]  # questions on people never seen before

    def sequences(self, questions: list[Question]) -> list[list[int]]:
        """Return questions as what is trained on: boundary, question, answer, boundary."""
        boundary = self.tokenizer.eos_token_id
        return [[*asked.prompt, *asked.answer, boundary] for asked in questions]


def write_curriculum(config: BiographyConfig) -> Curriculum:
    """Draw the people of a config and put what is told and asked of them into tokens; a pure function of it."""
    sizes, language = config.people, config.language
    people = generate_people(sizes.pretraining + sizes.task_1, config.seed)
    shown, asked_0, asked_1 = people[: sizes.pretraining], people[: sizes.task_0], people[sizes.pretraining :]
    biographies = [
        biography(person, language, telling) for person in shown for telling in range(sizes.biographies_each)
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
    """Return every question on every person, and its answer with the space before it."""
    language = config.language
    return [
        (question(person, attribute, language), f" {answer(person, attribute, language)}")
        for person in people
        for attribute in ATTRIBUTES
    ]


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> list[list[int]]:
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"]
