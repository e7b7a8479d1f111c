import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from scale_cli.config.training import LrMultipliers, TrainConfig
from scale_cli.errors import BaseModelError
from scale_cli.methods.starts import leading_directions, measured_stream_rms
from scale_cli.methods.widened import STARTS
from scale_cli.model.expansion_scale import ExpansionLinear, ExpansionNorm
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.training.optimiser import build_optimiser, rates_of
from tests.model.test_families import tiny
from tests.widening import tiny_llama, widen

STD = 0.2  # the tiny Llamas' initializer_range


def linears(model: ScaleForCausalLM) -> Iterator[tuple[nn.Linear, ExpansionLinear]]:
    """Every frozen linear map of the decoder, and the blocks that widen it."""
    for base_layer, added in zip(model.base.model.layers, model.expansion.layers, strict=True):
        frozen = dict(base_layer.named_modules())
        for name, module in added.named_modules():
            if isinstance(module, ExpansionLinear):
                owner = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
                yield frozen[f"{owner}.{name}"], module


def truncated_svd(weight: Tensor, count: int) -> Tensor:
    """S_k V_k^T by LAPACK's own decomposition."""
    _, scales, directions = torch.linalg.svd(weight.double(), full_matrices=False)
    return (scales[:, None] * directions)[:count].float()


def assert_equal_up_to_sign(rows: Tensor, expected: Tensor) -> None:
    assert rows.shape == expected.shape
    signs = torch.sign((rows * expected).sum(dim=1, keepdim=True))
    torch.testing.assert_close(rows, signs * expected, rtol=1e-4, atol=1e-4)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**32 - 1))
def test_leading_directions_are_those_of_the_svd_in_both_orientations(
    num_rows: int, num_columns: int, count: int, seed: int
) -> None:
    assume(
        min(num_rows, num_columns) <= count + 16
    )  # else a random subspace may miss a little of them
    weight = torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed))
    rows = leading_directions(weight, count)
    assert rows.shape == (min(count, num_rows, num_columns), num_columns)
    # Where two singular values all but coincide their directions may mix; what they span with their scales may not.
    expected = truncated_svd(weight, count)
    torch.testing.assert_close(
        rows @ rows.T, torch.diag(expected.norm(dim=1) ** 2), rtol=1e-4, atol=1e-3
    )
    torch.testing.assert_close(rows.T @ rows, expected.T @ expected, rtol=1e-3, atol=1e-3)
    assert (rows.gather(1, rows.abs().argmax(dim=1, keepdim=True)) >= 0.0).all(), "signs are fixed"


@pytest.mark.parametrize("shape", [(320, 200), (200, 320)])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_of_a_large_matrix_directions_are_orthogonal_and_hold_nearly_the_energy_of_the_best(
    shape: tuple[int, int], decay: float
) -> None:
    left, _, right = torch.linalg.svd(
        torch.randn(shape, generator=torch.Generator().manual_seed(0)), False
    )
    weight = left * torch.arange(1.0, 201.0) ** -decay @ right
    rows, best = leading_directions(weight, 40), truncated_svd(weight, 40)
    gram = rows @ rows.T
    torch.testing.assert_close(gram, gram.diag().diag(), rtol=0.0, atol=1e-3)
    assert (gram.diag().diff() <= 1e-5).all(), "the leading ones first"
    assert 0.9 <= gram.trace() / best.square().sum() <= 1.0 + 1e-5


@pytest.mark.parametrize("count", [65, 129, 200])
def test_of_many_directions_every_block_of_rows_gives_its_own_leading_ones(count: int) -> None:
    weight, num_blocks = (
        torch.randn(390, 250, generator=torch.Generator().manual_seed(0)),
        math.ceil(count / 64),
    )
    rows = leading_directions(weight, count).tensor_split(num_blocks)
    for block, found in zip(weight.tensor_split(num_blocks), rows, strict=True):
        assert len(found) <= 64
        assert torch.equal(found, leading_directions(block, len(found)))


