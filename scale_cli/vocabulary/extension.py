"""A tokenizer with more tokens: its description (tokenizer.json) rewritten, and the old pieces of every new token."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tokenizers import Tokenizer

from scale_cli.vocabulary.learning import NewToken
from scale_cli.vocabulary.spelling import Spelling

# Of ids that the base has a row for and its tokenizer no token; no text has this, and no bytes are spelt with it.
_UNUSED = "\ue000unused {}\ue000"


def extended(tokenizer: Tokenizer, new: Sequence[NewToken], first_id: int) -> Tokenizer:
    """Return a tokenizer with new tokens after all old ids.

    Args:
        tokenizer: stays as it is.
        new: each after those that it is made of.
        first_id: of the new ones: how many rows the base's embedding has.
    """
    described = json.loads(tokenizer.to_str())
    vocabulary = described["model"]["vocab"]
    # tokenizers gives an added token that the model does not hold the next free id, so that it would move.
    for added in described["added_tokens"]:
        vocabulary[added["content"]] = added["id"]
    taken = set(vocabulary.values())
    vocabulary |= {_UNUSED.format(index): index for index in range(first_id) if index not in taken}
    vocabulary |= {token.token: first_id + index for index, token in enumerate(new)}
    described["model"]["merges"] += [list(token.merged) for token in new if token.merged]
    return Tokenizer.from_str(json.dumps(described))


def new_tokens(tokenizer: Tokenizer, first_id: int) -> list[NewToken]:
    """Return what a tokenizer was extended by.

    Args:
        tokenizer: the one with new tokens.
        first_id: of the new ones.
    """
    model = json.loads(tokenizer.to_str())["model"]
    merged = _first_merges(model["merges"])
    new = sorted((index, token) for token, index in model["vocab"].items() if index >= first_id)
    return [NewToken(token, merged.get(token)) for _, token in new]


def pieces(tokenizer: Tokenizer, spelling: Spelling, first_id: int) -> list[list[int]]:
    """Return of every new token the old ids that stood in its place, in order.

    Args:
        tokenizer: the one with new tokens.
        spelling: of its tokens.
        first_id: of the new ones.
    """
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary: dict[str, int] = model["vocab"]
    merged = _first_merges(model["merges"])
    of_old = {token: [index] for token, index in vocabulary.items() if index < first_id}
    new = sorted((index, token) for token, index in vocabulary.items() if index >= first_id)
    return [_pieces(token, merged, of_old, spelling) for _, token in new]


def _first_merges(merges: Sequence[tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Return of every product the merge that comes first."""
    return {left + right: (left, right) for left, right in reversed(merges)}


def _pieces(
    token: str, merged: dict[str, tuple[str, str]], known: dict[str, list[int]], spelling: Spelling
) -> list[int]:
    if token not in known:
        if token in merged:
            left, right = (_pieces(part, merged, known, spelling) for part in merged[token])
            known[token] = left + right
        else:
            known[token] = [known[f"<0x{byte:02X}>"][0] for byte in spelling.to_bytes(token)]
    return known[token]
