"""However the heads are read, the vocabulary head is one matrix product, of all sequences' rows together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scale_cli.evaluation.continuations import SelectableHeads
from scale_cli.methods.widened import RouterConfig
from scale_cli.model import routing
from scale_cli.model.heads import token_log_probs
from tests.evaluation.test_continuations import MODELS
from tests.model.test_routed_scale import IDS, PADDED, routed
from tests.widening import as_if_trained, tiny_llama, widen

VOCABULARY = 61
OPTIONS: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


class HeadProducts(TorchDispatchMode):
    """Notes the shapes of every product that has the vocabulary for one of its sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[str, list[list[tuple[int, ...]]]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op._schema.name.removeprefix("aten::")
        shapes = [tuple(value.shape) for value in args if isinstance(value, Tensor)]
        if name in ("mm", "addmm", "bmm", "baddbmm") and any(VOCABULARY in shape for shape in shapes):
            self.shapes.setdefault(name, []).append(shapes)
        return op(*args, **(kwargs or {}))


def a_head(model: Any, head: str) -> Callable[[], object]:
    """Return what makes one head of a model answer padded prompts, at their ends alone."""
    names = ["base", "adapted"] if len(model.head_logits(IDS)(slice(0, 1))) == 2 else ["base", "one", "other"]
    selectable = SelectableHeads(model, RouterConfig(), names)
    selectable.head = head
    return lambda: selectable.answers(IDS, PADDED, **OPTIONS)


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every path take its positions in parts."""
    monkeypatch.setitem(routing.LOGITS_AT_ONCE, "cpu", 2 * 3 * VOCABULARY)
    monkeypatch.setattr(routing, "FEWEST_ROWS", 1)


def check_products(work: Callable[[], object]) -> None:
    with torch.no_grad(), HeadProducts() as products:
        work()
    assert products.shapes, "the heads were read"
    assert not {"bmm", "baddbmm"} & products.shapes.keys()


@pytest.mark.parametrize("name", MODELS)
def test_scoring_a_text_and_answering_by_a_head_make_no_product_for_each_sequence(name: str) -> None:
    model = MODELS[name]()
    check_products(lambda: token_log_probs(model, IDS, IDS))
    for head in ("base", "posterior"):
        check_products(a_head(model, head))


@pytest.mark.parametrize("rule", ["posterior", "cosine", "one row"])
def test_neither_does_a_model_that_serves_nor_its_plain_export_with_its_router(rule: str) -> None:
    model: Any = as_if_trained(widen(tiny_llama(), "route"))
    if rule == "one row":
        model = routed(model).requires_grad_(False)
    else:
        model.config.router_rule = rule
    for kept in (0, 5):
        check_products(partial(model, input_ids=IDS, attention_mask=PADDED, logits_to_keep=kept))
    check_products(lambda: model.generate(IDS, attention_mask=PADDED, **OPTIONS))
