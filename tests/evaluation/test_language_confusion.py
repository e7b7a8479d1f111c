"""Language confusion is what each head says by itself, counted letter by letter."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scale_cli.config.schema import ContinuationsConfig, ModelConfig
from scale_cli.config.sources import EvaluationSource
from scale_cli.data.tokens import TokenisedCorpus, tokenised
from scale_cli.evaluation.continuations import SelectableHeads, count_letters, scripts_of
from scale_cli.evaluation.results import HEADS
from scale_cli.evaluation.scoring import Passes
from scale_cli.evaluation.statistics import Values
from scale_cli.methods.widened import RouterConfig
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.processes import ALONE, Share
from scale_cli.upscale.tokenizer import load_tokenizer
from tests.threads_as_processes import in_processes
from tests.widening import as_if_trained, real_base, widen

ASKED = ContinuationsConfig(prompts=5, prompt_tokens=12, new_tokens=8)
BLOCKS = {"LATIN": (0x41, 0x17F), "HANGUL": (0xAC00, 0xD7A3), "CYRILLIC": (0x400, 0x4FF), "THAI": (0xE01, 0xE2E)}


@given(st.lists(st.tuples(st.sampled_from(sorted(BLOCKS)), st.integers(0, 10_000)), max_size=40))
def test_a_letters_script_is_its_blocks(drawn: list[tuple[str, int]]) -> None:
    letters = [
        (script, chr(first + at % (last - first + 1))) for script, at in drawn for first, last in [BLOCKS[script]]
    ]
    letters = [(script, letter) for script, letter in letters if letter.isalpha()]
    assert scripts_of(" 1.".join(letter for _, letter in letters)) == [
        script for script, letter in letters for _ in scripts_of(letter)
    ]
    assert all(set(scripts_of(letter)) <= {script} for script, letter in letters)


def test_japanese_is_one_script_and_signs_are_none() -> None:
    assert set(scripts_of("日本語のテキスト、ｶﾅも々ー")) == {"HAN AND KANA"}
    assert Counter(scripts_of("ｆｕｌｌ 한국어 12½ — €")) == {"LATIN": 4, "HANGUL": 3}
    assert scripts_of("1, 2 (3)\N{REPLACEMENT CHARACTER}\N{MODIFIER LETTER APOSTROPHE}") == []


@pytest.fixture(scope="module")
def model(shared_data: Path) -> ScaleForCausalLM:
    return as_if_trained(widen(real_base(shared_data, "ckpt-stories260K"), "route", "top:1"), std=0.3)


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
    source = EvaluationSource(name="texts", path=str(folder / "texts.txt"), language="en", role="retention")
    return tokenised(source, tokenizer_of(shared_data), folder / "tokens", show_progress=False)


def tokenizer_of(shared_data: Path) -> Any:
    return load_tokenizer(ModelConfig(base=str(shared_data / "ckpt-stories260K" / "hf")))


def counted(
    model: ScaleForCausalLM, corpus: TokenisedCorpus, shared_data: Path, share: Share = ALONE
) -> dict[str, Values]:
    answers = SelectableHeads(model, RouterConfig())
    passes = Passes(sequence_length=64, batch_size=2, mixed_precision="no")
    return count_letters(answers, HEADS, corpus, tokenizer_of(shared_data), ASKED, passes, share=share)


def test_letters_are_those_of_the_heads_own_greedy_continuations(
    model: ScaleForCausalLM, corpus: TokenisedCorpus, shared_data: Path
) -> None:
    """One prompt after another, by the base itself and by the model as it serves."""
    said, tokenizer = counted(model, corpus, shared_data), tokenizer_of(shared_data)
    expected: dict[str, list[tuple[int, int]]] = {"base": [], "posterior": []}
    for index in range(len(corpus)):
        ids = torch.tensor([corpus.document(index).astype(np.int64)[: ASKED.prompt_tokens].tolist()])
        prompt = tokenizer.decode([i for i in ids[0].tolist() if i != tokenizer.eos_token_id], skip_special_tokens=True)
        if not any(letter.isalpha() for letter in prompt):
            continue
        if ids[0, -1] == tokenizer.eos_token_id:
            ids = ids[:, :-1]
        is_latin = sum(letter.isascii() for letter in prompt if letter.isalpha()) * 2 > sum(map(str.isalpha, prompt))
        served: Any = model
        for name, one in (("base", served.base), ("posterior", served)):
            new = one.generate(ids, max_new_tokens=ASKED.new_tokens, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
            letters = [letter for letter in tokenizer.decode(new, skip_special_tokens=True) if letter.isalpha()]
            expected[name].append((sum(letter.isascii() == is_latin for letter in letters), len(letters)))
    assert len(expected["base"]) == 5, "a text without a letter is no prompt"
    for name, counts in expected.items():
        assert said[name].tolist() == [list(count) for count in counts]
    assert set(said) == set(HEADS)


def test_the_counts_do_not_hang_on_how_many_processes_share_the_prompts(
    model: ScaleForCausalLM, corpus: TokenisedCorpus, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = counted(model, corpus, shared_data)
    together = in_processes(monkeypatch, 4, lambda share: counted(model, corpus, shared_data, share))  # one has none
    for letters in together:
        for name in HEADS:
            np.testing.assert_array_equal(letters[name], alone[name])
