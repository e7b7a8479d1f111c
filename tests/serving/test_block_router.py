"""The server's router against one that is alone with each document, under whatever a scheduler may
do.

Nothing is learnt here: a token's "hidden row" is what K heads are to say after it, so any may break
    at any token.
"""

import math
from dataclasses import dataclass, field
from random import Random

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

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads

    def logits(self, rows_TD: Tensor) -> Tensor:
        return rows_TD.view(len(rows_TD), self.num_heads, VOCABULARY)

    def logits_of(self, rows_TD: Tensor, ids_T: Tensor) -> Tensor:
        return self.logits(rows_TD).gather(-1, ids_T[:, None, None].expand(-1, self.num_heads, 1))[
            ..., 0
        ]

    def sizes(self, rows_TD: Tensor) -> Tensor:
        return torch.logsumexp(self.logits(rows_TD), dim=-1)

    def observe(self, rows_TD: Tensor, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        return self.logits_of(rows_TD, ids_T), self.sizes(rows_TD)


@dataclass(eq=False)
class Document:
    ids_T: Tensor
    hidden_TD: Tensor
    blocks: list[int] = field(default_factory=list)
    done: int = 0

    def log_weights(self, heads: RowsAsLogits, prior_K: Tensor) -> Tensor:
        """(T, K): what a router says that has read this document alone."""
        logits_KTV = heads.logits(self.hidden_TD[:-1]).transpose(0, 1)
        log_probs_KTV = logits_KTV.log_softmax(-1).nan_to_num(-math.inf, neginf=-math.inf)
        said_KT = log_probs_KTV.gather(-1, self.ids_T[1:].expand(heads.num_heads, -1)[..., None])[
            ..., 0
        ]
        evidence_KT = torch.cat([torch.zeros(heads.num_heads, 1), said_KT], dim=-1)
        return posterior_log_weights(evidence_KT[:, None], prior_K)[:, 0, 1:].T


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
        document.blocks, document.done = [], 0

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
    ids, positions, slots, starts, hidden = [], [], [], [0], []
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
    step = Step(
        ids_T=torch.tensor(ids),
        positions_T=torch.tensor(positions),
        slots_T=torch.tensor(slots),
        blocks_RB=torch.tensor(table + [[0] * width] * padding, dtype=torch.int32),
        starts_R=torch.tensor(starts + [starts[-1]] * padding, dtype=torch.int32),
        longest=max(length for _, length in batch),
        block_size=size,
    )
    return step, torch.cat(hidden)


def some_documents(random: Random, num_heads: int, broken: float) -> list[Document]:
    """Documents that begin alike, since a cache is for those, and what every head says after each
    prefix.
    """
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    rows: dict[tuple[int, ...], Tensor] = {}
    stem = [random.randrange(VOCABULARY) for _ in range(12)]
    documents = []
    for _ in range(random.randint(1, 5)):
        ids = stem[: random.randint(0, 12)] + [
            random.randrange(VOCABULARY) for _ in range(random.randint(1, 12))
        ]
        for end in range(1, len(ids) + 1):
            if tuple(ids[:end]) not in rows:
                said = 3 * torch.randn(num_heads, VOCABULARY, generator=generator)
                for head in range(num_heads):
                    if random.random() < broken:
                        at = random.randrange(VOCABULARY)
                        said[head, at] = random.choice([math.nan, math.inf, -math.inf])
                rows[tuple(ids[:end])] = said.flatten()
        hidden = torch.stack([rows[tuple(ids[:end])] for end in range(1, len(ids) + 1)])
        documents.append(Document(torch.tensor(ids), hidden))
    return documents


@given(
    seed=st.integers(0, 2**31),
    num_heads=st.integers(2, 4),
    size=st.integers(1, 5),
    base_prior=st.sampled_from([0.5, 0.9]),
    broken=st.sampled_from([0.0, 0.3]),
)
@unhurried
def test_every_document_is_weighed_as_if_it_were_alone(
    seed: int, num_heads: int, size: int, base_prior: float, broken: float
) -> None:
    random = Random(seed)
    heads, prior_K = RowsAsLogits(num_heads), log_prior(base_prior, num_heads)
    documents = some_documents(random, num_heads, broken)
    longest = max(len(document.ids_T) for document in documents)
    cache = Blocks(random.randint(-(-longest // size), 40), size)
    router = BlockRouter(prior_K)
    router.allocate(len(cache.users), num_heads * VOCABULARY, torch.float32)
    expected = [document.log_weights(heads, prior_K) for document in documents]

    for _ in range(40):
        if random.random() < 0.1:
            cache.drop(random.choice(documents))
        one_each, batch = random.random() < 0.5, []
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
        log_weights_TK, rows_T = router.advance(hidden_TD, step, heads)
        _, told_TK, told_T = detach_state(
            attach_state(hidden_TD, log_weights_TK, rows_T), hidden_TD.shape[1], num_heads
        )
        assert torch.equal(told_TK, log_weights_TK.float())
        lasts = step.starts_R[1 : len(batch) + 1] - 1
        router.remember(told_T[lasts], heads.sizes(hidden_TD[lasts]))
        for (document, length), start in zip(batch, step.starts_R.tolist(), strict=False):
            wanted = expected[documents.index(document)][document.done : document.done + length]
            torch.testing.assert_close(
                log_weights_TK[start : start + length], wanted, atol=1e-4, rtol=1e-5
            )
            document.done += length
            cache.note_full_ones(document)


@given(
    seed=st.integers(0, 2**31),
    num_heads=st.integers(2, 4),
    broken=st.sampled_from([0.0, 0.4]),
    scale=st.sampled_from([1.0, 30.0, 1000.0]),
)
@unhurried
def test_scores_of_shares_of_the_vocabulary_mixed_with_known_sizes_are_those_of_the_whole(
    seed: int, num_heads: int, broken: float, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_KRV = scale * torch.randn(num_heads, 3, 7, generator=generator)
    logits_KRV[torch.rand(logits_KRV.shape, generator=generator) < broken / 7] = math.nan
    log_weights_KR = torch.log_softmax(5 * torch.randn(num_heads, 3, generator=generator), dim=0)
    expected = mix_logits(log_weights_KR, logits_KRV)
    sizes_KR = torch.logsumexp(logits_KRV, dim=-1)
    halves = [
        mix_logits(log_weights_KR, list(half), sizes_KR)
        for half in logits_KRV.split([4, 3], dim=-1)
    ]
    some_head = logits_KRV.isfinite().all(dim=-1).any(dim=0)
    found = torch.cat(halves, dim=-1)
    torch.testing.assert_close(found[some_head], expected[some_head], atol=1e-3, rtol=1e-5)


@given(
    num_heads=st.integers(2, 6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@unhurried
def test_a_rows_state_comes_back_bit_by_bit_in_every_dtype(
    num_heads: int, dtype: torch.dtype
) -> None:
    hidden_TD = torch.randn(5, 8).to(dtype)
    log_weights_TK = torch.randn(5, num_heads)
    log_weights_TK[0, 0] = -math.inf
    rows_T = torch.tensor([0, 1, 77, 2**31 - 1, 12])
    attached = attach_state(hidden_TD, log_weights_TK, rows_T)
    assert attached.shape[1] * attached.element_size() % 16 == 0
    picked = torch.tensor([3, 0, 4])
    hidden, log_weights, rows = detach_state(attached[picked], 8, num_heads)
    assert torch.equal(hidden, hidden_TD[picked])
    assert torch.equal(log_weights, log_weights_TK[picked])
    assert torch.equal(rows, rows_T[picked])
