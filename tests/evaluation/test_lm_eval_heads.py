"""What every head says and answers is what lm-eval's own model of that head does."""

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer

from scale_cli.config.schema import ModelConfig
from scale_cli.errors import RunError
from scale_cli.evaluation.lm_eval_heads import HeadsLM, framed, heads_of, measure_items
from scale_cli.evaluation.lm_eval_tasks import Benchmark
from scale_cli.evaluation.results import HEADS_AND_RULES
from scale_cli.evaluation.scoring import Passes
from scale_cli.export.dense import dense_model
from scale_cli.export.plain_folder import copy_tokenizer, frame_prompts
from scale_cli.methods.widened import RouterConfig
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.processes import ALONE, Share
from scale_cli.runs.method_folder import set_router
from scale_cli.upscale.base_tokenizer import TokenizerPlace, load_tokenizer
from scale_cli.upscale.building import NewPieces
from tests.evaluation.task_files import MEAN, add_task, know_only, opened, some_of_blimp, task_of
from tests.threads_as_processes import in_processes
from tests.widening import as_if_trained, real_base, widen

ROUTER = RouterConfig(prior=0.3, threshold=0.97)
STORIES = "ckpt-stories260K"
BEGUN = [
    ("Once upon a time, there was a little", "girl named Lily. She loved to play"),
    ("Tom had a big red", "ball. He liked to play"),
    ("One day,", "a little girl named Lily went to the park."),
    ("The dog ran to the", "park."),
    ("Mom said,", '"I am sorry,'),
]


@pytest.fixture(scope="module")
def models(shared_data: Path) -> dict[str, ScaleForCausalLM]:
    names = (STORIES, "ckpt-eltec")
    return {
        name: as_if_trained(widen(real_base(shared_data, name), "route", "top:1")) for name in names
    }


@pytest.fixture(scope="module")
def model(models: dict[str, ScaleForCausalLM]) -> ScaleForCausalLM:
    return models[STORIES]


@pytest.fixture(scope="module")
def tokenizer(stories: Path) -> Any:
    return tokenizer_of(stories)


def tokenizer_of(folder: Path) -> Any:
    return load_tokenizer(ModelConfig(base=str(folder)))


def answering(
    model: Any, tokenizer: Any, of_base: Any = None, batch_size: int = 2, **settings: Any
) -> dict[str, HeadsLM]:
    usual = {"router": ROUTER, "max_length": 128, "share": ALONE}
    passes = Passes(64, 64, batch_size, "no")
    return heads_of(model, tokenizer, of_base, passes=passes, **(usual | settings))


def asked(*texts: tuple[str, str]) -> list[Instance]:
    return [Instance("loglikelihood", {}, text, index) for index, text in enumerate(texts)]


def said(lm: Any, requests: list[Instance]) -> list[float]:
    return [score for score, _ in lm.loglikelihood(requests, disable_tqdm=True)]


def hf(folder: Any, **settings: Any) -> Any:
    """lm-eval's own model."""
    return HFLM(folder, device="cpu", dtype="float32", batch_size=2, max_length=128, **settings)


@pytest.mark.parametrize(
    ("checkpoint", "adds_boundary"), [(STORIES, False), (STORIES, True), ("ckpt-eltec", False)]
)
def test_each_head_scores_as_lm_evals_own_model_of_the_folder_that_serves_it(
    shared_data: Path,
    tmp_path: Path,
    models: dict[str, ScaleForCausalLM],
    checkpoint: str,
    adds_boundary: bool,
) -> None:
    """The trained head as the plain export, and the base's head as the base."""
    base = tmp_path / "base"
    export = tmp_path / "export"
    shutil.copytree(shared_data / checkpoint / "hf", base)
    if adds_boundary:
        frame_prompts(base, tokenizer_of(base))
    tokenizer = tokenizer_of(base)
    dense_model(models[checkpoint], "float32").save_pretrained(export)
    copy_tokenizer(tokenizer, TokenizerPlace("model.base", str(base), None), export)
    own, exported = (
        AutoTokenizer.from_pretrained(folder)("a").input_ids for folder in (base, export)
    )
    assert (own == exported) == adds_boundary

    heads = answering(models[checkpoint], tokenizer, max_length=512)
    theirs = {"trained": HFLM(str(export), device="cpu"), "base": HFLM(str(base), device="cpu")}
    sources = [
        task_of(shared_data, tmp_path, "arc_easy", limit=10, doc_to_text="{{query}}\nAnswer:"),
        task_of(shared_data, tmp_path, "kobest_copa", limit=10),
        *([some_of_blimp(shared_data, tmp_path, 1)] if adds_boundary else []),
    ]
    for source in sources:
        benchmark = opened(source)
        items = measure_items(benchmark, heads).items
        (task,) = benchmark.tasks.values()
        for head, lm in theirs.items():
            ours = [nats for item in items for nats in item["heads"][head]["log_likelihoods"]]
            np.testing.assert_allclose(ours, said(lm, task.instances), rtol=1e-5, atol=2e-3)


