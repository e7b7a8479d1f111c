"""However the heads are read, the vocabulary head is one matrix product, of all sequences' rows
together.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scale_cli.model import routing
from scale_cli.model.heads import token_log_probs
from scale_cli.model.two_streams import Router, TwoStreams
from tests.model.test_routed_scale import IDS, PADDED, routed
from tests.model.test_two_streams import MODELS
from tests.widening import as_if_trained, tiny_llama, widen

VOCABULARY = 61
OPTIONS = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


class HeadProducts(TorchDispatchMode):
    """Notes the operators that read something which has the vocabulary for one of its sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(value, Tensor) and VOCABULARY in value.shape for value in args):
            self.names.add(op._schema.name.removeprefix("aten::"))
        return op(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every path take its positions in parts."""
    monkeypatch.setitem(routing.LOGITS_AT_ONCE, "cpu", 2 * 3 * VOCABULARY)
    monkeypatch.setattr(routing, "FEWEST_ROWS", 1)


def check_products(work: Callable[[], object]) -> None:
    with torch.no_grad(), HeadProducts() as products:
        work()
    assert {"mm", "addmm"} & products.names and not {"bmm", "baddbmm"} & products.names


@pytest.mark.parametrize("name", MODELS)
def test_scoring_a_text_and_answering_by_a_head_make_no_product_for_each_sequence(
    name: str,
) -> None:
    model = MODELS[name]()
    check_products(lambda: token_log_probs(model, IDS, IDS))
    answers = TwoStreams(model, Router())
    for answers.head in ("base", "posterior"):
        check_products(lambda: answers.answers(IDS, PADDED, **OPTIONS))


@pytest.mark.parametrize("serve", ["posterior", "cosine", "one row"])
def test_neither_does_a_model_that_serves_nor_its_plain_export_with_its_router(serve: str) -> None:
    rule = "cosine" if serve == "cosine" else "posterior"
    model = as_if_trained(widen(tiny_llama(), "route", rule=rule))
    if serve == "one row":
        model = routed(model).requires_grad_(False)
    for kept in (0, 5):
        check_products(partial(model, input_ids=IDS, attention_mask=PADDED, logits_to_keep=kept))
    check_products(lambda: model.generate(IDS, attention_mask=PADDED, **OPTIONS))
