import math
import random

import pytest
import torch

from scale_cli.methods.widened import RouterConfig
from scale_cli.model.heads import BaseAndTrained
from scripts.research.biography.accuracy import first_token_accuracy
from scripts.research.biography.tasks import Question
from tests.widening import tiny_llama


def some_questions(count: int) -> list[Question]:
    draw = random.Random(0)
    return [
        Question([draw.randrange(61) for _ in range(draw.randint(2, 9))], [draw.randrange(61)])
        for _ in range(count)
    ]


def answer_by_hand(
    base: torch.nn.Module, trained: torch.nn.Module, asked: Question, threshold: float
) -> dict[str, int]:
    """One question, no padding, no batch; Bayes' rule token by token in Python's own floats."""
    ids = torch.tensor([asked.prompt])
    with torch.no_grad():
        logits = [model(ids).logits[0].double() for model in (base, trained)]
    weights = [0.5, 0.5]
    for position, token in enumerate(asked.prompt[1:]):
        weights = [
            w * math.exp(lg[position].log_softmax(-1)[token])
            for w, lg in zip(weights, logits, strict=True)
        ]
        weights = [w / sum(weights) for w in weights]
    mixed = sum(w * lg[-1].softmax(-1) for w, lg in zip(weights, logits, strict=True))
    assert isinstance(mixed, torch.Tensor)
    cosine = torch.cosine_similarity(logits[0][-1], logits[1][-1], dim=0)
    heads = [int(lg[-1].argmax()) for lg in logits]
    return {
        "base": heads[0],
        "trained": heads[1],
        "posterior": int(mixed.argmax()),
        "cosine": heads[0] if cosine >= threshold else heads[1],
    }


def test_accuracy_is_what_one_question_at_a_time_gives_for_heads_and_rules() -> None:
    base, trained = tiny_llama(), tiny_llama(seed=1)
    router = RouterConfig(threshold=0.1)
    unanswered = some_questions(40)
    by_hand = [answer_by_hand(base, trained, asked, router.threshold) for asked in unanswered]
    questions = []
    for index, (asked, said) in enumerate(zip(unanswered, by_hand, strict=True)):
        right = said[("base", "trained", "posterior", "cosine")[index % 4]]
        questions.append(Question(asked.prompt, [right, 0]))
    shares = first_token_accuracy(BaseAndTrained(base, trained), questions, router, "no")
    for name, share in shares.items():
        wanted = sum(
            said[name] == asked.answer[0] for said, asked in zip(by_hand, questions, strict=True)
        )
        assert share == pytest.approx(wanted / len(questions))
    assert len(set(shares.values())) > 1  # or the heads and rules would not have been told apart