def test_beside_new_tokens_the_base_scores_and_answers_as_its_own_folder_does(
    shared_data: Path, stories: Path, make_task: Any
) -> None:
    of_base = tokenizer_of(stories)
    of_run = copy.deepcopy(of_base)
    of_run.add_tokens(["the", " girl"])
    new = NewPieces([" ".join(map(str, of_base(word).input_ids)) for word in ("the", " girl")], [])
    model = as_if_trained(widen(real_base(shared_data, STORIES), "route", new=new))
    heads = answering(model, of_run, of_base)
    (task,) = make_task().tasks.values()
    task.build_all_requests()
    theirs = hf(str(stories))
    requests = asked(*BEGUN)
    np.testing.assert_allclose(said(heads["base"], requests), said(theirs, requests), atol=1e-4)
    assert heads["base"].generate_until(task.instances) == theirs.generate_until(task.instances)


def test_odd_requests_have_the_tokens_that_they_have_in_lm_eval(
    stories: Path, model: ScaleForCausalLM, tokenizer: Any
) -> None:
    long = "Once upon a time there was a cat. " * 20
    # Too long, without a context, with spaces between, and with a boundary of its own.
    texts = [(long, " It sat."), ("", " The cat sat."), ("One  ", "day"), ("<s>One", " day")]
    theirs = hf(str(stories))
    ours = answering(model, tokenizer)["base"]
    for requests in (asked(texts[-1]), asked(*texts)):
        np.testing.assert_allclose(said(ours, requests), said(theirs, requests), atol=1e-5)


@torch.no_grad()
def test_the_router_judges_context_and_continuation_and_the_score_is_the_continuations(
    model: ScaleForCausalLM, tokenizer: Any
) -> None:
    """As the model says that serves with the same router."""
    model = copy.deepcopy(model)
    heads = answering(model, tokenizer)
    texts = [("Once upon a time, there was a little girl", " named Lily."), ("Anna", " sat, sad.")]
    for rule in ("posterior", "cosine"):
        set_router(model, ROUTER.model_copy(update={"rule": rule}))
        lm = heads[rule]
        lm.head = rule
        for text, found in zip(texts, said(lm, asked(*texts)), strict=True):
            ids = lm.tok_encode("".join(text), add_special_tokens=False)
            num_scored = len(ids) - len(lm.tok_encode(text[0], add_special_tokens=False))
            whole = torch.tensor([[lm.prefix_token_id, *ids]])
            log_probs = model(whole).logits.log_softmax(-1)[:, :-1].gather(-1, whole[:, 1:, None])
            assert found == pytest.approx(log_probs[:, -num_scored:].sum().item(), abs=1e-3)


@pytest.mark.parametrize("adds_boundary", [True, False])
def test_a_request_passes_all_heads_once_and_the_base_alone_where_its_ids_are_its_own(
    model: ScaleForCausalLM, tokenizer: Any, adds_boundary: bool
) -> None:
    heads = answering(model, framed(tokenizer) if adds_boundary else tokenizer)
    embeddings = {"base": model.base.model.embed_tokens, "expansion": model.expansion.embed_tokens}
    num_rows = dict.fromkeys(embeddings, 0)
    hooks = [
        module.register_forward_pre_hook(
            lambda _, given, name=name: num_rows.update({name: num_rows[name] + len(given[0])})
        )
        for name, module in embeddings.items()
    ]
    for head, lm in heads.items():
        lm.head = head
        said(lm, asked(*BEGUN))
    for hook in hooks:
        hook.remove()
    times = 1 if adds_boundary else 2
    assert num_rows == {"base": times * len(BEGUN), "expansion": len(BEGUN)}