def test_the_start_has_the_same_bits_on_any_number_of_threads() -> None:
    weight = torch.randn(900, 700, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = torch.get_num_threads()
    found = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        found.append(leading_directions(weight, 100))
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("start", STARTS)
def test_whatever_writes_into_the_base_or_its_logits_starts_at_zero(start: str) -> None:
    model = widen(
        tiny_llama(attention_bias=True, mlp_bias=True), "adapt", embedding_scale=None, start=start
    )
    assert not model.expansion.lm_head.weight.any()
    for _, added in linears(model):
        assert added.weight_12 is not None and not added.weight_12.any()
        assert added.bias_2 is not None and not added.bias_2.any()
    norms = [module for module in model.expansion.modules() if isinstance(module, ExpansionNorm)]
    assert len(norms) == 2 * 3 + 1
    assert all(bool((norm.weight == 1.0).all()) for norm in norms)


def test_svd_starts_with_the_leading_directions_of_what_is_widened() -> None:
    model = widen(tiny_llama(), "preserve", embedding_scale=None, start="svd", ratio=0.5)
    for frozen, added in linears(model):
        assert_equal_up_to_sign(added.weight_21, truncated_svd(frozen.weight, len(added.weight_21)))
    embeddings = model.base.model.embed_tokens.weight
    left, scales, _ = torch.linalg.svd(embeddings.double(), full_matrices=False)
    expected = (left * scales)[:, : model.config.expansion_hidden_size].float()
    assert_equal_up_to_sign(model.expansion.embed_tokens.weight.T, expected.T)


@pytest.mark.parametrize("start", STARTS)
def test_what_reads_the_expansion_starts_normal_at_the_bases_own_spread(start: str) -> None:
    model = widen(tiny_llama(), "preserve", embedding_scale=None, start=start, ratio=1.0)
    everything = torch.cat([added.weight_22.flatten() for _, added in linears(model)])
    assert abs(everything.std().item() / STD - 1.0) < 0.02
    assert abs(everything.mean().item()) < 0.02 * STD


def test_random_numbers_do_not_depend_on_torchs_own_seed_or_the_bases_dtype() -> None:
    def started(dtype: Any, global_seed: int) -> dict[str, Tensor]:
        torch.manual_seed(global_seed)
        return widen(tiny_llama().to(dtype), "adapt", start="normal").expansion.state_dict()

    once, again = started(torch.float32, 0), started(torch.bfloat16, 1)
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert {tensor.dtype for tensor in again.values()} == {torch.float32}


@pytest.mark.parametrize(
    "family", ["qwen3", "gemma3_text", "olmo3, yarn in full layers", "exaone4, tied"]
)
@torch.no_grad()
def test_the_embedding_begins_as_large_as_the_last_stream_and_is_let_through_at_the_size_of_one(
    family: str,
) -> None:
    base = tiny(family)
    model = widen(base, "preserve", ratio=0.5, embedding_scale=1.4)
    stream_rms, embedding_rms = (
        measured_stream_rms(base, seed=0),
        model.config.expansion_embedding_rms,
    )
    assert embedding_rms == pytest.approx(1.4 * stream_rms["norm"], rel=0.05)
    assert model.expansion.embed_tokens.weight.pow(2).mean().sqrt().item() == pytest.approx(
        embedding_rms, rel=0.05
    )
    for name, base_rms in stream_rms.items():
        reader: Any = model.expansion.get_submodule(name)
        if isinstance(reader, ExpansionNorm):
            gain, slack = reader.weight.max().item(), 0.05
        else:  # nothing norms what it reads
            gain, slack = reader.weight_22.std().item() / STD, 0.3
        assert gain == pytest.approx(min(1.0, base_rms / embedding_rms), rel=slack)


@pytest.mark.parametrize("family", ["gemma3_text", "olmo2, biases"])
@torch.no_grad()
def test_what_a_layer_writes_and_asks_by_begins_at_the_size_that_the_base_gives_it(
    family: str,
) -> None:
    base: Any = tiny(family)
    expansion: Any = widen(base, "preserve").expansion
    read = {*measured_stream_rms(base, seed=0)}
    made = {
        n: m for n, m in expansion.named_modules() if isinstance(m, ExpansionNorm) and n not in read
    }
    assert len(made) == len(base.model.layers) * {"gemma3_text": 2, "olmo2, biases": 4}[family]
    for name, norm in made.items():
        place, _, last = name.rpartition(".")
        layer = base.model.get_submodule(place)
        owner = getattr(layer.self_attn if last in ("q_norm", "k_norm") else layer, last)
        through = owner(torch.ones(1, len(owner.weight)))  # ones have the rms 1
        torch.testing.assert_close(
            norm.weight, through.square().mean().sqrt().expand_as(norm.weight)
        )


def test_rates_follow_the_start_and_what_the_config_says_goes_before() -> None:
    train = TrainConfig(max_steps=1, lr=1e-3)
    model = widen(tiny_llama(), "preserve")
    assert rates_of(model, train) == {
        "embedding": 40.0 * model.config.expansion_embedding_rms,
        "head": 2.0,
        "gains": 0.1,
        "matrix": 1.0,
    }
    earlier = widen(
        tiny_llama(), "preserve", embedding_scale=None
    )  # as before there was such a start
    assert set(rates_of(earlier, train).values()) == {1.0}
    chosen = TrainConfig(max_steps=1, lr=1e-3, lr_multipliers=LrMultipliers(embedding=7.0))
    groups = {group["lr_multiplier"] for group in build_optimiser(model, chosen).param_groups}
    assert groups == {7.0, 2.0, 0.1, 1.0}


def test_a_base_whose_stream_has_no_size_is_refused_in_one_line_that_says_what_goes_without() -> (
    None
):
    base = tiny_llama()
    for parameter in base.parameters():
        parameter.zero_()
    with pytest.raises(BaseModelError, match=r"method\.expansion\.embedding_scale=null") as refused:
        widen(base, "preserve")
    assert "\n" not in str(refused.value)
    widen(base, "preserve", embedding_scale=None)
