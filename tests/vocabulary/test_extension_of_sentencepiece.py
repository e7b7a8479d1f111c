"""SentencePiece's own file with new pieces, read back by protobuf."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from scale_cli.errors import BaseModelError
from scale_cli.vocabulary.extension import with_new_pieces

ModelProto: Any = import_module("transformers.utils.sentencepiece_model_pb2_new").ModelProto


@given(old=st.lists(st.text(max_size=90), max_size=4), new=st.lists(st.text(min_size=1, max_size=90), unique=True))
def test_a_model_with_new_pieces_has_the_old_ones_and_every_id_of_the_tokenizer(old: list[str], new: list[str]) -> None:
    model = ModelProto()
    for rank, text in enumerate(old):
        model.pieces.add(piece=text, score=-rank)
    model.trainer_spec.vocab_size = 7
    model.normalizer_spec.name = "identity"
    between = ["<pad>", "unused"]
    names = [*(f"{index}" * 100 for index in range(len(old))), *between, *(f"new {text}" for text in new)]
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(names)}, []))
    tokenizer.add_special_tokens([AddedToken("<pad>")])

    grown = ModelProto.FromString(with_new_pieces(model.SerializeToString(), tokenizer, len(old) + len(between)))
    added = grown.pieces[len(old) :]
    assert list(grown.pieces[: len(old)]) == list(model.pieces)
    assert [piece.piece for piece in added] == names[len(old) :]
    assert [piece.type for piece in added] == [3, 5] + [1] * len(new)
    assert [piece.score for piece in added] == sorted((piece.score for piece in added), reverse=True)
    assert all(piece.score < -len(old) for piece in added)
    assert (grown.trainer_spec, grown.normalizer_spec) == (model.trainer_spec, model.normalizer_spec)


def test_half_a_model_is_refused() -> None:
    model = ModelProto()
    model.pieces.add(piece="a", score=0.0)
    with pytest.raises(BaseModelError, match=r"tokenizer\.model is damaged"):
        with_new_pieces(model.SerializeToString()[:-2], Tokenizer(models.BPE({}, [])), 1)
