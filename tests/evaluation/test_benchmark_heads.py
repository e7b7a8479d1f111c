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
from scale_cli.evaluation.benchmark_tasks import Benchmark, ObservedHeads, framed, measure_items
from scale_cli.evaluation.benchmarks import Item
from scale_cli.evaluation.results import HEADS
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
from tests.evaluation.test_benchmark_tasks import SUMS
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


def answering(
    shared_data: Path, model: Any, checkpoint: str = STORIES, **settings: Any
) -> ObservedHeads:
    tokenizer = load_tokenizer(ModelConfig(base=str(shared_data / checkpoint / "hf")))
    passes = Passes(64, settings.pop("batch_size", 8), "no")
    return ObservedHeads(model, tokenizer, ROUTER, passes, **({"max_length": 512} | settings))


def asked(*texts: tuple[str, str]) -> list[Instance]:
    return [Instance("loglikelihood", {}, text, index) for index, text in enumerate(texts)]


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
    model = models[checkpoint]
    base, export = tmp_path / "base", tmp_path / "export"
    shutil.copytree(shared_data / checkpoint / "hf", base)
    tokenizer = load_tokenizer(ModelConfig(base=str(base)))
    if adds_boundary:
        frame_prompts(base, tokenizer)
        tokenizer = load_tokenizer(ModelConfig(base=str(base)))
    dense_model(model, "float32").save_pretrained(export)
    copy_tokenizer(tokenizer, TokenizerPlace("model.base", str(base), None), export)
    own, exported = (
        AutoTokenizer.from_pretrained(folder)("a").input_ids for folder in (base, export)
    )
    assert (own == exported) == adds_boundary
    answers = ObservedHeads(
        model,
        tokenizer,
        ROUTER,
        Passes(64, 8, "no"),
        max_length=model.config.max_position_embeddings,
    )
    theirs = {
        head: HFLM(str(folder), device="cpu", dtype="float32", batch_size=8)
        for head, folder in (("trained", export), ("base", base))
    }
    sources = [
        task_of(shared_data, tmp_path, "arc_easy", limit=10, doc_to_text="{{query}}\nAnswer:"),
        task_of(shared_data, tmp_path, "kobest_copa", limit=10),
        *([some_of_blimp(shared_data, tmp_path, 1)] if adds_boundary else []),
    ]
    for source in sources:
        benchmark = opened(source)
        items = measure_items(benchmark, answers).items
        (task,) = benchmark.tasks.values()
        for head, hf in theirs.items():
            expected = [said for said, _ in hf.loglikelihood(task.instances, disable_tqdm=True)]
            ours = [said for item in items for said in item.heads[head].log_likelihoods]
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=2e-3)
            for outcome, gold in ((item.heads[head], item.gold) for item in items):
                assert outcome.metrics["acc"] == float(np.argmax(outcome.log_likelihoods) == gold)


def test_beside_new_tokens_the_base_scores_and_answers_as_its_own_folder_does(
    shared_data: Path, tmp_path: Path, make_task: Any
) -> None:
    """lm-eval's `hf` model reads the base's own tokens, and so does the report's base."""
    folder = shared_data / STORIES / "hf"
    of_base = load_tokenizer(ModelConfig(base=str(folder)))
    of_run = copy.deepcopy(of_base)
    of_run.add_tokens(["the", " girl"])
    new = NewPieces([" ".join(map(str, of_base(word).input_ids)) for word in ("the", " girl")], [])
    model = as_if_trained(widen(real_base(shared_data, STORIES), "route", new=new))
    answers = ObservedHeads(
        model, of_run, ROUTER, Passes(64, 2, "no"), of_base=of_base, max_length=128
    )
    theirs = HFLM(str(folder), device="cpu", dtype="float32", batch_size=2, max_length=128)
    requests = asked(*BEGUN)
    ours = [said for said, _ in answers.loglikelihood(requests)]
    expected = [said for said, _ in theirs.loglikelihood(requests, disable_tqdm=True)]
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-4)
    answers.answer_with("trained")
    assert [said for said, _ in answers.loglikelihood(requests)] != ours

    answers.answer_with("base")
    (task,) = make_task().tasks.values()
    task.build_all_requests()
    assert answers.generate_until(task.instances) == theirs.generate_until(
        task.instances, disable_tqdm=True
    )


