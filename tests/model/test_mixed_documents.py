"""English with Korean words in it, in new tokens and in the base's bytes: what a text costs does
not grow by them.
"""

import functools
import math
import re
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from scale_cli.config.vocabulary import Script
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.upscale.building import NewPieces
from scale_cli.vocabulary.growing import Spelling, extended, pieces
from scale_cli.vocabulary.learning import count_words, learn
from tests.vocabulary.tokenizers_at_hand import KOREAN
from tests.widening import real_base, widen

HANGUL = Script.named("hangul")
STORY = "Once upon a time there was a little girl named Lily . She loved to play in the park with her mom and dad ."
words = st.lists(st.sampled_from([*STORY.split(), *KOREAN.split()]), min_size=1, max_size=20)


@functools.cache
def grown(shared_data: Path) -> tuple[Tokenizer, Tokenizer, ScaleForCausalLM]:
    """The tokenizer of a base that never saw Hangul, that with new tokens, and the two heads, one
    of them astray.
    """
    base = real_base(shared_data, "ckpt-stories260K")
    old = AutoTokenizer.from_pretrained(shared_data / "ckpt-stories260K/hf").backend_tokenizer
    spelling = Spelling.of(old, "a base")
    first_id = base.config.vocab_size
    new = extended(
        old,
        learn(count_words(KOREAN, old, HANGUL), old, spelling, HANGUL, most=64, min_count=1),
        first_id,
    )
    of_each = pieces(new, spelling, first_id)
    spelled = {one[0]: spelling.to_bytes(str(old.id_to_token(one[0]))) for one in of_each}
    own = [piece for piece, begins in spelled.items() if HANGUL.alone_begins(begins)]
    model = widen(base, "route", new=NewPieces([" ".join(map(str, o)) for o in of_each], own))
    with torch.no_grad():
        model.expansion.lm_head.weight.normal_(generator=torch.Generator().manual_seed(0))
    return old, new, model


@torch.no_grad()
def cost(model: Any, ids: list[int]) -> float:
    """What a text costs under a model as it serves: the untouched base, or the posterior rule."""
    logits = model(torch.tensor([[1, *ids]])).logits[0, :-1]
    return -float(logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None]).sum())


@settings(max_examples=20)
@given(text=words.map(" ".join))
def test_a_mixed_document_is_routed_within_the_bound_against_the_base_that_reads_bytes(
    shared_data: Path, text: str
) -> None:
    """To the first letter of the script a theorem; after it measured, of a base that spends its
    bytes dearly on it.
    """
    old, new, model = grown(shared_data)
    before, after = (
        tokenizer.encode(text, add_special_tokens=False).ids for tokenizer in (old, new)
    )
    pairs = enumerate(zip(before, after, strict=False))
    shared = next((at for at, (one, other) in pairs if one != other), len(after))
    for length in {shared, None} - {0}:
        bound = cost(model.base, before[:length]) + math.log(2) + 1e-3
        assert cost(model, after[:length]) <= bound
    assert (before == after) == (not re.search(f"[{HANGUL.characters}]", text))
