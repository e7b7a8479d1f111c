"""The heads of a plain export, whole and shared among devices, against products of their own."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scale_cli.model.routing import PieceShares, mix_logits
from scale_cli.serving.stream_heads import (
    HeadProducts,
    Shard,
    SharedPieces,
    StreamHeads,
    TrainedOf,
    trained_alone,
    trained_by_sum,
)

STREAMS = [6, 5]
VOCABULARY = 11
PADDED = 16
TILE = 2
GENERATOR = torch.Generator().manual_seed(0)
WEIGHT_VD = torch.randn(VOCABULARY, sum(STREAMS), generator=GENERATOR)
ROWS_TD = torch.randn(9, sum(STREAMS), generator=GENERATOR)
IDS_T = torch.tensor([0, 1, 2, 5, 6, 7, 8, 9, 10])
# The base has all tokens, or lacks the last ones: of some the first piece lies on the other device.
every_vocabulary = pytest.mark.parametrize(
    "shares",
    [
        None,
        PieceShares([2, 1], [2]),
        PieceShares([0, 0, 3, 4, 0], [0, 4]),
    ],
    ids=["all old", "2 new", "5 new"],
)


EVEN_T = torch.zeros(9)


class Devices:
    """Two threads that bring their tensors together, as devices do."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.tensors = [Tensor(), Tensor()]

    def gather(self, rank: int, tensor: Tensor) -> Tensor:
        self.tensors[rank] = tensor
        self.barrier.wait()
        stacked = torch.stack(self.tensors)
        self.barrier.wait()
        return stacked

    def sum(self, rank: int, tensor: Tensor) -> Tensor:
        return self.gather(rank, tensor).sum(dim=0)


def products(rows_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
    x_TD, u_TD = rows_TD.split(STREAMS, dim=-1)
    return x_TD @ weight_VD[:, : STREAMS[0]].T, u_TD @ weight_VD[:, STREAMS[0] :].T


def heads(
    weight_VD: Tensor,
    shard: Shard,
    shares: PieceShares | None,
    *,
    readable: bool,
    trained_of: TrainedOf = trained_by_sum,
) -> StreamHeads:
    # A head that cannot be read is not in tiles.
    tiles = [
        partial(products, weight_VD=tile)
        for tile in weight_VD.split(TILE if readable else len(weight_VD))
    ]
    shared = None if shares is None else SharedPieces(shares, VOCABULARY, shard, weight_VD.device)
    weights = weight_VD.split(STREAMS, dim=-1) if readable else None
    multiplied = HeadProducts(nn.ModuleList(), tiles, weights, trained_of)
    return StreamHeads(multiplied, STREAMS, shard, shared)


def of_tokens(logits_T2V: Tensor) -> Tensor:
    """(T, 2): both heads' logits of the tokens that come."""
    return logits_T2V.gather(-1, IDS_T[:, None, None].expand(-1, 2, 1))[..., 0]


ALONE = Shard(0, VOCABULARY, lambda tensor: tensor[None], lambda tensor: tensor)


def alone(shares: PieceShares | None, *, readable: bool = True) -> StreamHeads:
    return heads(WEIGHT_VD, ALONE, shares, readable=readable)


def expected_logits(shares: PieceShares | None) -> Tensor:
    """(T, 2, V): the product with x and its columns, and the whole product."""
    base_TV = ROWS_TD[:, : STREAMS[0]] @ WEIGHT_VD[:, : STREAMS[0]].T
    if shares is not None:
        base_TV = shares(base_TV[:, : -len(shares.first)])
    return torch.stack([base_TV, ROWS_TD @ WEIGHT_VD.T], dim=1)


@every_vocabulary
def test_mixed_scores_are_of_the_bases_columns_and_of_all(shares: PieceShares | None) -> None:
    log_odds_T = 3 * torch.randn(9, generator=GENERATOR)
    log_weights_KT = F.logsigmoid(torch.stack([-log_odds_T, log_odds_T]))
    scores_TV, sizes_T2 = alone(shares).mix(ROWS_TD, log_odds_T)
    torch.testing.assert_close(
        scores_TV, mix_logits(log_weights_KT, expected_logits(shares).transpose(0, 1))
    )
    torch.testing.assert_close(sizes_T2, torch.logsumexp(expected_logits(shares), dim=-1))


@every_vocabulary
@pytest.mark.parametrize("readable", [True, False])
def test_a_tokens_logits_are_those_of_the_whole_product(
    readable: bool, shares: PieceShares | None
) -> None:
    whole = alone(shares, readable=readable)
    expected = of_tokens(expected_logits(shares))
    torch.testing.assert_close(whole.logits_of(ROWS_TD, IDS_T), expected)
    logits_T2, sizes_T2 = whole.observe(ROWS_TD, IDS_T)
    torch.testing.assert_close(logits_T2, expected)
    torch.testing.assert_close(sizes_T2, torch.logsumexp(expected_logits(shares), dim=-1))


@pytest.mark.parametrize("readable", [True, False])
def test_a_trained_model_of_its_own_has_a_product_of_its_own(readable: bool) -> None:
    of_two = heads(WEIGHT_VD, ALONE, None, readable=readable, trained_of=trained_alone)
    logits_T2V = torch.stack(products(ROWS_TD, WEIGHT_VD), dim=1)
    torch.testing.assert_close(of_two.logits_of(ROWS_TD, IDS_T), of_tokens(logits_T2V))
    torch.testing.assert_close(of_two.observe(ROWS_TD, IDS_T)[1], logits_T2V.logsumexp(dim=-1))
    even = math.log(0.5) + torch.zeros(2, len(ROWS_TD))
    torch.testing.assert_close(
        of_two.mix(ROWS_TD, EVEN_T)[0], mix_logits(even, logits_T2V.transpose(0, 1))
    )


@every_vocabulary
@pytest.mark.parametrize("readable", [True, False])
def test_devices_that_share_the_vocabulary_say_what_one_does(
    readable: bool, shares: PieceShares | None
) -> None:
    devices = Devices()
    padding = torch.full((PADDED - VOCABULARY, sum(STREAMS)), math.nan)
    halves = torch.cat([WEIGHT_VD, padding]).split(PADDED // 2)

    def of(rank: int) -> tuple[Tensor, ...]:
        shard = Shard(
            8 * rank, (8, 3)[rank], partial(devices.gather, rank), partial(devices.sum, rank)
        )
        mine = heads(halves[rank], shard, shares, readable=readable)
        mixed_TV, _ = mine.mix(ROWS_TD, EVEN_T)
        whole_TV = devices.gather(rank, F.pad(mixed_TV[:, : shard.length], (0, 8 - shard.length)))
        whole_TV = whole_TV.transpose(0, 1).flatten(1)[:, :VOCABULARY]
        return mine.logits_of(ROWS_TD, IDS_T), *mine.observe(ROWS_TD, IDS_T), whole_TV

    whole = alone(shares)
    one = (
        whole.logits_of(ROWS_TD, IDS_T),
        *whole.observe(ROWS_TD, IDS_T),
        whole.mix(ROWS_TD, EVEN_T)[0],
    )
    with ThreadPoolExecutor(2) as threads:
        for both in threads.map(of, range(2)):
            for found, expected in zip(both, one, strict=True):
                torch.testing.assert_close(found, expected)