def test_what_is_too_long_loses_the_tokens_that_it_loses_in_lm_eval(
    shared_data: Path, models: dict[str, ScaleForCausalLM]
) -> None:
    requests = asked(
        ("Once upon a time there was a cat. " * 8, " It sat."),
        ("", " The cat sat."),
        ("<s>One", " day"),
    )
    answers = answering(shared_data, models[STORIES], max_length=32)
    hf = HFLM(
        str(shared_data / STORIES / "hf"),
        device="cpu",
        dtype="float32",
        max_length=32,
        batch_size=4,
    )
    ours = [said for said, _ in answers.loglikelihood(requests)]
    theirs = [said for said, _ in hf.loglikelihood(requests, disable_tqdm=True)]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_context_of_white_space_alone_loses_no_token(
    shared_data: Path, models: dict[str, ScaleForCausalLM]
) -> None:
    """lm-eval puts the white space before the continuation."""
    answers = answering(shared_data, models["ckpt-eltec"], "ckpt-eltec")
    assert not answers.tok_encode("")
    requests = asked(
        (" ", "The old house."), ("", " The old house."), ("\n\n", "The"), ("", "\n\nThe")
    )
    white, empty, white_2, empty_2 = (said for said, _ in answers.loglikelihood(requests))
    assert (white, white_2) == pytest.approx((empty, empty_2), abs=1e-4)


@torch.no_grad()
def test_the_router_judges_context_and_continuation_and_the_score_is_the_continuations(
    shared_data: Path, models: dict[str, ScaleForCausalLM]
) -> None:
    """As the model says that serves with the same router."""
    model = copy.deepcopy(models[STORIES])
    answers = answering(shared_data, model, batch_size=2)
    texts = [
        ("Once upon a time, there was a little girl", " named Lily."),
        ("Anna", " sat down, sad."),
        ("", " A"),
    ]
    for rule in ("posterior", "cosine"):
        set_router(model, ROUTER.model_copy(update={"rule": rule}))
        answers.answer_with(rule)
        for text, (got, _) in zip(texts, answers.loglikelihood(asked(*texts)), strict=True):
            ids = answers.tok_encode("".join(text), add_special_tokens=False)
            num_scored = len(ids) - len(answers.tok_encode(text[0], add_special_tokens=False))
            whole = torch.tensor([[answers.prefix_token_id, *ids]])
            said = model(whole).logits.log_softmax(-1)[:, :-1].gather(-1, whole[:, 1:, None])
            assert got == pytest.approx(said[:, -num_scored:].sum().item(), abs=1e-3)


@pytest.mark.parametrize("adds_boundary", [True, False])
def test_the_base_alone_reads_the_ids_that_are_its_own(
    shared_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    models: dict[str, ScaleForCausalLM],
    adds_boundary: bool,
) -> None:
    """A request passes all heads once; ids that are the base's alone pass the plain base."""
    know_only(tmp_path, monkeypatch)
    add_task(tmp_path, "sums", SUMS)
    model = models[STORIES]
    tokenizer = load_tokenizer(ModelConfig(base=str(shared_data / STORIES / "hf")))
    reads = framed(tokenizer) if adds_boundary else tokenizer
    answers = ObservedHeads(model, reads, ROUTER, Passes(64, 8, "no"), max_length=512)
    num_rows = {"whole": 0, "expansion": 0}
    hooks = [
        module.register_forward_pre_hook(
            lambda _module, given, name=name: num_rows.update(
                {name: num_rows[name] + len(given[0])}
            )
        )
        for name, module in (
            ("whole", model.base.model.embed_tokens),
            ("expansion", model.expansion.embed_tokens),
        )
    ]
    measure_items(opened({"name": "sums", "num_fewshot": 2}), answers)
    for hook in hooks:
        hook.remove()
    of_each = 2 * len(SUMS)  # two choices
    assert num_rows == {"whole": of_each if adds_boundary else 2 * of_each, "expansion": of_each}


@pytest.mark.parametrize(("max_length", "continuation"), [(2, " a long day it was"), (64, "")])
def test_a_continuation_that_cannot_be_scored_is_named(
    shared_data: Path, models: dict[str, ScaleForCausalLM], max_length: int, continuation: str
) -> None:
    answers = answering(shared_data, models[STORIES], max_length=max_length)
    with pytest.raises(RunError, match=f"{continuation!r} after 'One'"):
        answers.loglikelihood(asked(("One", continuation)))