@pytest.mark.parametrize(
    ("max_length", "context", "continuation"),
    [(2, "One", " a long day it was"), (64, "One", ""), (64, " ", "One")],
)
def test_a_request_that_lm_eval_cannot_score_is_named(
    shared_data: Path,
    models: dict[str, ScaleForCausalLM],
    max_length: int,
    context: str,
    continuation: str,
) -> None:
    tokenizer = tokenizer_of(shared_data / "ckpt-eltec" / "hf")
    lm = answering(models["ckpt-eltec"], tokenizer, max_length=max_length)["base"]
    with pytest.raises(RunError, match=f"{continuation}' after '{context}'"):
        said(lm, asked((context, continuation)))


@pytest.fixture
def make_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A task whose answers are generated."""
    know_only(tmp_path, monkeypatch)

    def make(**keys: Any) -> Benchmark:
        first_words = {"function": "regex", "regex_pattern": r"^\s*(\S+ \S+)"}
        config = {
            "output_type": "generate_until",
            "doc_to_choice": None,
            "doc_to_text": "{{begun}}",
            "doc_to_target": "{{ended}}",
            "generation_kwargs": {"until": ["\n", " and"], "max_gen_toks": 12, "do_sample": False},
            "filter_list": [
                {"name": "first-words", "filter": [first_words]},
                {"name": "whole", "filter": [{"function": "take_first"}]},
            ],
            "metric_list": [
                {"metric": "exact_match", **MEAN, "ignore_case": True, "ignore_punctuation": True},
                {"metric": "bleu", "aggregation": "bleu", "higher_is_better": True},
            ],
        }
        items = [{"begun": begun, "ended": ended} for begun, ended in BEGUN]
        add_task(tmp_path, "endings", items, **(config | keys))
        return opened("endings")

    return make


def test_answers_and_marks_are_lm_evals_own_of_each_heads_model(
    make_task: Any, shared_data: Path, tokenizer: Any
) -> None:
    """The base, and the model as it serves, each by lm-eval's `hf` model."""
    model = as_if_trained(widen(real_base(shared_data, STORIES), "route", "top:1"), std=0.15)
    benchmark = make_task()
    measured = measure_items(benchmark, answering(model, tokenizer, router=RouterConfig()))
    answers = {
        head: [item["heads"][head]["prediction"] for item in measured.items]
        for head in HEADS_AND_RULES
    }
    for head, alone, reads in (
        ("base", model.base, tokenizer),
        ("posterior", model, framed(tokenizer)),
    ):
        lm = hf(alone, backend="causal", tokenizer=reads)
        found = evaluate(lm, {"tasks": benchmark.tasks}, bootstrap_iters=0)
        logged = [sample for sample in found["samples"]["endings"] if sample["filter"] == "whole"]
        assert answers[head] == [sample["resps"][0][0] for sample in logged]
        for kept in ("first-words", "whole"):
            mean = measured.scores[f"exact_match, {kept}"][:, HEADS_AND_RULES.index(head)].mean()
            assert mean == pytest.approx(found["results"]["endings"][f"exact_match,{kept}"])
    assert len({tuple(of_head) for of_head in answers.values()}) > 1, "heads that differ"
    assert len(measured.scores) == 2, "bleu is no mean"
    assert measured.judged_by == "exact_match, first-words"


def test_a_generative_task_that_marks_no_item_or_asks_too_much_is_one_line(
    make_task: Any, model: ScaleForCausalLM, tokenizer: Any
) -> None:
    bleu = {"metric": "bleu", "aggregation": "bleu", "higher_is_better": True}
    for task, max_length, told in (
        (make_task(metric_list=[bleu]), 128, "no metric that says"),
        (make_task(), 12, r"requested max tokens to generate \(12\)"),
    ):
        with pytest.raises(RunError, match=told):
            measure_items(task, answering(model, tokenizer, max_length=max_length))


def test_several_processes_that_share_the_requests_answer_as_one_does(
    make_task: Any, model: ScaleForCausalLM, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = asked(*((f"Once {word}", " a cat" * at) for at, word in enumerate("abcde", 1)))
    (task,) = make_task().tasks.values()
    task.build_all_requests()
    generated = [request for request in task.instances for _ in range(2)]  # a task may repeat them

    def answers(share: Share) -> list[Any]:
        told = []
        for head, lm in answering(model, tokenizer, share=share).items():
            lm.head = head
            told += [said(lm, scored), lm.generate_until(generated)]
        return told

    alone = answers(ALONE)
    assert any(alone[1])
    assert in_processes(monkeypatch, 2, answers) == [alone] * 2
    assert in_processes(monkeypatch, 8, answers) == [alone] * 8  # more processes than batches
