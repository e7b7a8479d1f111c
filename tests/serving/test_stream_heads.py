"""The heads of a plain export, whole and shared among devices, against products of their own."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from scale_cli.model.routing import PieceShares, mix_logits, piece_shares
from scale_cli.serving.stream_heads import Shard, SharedPieces, StreamHeads

STREAMS = [6, 3, 2, 2]
VOCABULARY, PADDED, TILE = 11, 16, 2
GENERATOR = torch.Generator().manual_seed(0)
WEIGHT_VD = torch.randn(VOCABULARY, sum(STREAMS), generator=GENERATOR)
ROWS_TD = torch.randn(9, sum(STREAMS), generator=GENERATOR)
IDS_T = torch.tensor([0, 1, 2, 5, 6, 7, 8, 9, 10])
Shares = list[PieceShares | None]
EVEN_TK = torch.full((9, 4), 0.25).log()
# Every head has all tokens, or the base lacks the last so many, or all lack those of the others'
# scripts: of some the first piece lies on the other device.
ALL_BUT_BASE = [(0, 0), (0, 5), (0, 5), (0, 5)]
every_vocabulary = pytest.mark.parametrize(
    "shares",
    [
        [None] * 4,
        piece_shares([2, 1], [2], [(0, 0), (0, 2), (0, 2), (0, 2)], VOCABULARY),
        piece_shares([0, 0, 3, 4, 0], [0, 4], ALL_BUT_BASE, VOCABULARY),
        piece_shares([0, 0, 3, 4, 0], [0, 4], [(0, 0), (0, 3), (0, 3), (3, 5)], VOCABULARY),
    ],
    ids=["all old", "2 new", "5 new", "3 and 2 new"],
)


class Devices:
    """Two threads that bring their tensors together, as devices do."""

    def __init__(self) -> None:
        self.barrier, self.tensors = threading.Barrier(2), [Tensor(), Tensor()]

    def gather(self, rank: int, tensor: Tensor) -> Tensor:
        self.tensors[rank] = tensor
        self.barrier.wait()
        stacked = torch.stack(self.tensors)
        self.barrier.wait()
        return stacked

    def sum(self, rank: int, tensor: Tensor) -> Tensor:
        return self.gather(rank, tensor).sum(dim=0)


def heads(weight_VD: Tensor, shard: Shard, shares: Shares, *, readable: bool) -> StreamHeads:
    tiles: list[list[Callable[[Tensor], Tensor]]] = [
        [partial(F.linear, weight=part) for part in tile.split(STREAMS, dim=1)]
        for tile in weight_VD.split(TILE)
    ]
    shared = [
        None if of is None else SharedPieces(of, VOCABULARY, shard, weight_VD.device)
        for of in shares
    ]
    return StreamHeads(tiles, STREAMS, shard, weight_VD if readable else None, shared)


def alone(shares: Shares, *, readable: bool = True) -> StreamHeads:
    shard = Shard(0, VOCABULARY, lambda tensor: tensor[None], lambda tensor: tensor)
    return heads(WEIGHT_VD, shard, shares, readable=readable)


def expected_logits(shares: Shares) -> Tensor:
    """(T, K, V): every head as a product with the columns of its stream and of the base's."""
    masks = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]])
    wide = masks.repeat_interleave(torch.tensor(STREAMS), dim=1)
    logits_TKV = torch.einsum("td,kd,vd->tkv", ROWS_TD, wide.float(), WEIGHT_VD)
    for head, of_head in enumerate(shares):
        if of_head is not None:
            logits_TKV[:, head] = of_head(logits_TKV[:, head])
    return logits_TKV


@every_vocabulary
def test_mixed_scores_are_of_the_bases_and_each_heads_own_columns(shares: Shares) -> None:
    log_weights_TK = torch.randn(9, 4, generator=GENERATOR).log_softmax(dim=-1)
    scores_TV, sizes_TK = alone(shares).mix(ROWS_TD, log_weights_TK)
    torch.testing.assert_close(
        scores_TV, mix_logits(log_weights_TK.T, expected_logits(shares).transpose(0, 1))
    )
    torch.testing.assert_close(sizes_TK, torch.logsumexp(expected_logits(shares), dim=-1))


@every_vocabulary
@pytest.mark.parametrize("readable", [True, False])
def test_a_tokens_logits_are_those_of_the_whole_product(readable: bool, shares: Shares) -> None:
    expected = expected_logits(shares).gather(-1, IDS_T[:, None, None].expand(-1, 4, 1))[..., 0]
    torch.testing.assert_close(alone(shares, readable=readable).logits_of(ROWS_TD, IDS_T), expected)
    logits_TK, sizes_TK = alone(shares, readable=readable).observe(ROWS_TD, IDS_T)
    torch.testing.assert_close(logits_TK, expected)
    torch.testing.assert_close(sizes_TK, torch.logsumexp(expected_logits(shares), dim=-1))


@every_vocabulary
@pytest.mark.parametrize("readable", [True, False])
def test_devices_that_share_the_vocabulary_say_what_one_does(
    readable: bool, shares: Shares
) -> None:
    devices, padding = Devices(), torch.full((PADDED - VOCABULARY, sum(STREAMS)), math.nan)
    halves = torch.cat([WEIGHT_VD, padding]).split(PADDED // 2)

    def of(rank: int) -> tuple[Tensor, ...]:
        shard = Shard(
            8 * rank, (8, 3)[rank], partial(devices.gather, rank), partial(devices.sum, rank)
        )
        mine = heads(halves[rank], shard, shares, readable=readable)
        mixed_TV, _ = mine.mix(ROWS_TD, EVEN_TK)
        whole_TV = devices.gather(rank, F.pad(mixed_TV[:, : shard.length], (0, 8 - shard.length)))
        whole_TV = whole_TV.transpose(0, 1).flatten(1)[:, :VOCABULARY]
        return mine.logits_of(ROWS_TD, IDS_T), *mine.observe(ROWS_TD, IDS_T), whole_TV

    whole = alone(shares)
    one = (
        whole.logits_of(ROWS_TD, IDS_T),
        *whole.observe(ROWS_TD, IDS_T),
        whole.mix(ROWS_TD, EVEN_TK)[0],
    )
    with ThreadPoolExecutor(2) as threads:
        for both in threads.map(of, range(2)):
            for found, expected in zip(both, one, strict=True):
                torch.testing.assert_close(found, expected)