@pytest.fixture
def make_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A task whose answers are generated."""
    know_only(tmp_path, monkeypatch)

    def make(**keys: Any) -> Benchmark:
        config = {
            "output_type": "generate_until",
            "doc_to_choice": None,
            "doc_to_text": "{{begun}}",
            "doc_to_target": "{{ended}}",
            "generation_kwargs": {
                "until": ["\n", " and", ". "],
                "max_gen_toks": 12,
                "do_sample": False,
            },
            "filter_list": [
                {
                    "name": "first-words",
                    "filter": [{"function": "regex", "regex_pattern": r"^\s*(\S+ \S+)"}],
                },
                {"name": "whole", "filter": [{"function": "take_first"}]},
            ],
            "metric_list": [
                {"metric": "exact_match", **MEAN, "ignore_case": True, "ignore_punctuation": True},
                {"metric": "bleu", "aggregation": "bleu", "higher_is_better": True},
            ],
        } | keys
        add_task(
            tmp_path,
            "endings",
            [{"begun": begun, "ended": ended} for begun, ended in BEGUN],
            **config,
        )
        return opened("endings")

    return make


def texts_of(items: list[Item], head: str) -> list[int | str]:
    return [item.heads[head].prediction for item in items]


def test_answers_and_marks_are_lm_evals_own_of_each_heads_model(
    make_task: Any, shared_data: Path
) -> None:
    """The base, and the model as it serves, each by lm-eval's `hf` model."""
    model = as_if_trained(widen(real_base(shared_data, STORIES), "route", "top:1"), std=0.15)
    benchmark = make_task()
    tokenizer = load_tokenizer(ModelConfig(base=str(shared_data / STORIES / "hf")))
    answers = ObservedHeads(model, tokenizer, RouterConfig(), Passes(64, 2, "no"), max_length=128)
    measured = measure_items(benchmark, answers)
    items = measured.items
    for head, alone, reads in (
        ("base", model.base, tokenizer),
        ("posterior", model, framed(tokenizer)),
    ):
        theirs = HFLM(alone, backend="causal", tokenizer=reads, max_length=128, batch_size=2)
        found: Any = evaluate(theirs, {"tasks": benchmark.tasks}, bootstrap_iters=0)
        logged = [sample for sample in found["samples"]["endings"] if sample["filter"] == "whole"]
        assert texts_of(items, head) == [sample["resps"][0][0] for sample in logged]
        for kept in ("first-words", "whole"):
            mean = np.mean([item.heads[head].metrics[f"exact_match, {kept}"] for item in items])
            assert mean == pytest.approx(found["results"]["endings"][f"exact_match,{kept}"])
    assert len({tuple(texts_of(items, head)) for head in HEADS}) > 1, "heads that differ"
    assert all(len(outcome.metrics) == 2 for item in items for outcome in item.heads.values()), (
        "bleu is no mean"
    )
    assert not any(
        stop in str(text) for text in texts_of(items, "base") for stop in ("\n", " and", ". ")
    )
    assert measured.judged_by == "exact_match, first-words"


def test_a_generative_task_that_says_nothing_of_right_or_wrong_or_asks_too_much_is_one_line(
    make_task: Any, shared_data: Path, models: dict[str, ScaleForCausalLM]
) -> None:
    benchmark = make_task(
        metric_list=[{"metric": "bleu", "aggregation": "bleu", "higher_is_better": True}]
    )
    with pytest.raises(
        RunError, match="lm-eval reports no metric that says whether an item is right"
    ):
        measure_items(benchmark, answering(shared_data, models[STORIES]))
    with pytest.raises(
        RunError, match="it asks for answers of 12 tokens, but the model's context is 12"
    ):
        measure_items(benchmark, answering(shared_data, models[STORIES], max_length=12))


def test_several_processes_that_share_the_requests_answer_as_one_does(
    make_task: Any,
    shared_data: Path,
    models: dict[str, ScaleForCausalLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scored = asked(
        *(
            (f"Once upon a time {word}", " there was a cat" * count)
            for count, word in enumerate("abcde", 1)
        )
    )
    (task,) = make_task(
        generation_kwargs={"until": ["."], "max_gen_toks": 6, "do_sample": False}
    ).tasks.values()
    task.build_all_requests()
    generated = [
        request for request in task.instances for _ in range(2)
    ]  # as of a task that repeats them

    def answers(share: Share) -> list[Any]:
        heads = answering(shared_data, models[STORIES], batch_size=2, share=share)
        answered: list[Any] = [heads.generate_until(generated)]
        for head in HEADS:
            heads.answer_with(head)
            answered.append(heads.loglikelihood(scored))
        return answered

    alone = answers(ALONE)
    assert len(alone[0]) == 2 * len(BEGUN) and any(alone[0])
    assert in_processes(monkeypatch, 2, answers) == [alone] * 2
    assert in_processes(monkeypatch, 4, answers) == [alone] * 4  # more processes than batches
