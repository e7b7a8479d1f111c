"""What each head, and each routing rule, generates is what it says is likeliest; its letters are counted one by one."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from scale_cli.config.schema import ContinuationsConfig, ModelConfig
from scale_cli.config.sources import EvaluationSource
from scale_cli.data.tokens import TokenCache, TokenisedCorpus
from scale_cli.evaluation.continuations import (
    SelectableHeads,
    count_letters,
    padded_left,
    scripts_of,
)
from scale_cli.evaluation.results import HEADS, Values
from scale_cli.evaluation.scoring import TWO_HEADS, Passes
from scale_cli.methods.widened import RouterConfig
from scale_cli.model.heads import BaseAndTrained, HeadedModel
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.model.routing import (
    cosine_log_weights,
    log_prior,
    logit_cosine,
    mix_log_probs,
    posterior_log_weights,
)
from scale_cli.processes import ALONE, Share
from scale_cli.upscale.base_tokenizer import load_tokenizer
from scale_cli.upscale.building import NewPieces
from tests.threads_as_processes import in_processes
from tests.widening import as_if_trained, joined, real_base, tiny_llama, widen

ROUTER = RouterConfig(prior=0.3, switch_rate=0.05, threshold=0.2)
NEW = NewPieces([f"{index} {index + 1}" for index in range(5)], [0, 2])


def of_three_heads() -> HeadedModel:
    one, other = (
        as_if_trained(widen(tiny_llama(), "route"), std=0.4, seed=seed) for seed in (1, 2)
    )
    return joined(tiny_llama(), one=(0, one), other=(0, other))


MODELS: dict[str, Callable[[], HeadedModel]] = {
    "route": lambda: as_if_trained(widen(tiny_llama(), "route", "top:2"), std=0.4),
    "preserve": lambda: as_if_trained(widen(tiny_llama(), "preserve"), std=0.4),
    "stacked": lambda: as_if_trained(
        widen(as_if_trained(widen(tiny_llama(), "route")), "route"), std=0.4
    ),
    "new tokens": lambda: as_if_trained(widen(tiny_llama(), "route", new=NEW), std=0.4),
    "joined": of_three_heads,
    "two models": lambda: BaseAndTrained(tiny_llama(), tiny_llama(seed=1)).eval(),
}


@torch.no_grad()
def likeliest(model: HeadedModel, ids_T: Tensor, head: str, heads: list[str]) -> Tensor:
    """The likeliest token after each, by one pass over all of them, without a cache or padding."""
    logits = [of_head.float() for of_head in model.head_logits(ids_T[None])(slice(None))]
    if head in heads:
        return logits[heads.index(head)][0].argmax(dim=-1)
    log_probs_KBTV = torch.stack(logits).log_softmax(dim=-1).double()
    if head == "cosine":
        log_weights_KBT = cosine_log_weights(logit_cosine(logits[0], logits[-1]), ROUTER.threshold)
    else:
        next_BT = torch.cat([ids_T[1:], ids_T[:1]])[
            None
        ]  # what follows the last one weighs nothing that is read
        said_KBT = log_probs_KBTV.gather(
            -1, next_BT.expand(len(logits), -1, -1).unsqueeze(-1)
        ).squeeze(-1)
        prior_K = log_prior(ROUTER.prior, len(logits))
        log_weights_KBT = posterior_log_weights(said_KBT, prior_K, ROUTER.switch_rate)[..., :-1]
    return mix_log_probs(log_weights_KBT.unsqueeze(-1), log_probs_KBTV)[0].argmax(dim=-1)


@pytest.mark.parametrize("name", MODELS)
def test_what_a_head_generates_is_what_it_says_is_likeliest_whatever_stands_beside_it_in_the_batch(
    name: str,
) -> None:
    model = MODELS[name]()
    heads = ["base", "one", "other"] if name == "joined" else list(TWO_HEADS)
    answers = SelectableHeads(model, ROUTER, heads)
    vocab_size = model.config.vocab_size
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, vocab_size, (length,), generator=generator) for length in (9, 4, 1)]
    ids, mask = padded_left(prompts, padding=0)
    said = {}
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for head in [*heads, "posterior", *(["cosine"] if len(heads) == 2 else [])]:
        answers.head = head
        new = answers.answers(ids, mask, **options)
        for row, prompt in enumerate(prompts):
            whole = torch.cat([prompt, new[row]])
            expected = likeliest(model, whole, head, heads)[len(prompt) - 1 : -1]
            assert whole[len(prompt) :].tolist() == expected.tolist(), head
        said[head] = new.tolist()
    assert said["base"] != said[heads[-1]] and said["posterior"] != said["base"], (
        "heads that differ"
    )
    assert answers.answers(ids, mask, num_beams=2, **options).shape == new.shape, (
        "the cache follows its beams"
    )


ASKED = ContinuationsConfig(prompts=5, prompt_tokens=12, new_tokens=4)


def test_japanese_is_one_script_and_signs_are_none() -> None:
    assert set(scripts_of("日本語のテキスト、ｶﾅも々ー")) == {"HAN AND KANA"}
    assert Counter(scripts_of("ｆｕｌｌ 한국어 12½ — €")) == {"LATIN": 4, "HANGUL": 3}
    assert scripts_of("1, 2 (3)\N{REPLACEMENT CHARACTER}\N{MODIFIER LETTER APOSTROPHE}") == []


@pytest.fixture(scope="module")
def model(shared_data: Path) -> ScaleForCausalLM:
    return as_if_trained(
        widen(real_base(shared_data, "ckpt-stories260K"), "route", "top:1"), std=0.3
    )


@pytest.fixture(scope="module")
def corpus(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenisedCorpus:
    folder = tmp_path_factory.mktemp("texts")
    texts = [
        "Once there was a little girl",
        "12 34",
        "옛날 옛적에 한 소녀가",
        "He said: 안녕 to all",
        "The cat sat.",
        "Да",
    ]
    (folder / "texts.txt").write_text("\n\n".join(texts), encoding="utf-8")
    source = EvaluationSource(
        name="texts", path=str(folder / "texts.txt"), language="en", role="retention"
    )
    return TokenCache(folder / "tokens", tokenizer_of(shared_data)).open(source)


def tokenizer_of(shared_data: Path) -> Any:
    return load_tokenizer(ModelConfig(base=str(shared_data / "ckpt-stories260K" / "hf")))


def test_letters_are_those_of_the_heads_own_greedy_continuations(
    model: ScaleForCausalLM,
    corpus: TokenisedCorpus,
    shared_data: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One prompt after another, by the base itself and by the model as it serves."""
    tokenizer = tokenizer_of(shared_data)
    passes = Passes(sequence_length=64, batch_size=2, mixed_precision="no")

    def counted(share: Share) -> dict[str, Values]:
        answers = SelectableHeads(model, RouterConfig())
        return count_letters(answers, corpus, tokenizer, ASKED, passes, share=share)

    said = counted(ALONE)
    expected: dict[str, list[tuple[int, int]]] = {"base": [], "posterior": []}
    for index in range(len(corpus)):
        ids = torch.tensor(
            [corpus.document(index).astype(np.int64)[: ASKED.prompt_tokens].tolist()]
        )
        prompt = tokenizer.decode(
            [i for i in ids[0].tolist() if i != tokenizer.eos_token_id], skip_special_tokens=True
        )
        if not any(letter.isalpha() for letter in prompt):
            continue
        if ids[0, -1] == tokenizer.eos_token_id:
            ids = ids[:, :-1]
        is_latin = sum(letter.isascii() for letter in prompt if letter.isalpha()) * 2 > sum(
            map(str.isalpha, prompt)
        )
        served: Any = model
        for name, one in (("base", served.base), ("posterior", served)):
            new = one.generate(
                ids, max_new_tokens=ASKED.new_tokens, do_sample=False, pad_token_id=0
            )[0, ids.shape[1] :]
            letters = [
                letter
                for letter in tokenizer.decode(new, skip_special_tokens=True)
                if letter.isalpha()
            ]
            expected[name].append(
                (sum(letter.isascii() == is_latin for letter in letters), len(letters))
            )
    assert len(expected["base"]) == 5, "a text without a letter is no prompt"
    for name, counts in expected.items():
        assert said[name].tolist() == [list(count) for count in counts]
    assert set(said) == set(HEADS)
    for of_process in in_processes(monkeypatch, 4, counted):  # one of them has no prompts
        np.testing.assert_equal(of_process, said)
