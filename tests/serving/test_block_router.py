"""The server's router against one that is alone with each document, under whatever a scheduler may
do.

Nothing is learnt here: a token's "hidden row" is what both heads are to say after it, so either may
    break at any token.
"""

import math
from dataclasses import dataclass, field
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scale_cli.model.routing import log_prior, mix_logits, posterior_log_weights
from scale_cli.serving.block_router import BlockRouter, Step, attach_state, detach_state

VOCABULARY = 5
unhurried = settings(max_examples=40)


class RowsAsLogits:
    """Heads that say what the row holds."""

    def logits(self, rows_TD: Tensor) -> Tensor:
        return rows_TD.view(len(rows_TD), 2, VOCABULARY)

    def logits_of(self, rows_TD: Tensor, ids_T: Tensor) -> Tensor:
        return self.logits(rows_TD).gather(-1, ids_T[:, None, None].expand(-1, 2, 1))[..., 0]

    def sizes(self, rows_TD: Tensor) -> Tensor:
        return torch.logsumexp(self.logits(rows_TD), dim=-1)

    def observe(self, rows_TD: Tensor, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        return self.logits_of(rows_TD, ids_T), self.sizes(rows_TD)


@dataclass(eq=False)
class Document:
    ids_T: Tensor
    hidden_TD: Tensor
    judged_T: Tensor
    prior_K: Tensor
    blocks: list[int] = field(default_factory=list)
    done: int = 0

    def log_odds(self, heads: RowsAsLogits) -> Tensor:
        """(T,): what a router says of the trained head that has read this document alone."""
        logits_KTV = heads.logits(self.hidden_TD[:-1]).transpose(0, 1)
        log_probs_KTV = logits_KTV.log_softmax(-1).nan_to_num(-math.inf, neginf=-math.inf)
        said_KT = log_probs_KTV.gather(-1, self.ids_T[1:].expand(2, -1)[..., None])[..., 0]
        said_KT = torch.where(self.judged_T[1:], said_KT, 0.0)
        evidence_KT = torch.cat([torch.zeros(2, 1), said_KT], dim=-1)
        weights_KBS = posterior_log_weights(evidence_KT[:, None], self.prior_K)
        base_T, trained_T = weights_KBS[:, 0, 1:]
        return trained_T - base_T


class Blocks:
    """A cache of few blocks: full ones are found again by what they hold, until somebody needs the
    room.
    """

    def __init__(self, number: int, size: int) -> None:
        self.size = size
        self.users = [0] * number
        self.of_prefix: dict[tuple[int, ...], int] = {}

    def take(self) -> int | None:
        free = [block for block, users in enumerate(self.users) if users == 0]
        if not free:
            return None
        kept = set(self.of_prefix.values())
        block = min(free, key=lambda block: block in kept)
        self.of_prefix = {prefix: at for prefix, at in self.of_prefix.items() if at != block}
        self.users[block] = 1
        return block

    def begin(self, document: Document) -> None:
        """Start a document behind what is cached of it; the last token is always computed."""
        ids = document.ids_T.tolist()
        for end in range(self.size, len(ids), self.size):
            block = self.of_prefix.get(tuple(ids[:end]))
            if block is None:
                break
            self.users[block] += 1
            document.blocks.append(block)
            document.done = end

    def drop(self, document: Document) -> None:
        for block in document.blocks:
            self.users[block] -= 1
        document.blocks = []
        document.done = 0

    def room_for(self, document: Document, end: int) -> bool:
        while len(document.blocks) * self.size < end:
            block = self.take()
            if block is None:
                return False
            document.blocks.append(block)
        return True

    def note_full_ones(self, document: Document) -> None:
        ids = document.ids_T.tolist()
        for end in range(self.size, document.done + 1, self.size):
            self.of_prefix.setdefault(tuple(ids[:end]), document.blocks[end // self.size - 1])


def step_of(
    batch: list[tuple[Document, int]], size: int, padding: int, random: Random
) -> tuple[Step, Tensor]:
    """One step of several documents, so many tokens each, and padding behind them."""
    ids = []
    positions = []
    slots = []
    starts = [0]
    hidden = []
    for document, length in batch:
        places = range(document.done, document.done + length)
        ids += document.ids_T[places.start : places.stop].tolist()
        positions += list(places)
        slots += [document.blocks[at // size] * size + at % size for at in places]
        hidden.append(document.hidden_TD[places.start : places.stop])
        starts.append(starts[-1] + length)
    width = max(len(document.blocks) for document, _ in batch)
    table = [document.blocks + [0] * (width - len(document.blocks)) for document, _ in batch]
    ids += [random.randrange(VOCABULARY) for _ in range(padding)]
    positions += [random.randrange(width * size) for _ in range(padding)]
    slots += [-1] * padding
    hidden.append(torch.full((padding, hidden[0].shape[1]), math.nan))
    judged_RP = torch.ones(len(batch) + padding, width * size, dtype=torch.bool)
    for judged_P, (document, _) in zip(judged_RP, batch, strict=False):
        known_P = document.judged_T[: width * size]
        judged_P[: len(known_P)] = known_P
    priors = [document.prior_K.diff() for document, _ in batch] + [torch.zeros(1)] * padding
    step = Step(
        ids_T=torch.tensor(ids),
        positions_T=torch.tensor(positions),
        slots_T=torch.tensor(slots),
        blocks_RB=torch.tensor(table + [[0] * width] * padding, dtype=torch.int32),
        starts_R=torch.tensor(starts + [starts[-1]] * padding, dtype=torch.int32),
        longest=max(length for _, length in batch),
        block_size=size,
        prior_R=torch.cat(priors),
        judged_RP=judged_RP,
    )
    return step, torch.cat(hidden)


def some_documents(random: Random, broken: float) -> list[Document]:
    """Documents that begin alike, since a cache is for those, with priors of their own; what both
    heads say after each prefix, and whether the prefix's last token is judged.
    """
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    rows: dict[tuple[int, ...], Tensor] = {}
    judged: dict[tuple[int, ...], bool] = {}
    stem = [random.randrange(VOCABULARY) for _ in range(12)]
    documents = []
    for _ in range(random.randint(1, 5)):
        ids = stem[: random.randint(0, 12)] + [
            random.randrange(VOCABULARY) for _ in range(random.randint(1, 12))
        ]
        prefixes = [tuple(ids[:end]) for end in range(1, len(ids) + 1)]
        for prefix in prefixes:
            if prefix not in rows:
                said = 3 * torch.randn(2, VOCABULARY, generator=generator)
                for head in range(2):
                    if random.random() < broken:
                        at = random.randrange(VOCABULARY)
                        said[head, at] = random.choice([math.nan, math.inf, -math.inf])
                rows[prefix] = said.flatten()
                judged[prefix] = random.random() < 0.8
        hidden = torch.stack([rows[prefix] for prefix in prefixes])
        judged_T = torch.tensor([judged[prefix] for prefix in prefixes])
        prior_K = log_prior(random.choice([0.5, 0.9, 0.02]))
        documents.append(Document(torch.tensor(ids), hidden, judged_T, prior_K))
    return documents


@given(seed=st.integers(0, 2**31), size=st.integers(1, 5), broken=st.sampled_from([0.0, 0.3]))
@unhurried
def test_every_document_is_weighed_as_if_it_were_alone(seed: int, size: int, broken: float) -> None:
    random = Random(seed)
    heads = RowsAsLogits()
    documents = some_documents(random, broken)
    longest = max(len(document.ids_T) for document in documents)
    cache = Blocks(random.randint(-(-longest // size), 40), size)
    router = BlockRouter()
    router.allocate(len(cache.users), 2 * VOCABULARY, torch.float32, torch.device("cpu"))
    expected = [document.log_odds(heads) for document in documents]

    for _ in range(40):
        if random.random() < 0.1:
            cache.drop(random.choice(documents))
        one_each = random.random() < 0.5
        batch = []
        for document in random.sample(documents, random.randint(1, len(documents))):
            if document.done in (0, len(document.ids_T)):
                cache.drop(document)
                cache.begin(document)
            length = 1 if one_each else random.randint(1, len(document.ids_T) - document.done)
            if cache.room_for(document, document.done + length):
                batch.append((document, length))
            else:
                cache.drop(document)
        if not batch:
            continue
        step, hidden_TD = step_of(batch, size, random.choice([0, 0, 2]), random)
        log_odds_T, rows_T = router.advance(hidden_TD, step, heads)
        _, told_T, told_rows_T = detach_state(
            attach_state(hidden_TD, log_odds_T, rows_T), hidden_TD.shape[1]
        )
        assert torch.equal(told_T, log_odds_T.float())
        lasts = step.starts_R[1 : len(batch) + 1] - 1
        router.remember(told_rows_T[lasts], heads.sizes(hidden_TD[lasts]))
        for (document, length), start in zip(batch, step.starts_R.tolist(), strict=False):
            wanted = expected[documents.index(document)][document.done : document.done + length]
            torch.testing.assert_close(
                log_odds_T[start : start + length], wanted, atol=1e-4, rtol=1e-5
            )
            document.done += length
            cache.note_full_ones(document)


@given(
    seed=st.integers(0, 2**31),
    broken=st.sampled_from([0.0, 0.4]),
    scale=st.sampled_from([1.0, 30.0, 1000.0]),
)
@unhurried
def test_scores_of_shares_of_the_vocabulary_mixed_with_known_sizes_are_those_of_the_whole(
    seed: int, broken: float, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_KRV = scale * torch.randn(2, 3, 7, generator=generator)
    logits_KRV[torch.rand(logits_KRV.shape, generator=generator) < broken / 7] = math.nan
    log_weights_KR = torch.log_softmax(5 * torch.randn(2, 3, generator=generator), dim=0)
    expected = mix_logits(log_weights_KR, logits_KRV)
    sizes_KR = torch.logsumexp(logits_KRV, dim=-1)
    halves = [
        mix_logits(log_weights_KR, list(half), sizes_KR)
        for half in logits_KRV.split([4, 3], dim=-1)
    ]
    some_head = logits_KRV.isfinite().all(dim=-1).any(dim=0)
    found = torch.cat(halves, dim=-1)
    torch.testing.assert_close(found[some_head], expected[some_head], atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_rows_state_comes_back_bit_by_bit_in_every_dtype(dtype: torch.dtype) -> None:
    hidden_TD = torch.randn(5, 8).to(dtype)
    log_odds_T = torch.randn(5)
    log_odds_T[0] = -math.inf
    rows_T = torch.tensor([0, 1, 77, 2**31 - 1, 12])
    attached = attach_state(hidden_TD, log_odds_T, rows_T)
    assert attached.shape[1] * attached.element_size() % 16 == 0
    picked = torch.tensor([3, 0, 4])
    hidden, log_odds, rows = detach_state(attached[picked], 8)
    assert torch.equal(hidden, hidden_TD[picked])
    assert torch.equal(log_odds, log_odds_T[picked])
    assert torch.equal(rows, rows_T[picked])


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16, torch.float16])
def test_the_state_has_the_same_dtypes_whatever_dtype_the_model_is_made_in(
    default: torch.dtype,
) -> None:
    # vLLM makes a model with its dtype as torch's default, and measures memory before there are
    # blocks: the scrap row is then written.
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        router = BlockRouter()
    finally:
        torch.set_default_dtype(before)

    router.remember(torch.tensor([0, 0]), torch.tensor([[1.0, 2.0], [1.0, 2.0]]))
    assert router.sizes_N2.dtype == torch.float32
    assert router.sizes_N2.tolist() == [[1.0, 2.0]]
    assert router.evidence_N.dtype == torch.float64
