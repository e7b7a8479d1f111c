"""The start: the base's function, its own heads and channels as readers of u, and the same bits everywhere."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scale_cli.config.training import LrMultipliers, TrainConfig
from scale_cli.errors import BaseModelError, RunFolderError
from scale_cli.methods import starts
from scale_cli.methods.starts import STARTS, copies, difference_stream, start_of, start_rates
from scale_cli.methods.starts.difference_stream import leading_directions
from scale_cli.methods.starts.knowledge import knows
from scale_cli.methods.starts.start import TextToLearn
from scale_cli.methods.starts.stream_sizes import measured_stream_rms, random_ids
from scale_cli.model.configuration_scale import ScaleConfig
from scale_cli.model.expansion_scale import ExpansionNorm
from scale_cli.training.optimiser import build_optimiser, rates_of
from scale_cli.upscale.building import NewPieces
from tests.model.test_families import BASES, IDS, tiny
from tests.widening import UNKNOWN, assert_starts_as_base, tiny_llama, trained_head, widen

UNIFORM = torch.full((61,), 1 / 61, dtype=torch.float64)


# Difference streams of every family begin as the base in tests/model/test_families.py.
@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, ("float32", "bfloat16")[number % 2]) for number, family in enumerate(BASES)],
)
@torch.no_grad()
def test_codes_start_as_the_base(family: str, dtype: str) -> None:
    base: Any = tiny(family, dtype)
    expected = base(IDS).logits.float()
    assert_starts_as_base(widen(base, "preserve", ratio=0.5, text=UNKNOWN), IDS, expected)


@pytest.mark.parametrize("name", STARTS)
@torch.no_grad()
def test_every_start_begins_as_the_base(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "STARTS", {name: STARTS[name]})
    monkeypatch.setattr(type(STARTS[name]), "suits", lambda *_: True)
    base = tiny_llama()
    expected = base(IDS).logits
    model = widen(base, "preserve", ratio=0.5, text=UNKNOWN)
    assert model.config.start["name"] == name
    assert_starts_as_base(model, IDS, expected)


@pytest.mark.parametrize("text", [None, UNKNOWN])
def test_a_difference_stream_begins_with_the_head_and_codes_with_the_embedding(
    text: TextToLearn | None,
) -> None:
    model: Any = widen(tiny_llama(), "preserve", ratio=0.5, text=text)
    assert model.expansion.lm_head.weight.any() == (text is None)
    assert model.expansion.embed_tokens.weight.any() == (text is not None)


@torch.no_grad()
def likely_text(base: Any) -> Tensor:
    """What a base goes on with, by its likeliest tokens."""
    written = IDS[:1, :1]
    for _ in range(40):
        written = torch.cat([written, base(written).logits[:, -1:].argmax(-1)], dim=1)
    return written


def test_a_base_knows_what_it_predicts_better_than_the_frequencies_of_tokens_do() -> None:
    base = tiny_llama()
    assert knows(base, TextToLearn(UNIFORM, likely_text(base)))
    assert not knows(base, UNKNOWN)
    assert not knows(base, TextToLearn(UNIFORM, torch.tensor([[3, 61, 4]])))  # a new token


@pytest.mark.parametrize("ratio", [0.5, 1.0])
@pytest.mark.parametrize("text", [None, UNKNOWN])
def test_everything_has_a_gradient_from_the_fifth_step_on(
    text: TextToLearn | None, ratio: float
) -> None:
    model: Any = widen(tiny_llama(), "preserve", ratio=ratio, text=text).train()
    optimiser = build_optimiser(model, TrainConfig(max_steps=5, lr=1e-4))
    for _ in range(5):
        optimiser.zero_grad()
        model(input_ids=IDS, labels=IDS, shift_labels=IDS).loss.backward()
        optimiser.step()
    for name, parameter in model.expansion.named_parameters():
        rows = parameter.grad.flatten(1) if parameter.ndim > 1 else parameter.grad[:, None]
        assert rows.any(), name
        if parameter.ndim > 1 and "embed" not in name and "lm_head" not in name:
            assert rows.any(dim=1).all(), f"{name}: some rows never train"
            assert len(parameter.unique(dim=0)) == len(parameter), f"{name}: two rows stay the same"


@torch.no_grad()
def test_a_change_of_what_the_last_layer_writes_moves_the_logits_as_in_the_base() -> None:
    """P times the change, in W21, where P has all directions; the base's rms stays."""
    base: Any = tiny_llama()
    written = base.model.layers[-1].mlp.down_proj
    change = 1e-2 * torch.randn(written.weight.shape, generator=torch.Generator().manual_seed(1))
    given: dict[str, Tensor] = {}
    for name, module in (("channels", written), ("stream", base.model.norm)):
        module.register_forward_pre_hook(
            lambda _, inputs, name=name: given.setdefault(name, inputs[0])
        )

    model: Any = widen(base, "preserve", ratio=1.0)
    before = trained_head(model, IDS)
    directions = leading_directions(centred_head(base), base.config.hidden_size).float()
    model.expansion.layers[-1].down_proj.weight_21 += directions @ change
    moved = trained_head(model, IDS) - before

    inverse_rms = given["stream"].pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
    expected = base.lm_head(base.model.norm.weight * (given["channels"] @ change.T) * inverse_rms)
    torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_what_maps_of_u_hold_is_as_large_as_the_bases_maps_whatever_gains_its_norms_have() -> None:
    """So one rate of training moves both as far. In Gemma 3, a few gains are huge."""
    base: Any = tiny("gemma3_text")
    width = base.config.hidden_size
    last = base.model.layers[-1]
    norms = (base.model.norm, last.post_attention_layernorm, last.pre_feedforward_layernorm)
    for norm in norms:
        norm.weight[3] = 500.0
    generator = torch.Generator().manual_seed(2)
    for linear in (base.lm_head, last.self_attn.o_proj, last.mlp.up_proj):
        torch.nn.init.orthogonal_(linear.weight, generator=generator)

    expansion: Any = widen(base, "preserve", ratio=1.0).expansion
    layer = expansion.layers[-1]
    ones = torch.ones(width)
    for of_each_direction in (
        expansion.lm_head.weight[:, :width].T,
        layer.up_proj.weight_22[:, :width].T,
        layer.o_proj.weight_22[:width],
    ):
        torch.testing.assert_close(of_each_direction.norm(dim=1), ones)


def centred_head(base: Any) -> Tensor:
    """What decides the directions where all tokens count alike."""
    rows = (base.lm_head.weight * base.model.norm.weight).double()
    return (rows - rows.mean(dim=0)) / len(rows) ** 0.5


def test_the_directions_are_those_of_the_tokens_that_the_text_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(difference_stream, "knows", lambda _base, _text: True)
    base = tiny_llama()
    shares = torch.zeros(61, dtype=torch.float64)
    shares[[3, 7, 9]] = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    model: Any = widen(base, "preserve", ratio=0.5, text=TextToLearn(shares, IDS[:1]))
    rows = model.expansion.lm_head.weight[[3, 7, 9]].double()
    # Two directions tell three rows of the head apart.
    apart = (rows - rows[:1])[1:, 2:]
    assert apart.abs().max() < 1e-4 * rows.abs().max()


@pytest.mark.parametrize("shape", [(200, 40), (30, 40)])
def test_leading_directions_are_those_of_the_svd(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = 0.7 ** torch.arange(shape[1], dtype=torch.float64)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64) * sizes
    _, _, expected = torch.linalg.svd(weight, full_matrices=False)
    found = leading_directions(weight, 12)
    signs = (found * expected[:12]).sum(dim=1, keepdim=True).sign()
    torch.testing.assert_close(found, signs * expected[:12], rtol=1e-6, atol=1e-6)


def test_the_start_has_the_same_bits_on_any_number_of_threads_in_any_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(difference_stream, "_ROWS_AT_ONCE", 64)

    def started(dtype: Any, global_seed: int, num_threads: int) -> dict[str, Tensor]:
        torch.manual_seed(global_seed)
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        monkeypatch.setattr(copies, "_THREADS", num_threads)
        try:
            # The base's numbers are those of bfloat16 in any dtype.
            base = tiny_llama(hidden_size=96, vocab_size=700).bfloat16().to(dtype)
            return widen(base, "adapt").expansion.state_dict()
        finally:
            torch.set_num_threads(before)

    once = started(torch.float32, 0, 1)
    for again in (started(torch.bfloat16, 1, 2), started(torch.float32, 2, 3)):
        assert all(torch.equal(once[name], again[name]) for name in once)
        assert {tensor.dtype for tensor in again.values()} == {torch.float32}


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "olmo3, yarn in full layers"])
@torch.no_grad()
def test_codes_begin_as_large_as_the_last_stream_and_are_let_through_at_the_size_of_one(
    family: str,
) -> None:
    base = tiny(family)
    model: Any = widen(base, "preserve", ratio=0.5, text=UNKNOWN)
    stream_rms = measured_stream_rms(base, seed=0)
    embedding_rms = model.config.start["embedding_rms"]
    assert embedding_rms == pytest.approx(1.4 * stream_rms["norm"], rel=0.05)
    codes = model.expansion.embed_tokens.weight
    assert codes.pow(2).mean().sqrt().item() == pytest.approx(embedding_rms, rel=0.1)
    for name, base_rms in stream_rms.items():
        reader = model.expansion.get_submodule(name)
        if isinstance(reader, ExpansionNorm):
            expected = min(1.0, base_rms / embedding_rms)
            assert reader.weight.max().item() == pytest.approx(expected, rel=0.05)


def test_rows_of_new_tokens_are_read_from_u_as_their_own_rows_read_x() -> None:
    new = NewPieces(["5 6", "7 8"], [])
    model: Any = widen(tiny_llama(), "preserve", ratio=0.5, new=new)
    assert model.expansion.lm_head.weight[-2:].any(dim=1).all()


def test_rates_follow_start_and_optimiser_and_what_the_config_says_goes_before() -> None:
    train = TrainConfig(max_steps=1, lr=1e-3, optimiser="muon")
    known, unknown = (widen(tiny_llama(), "preserve", text=text) for text in (None, UNKNOWN))
    rates = {"embedding": 4.0, "head": 1.0, "gains": 1.0, "matrix": 1.5}
    assert rates_of(known, train) == rates
    embedding = 200.0 * unknown.config.start["embedding_rms"]
    of_codes = {"embedding": embedding, "head": 10.0, "gains": 0.5, "matrix": 16.0}
    assert rates_of(unknown, train) == of_codes

    adamw = TrainConfig(max_steps=1, lr=1e-3, optimiser="adamw")
    assert rates_of(known, adamw) == rates | {"matrix": 0.3}
    assert rates_of(unknown, adamw) == of_codes | {"matrix": 1.5}

    chosen = train.model_copy(update={"lr_multipliers": LrMultipliers(embedding=7.0)})
    groups = {group["lr_multiplier"] for group in build_optimiser(known, chosen).param_groups}
    assert groups == {7.0, 1.0, 1.5}


@pytest.mark.parametrize("name", STARTS)
@torch.no_grad()
def test_a_models_config_keeps_how_it_began(name: str, tmp_path: Path) -> None:
    model: Any = widen(tiny_llama(), "preserve")
    model.config.start = {"name": name, **STARTS[name].fill(model, 0, None)}
    model.config.save_pretrained(tmp_path)
    read = ScaleConfig.from_pretrained(tmp_path)
    assert start_of(read) is STARTS[name]
    assert start_rates(read, "muon") == start_rates(model.config, "muon")


def test_a_model_whose_start_is_not_known_is_refused() -> None:
    with pytest.raises(RunFolderError, match=r"start: None is none of difference-stream, codes"):
        start_of(ScaleConfig(base_config={}))


def test_a_base_whose_stream_has_no_size_is_refused_in_one_line() -> None:
    base = tiny_llama()
    for parameter in base.parameters():
        parameter.zero_()
    with pytest.raises(BaseModelError, match=r"model\.base: rms") as refused:
        widen(base, "preserve", text=UNKNOWN)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("bos", [None, 3])
def test_sizes_are_measured_behind_the_bases_bos(bos: int | None) -> None:
    base = tiny_llama()
    base.config.bos_token_id = None
    drawn = random_ids(base, 0)
    base.config.bos_token_id = bos
    ids = random_ids(base, 0)
    assert torch.equal(ids[:, 1:], drawn[:, 1:])
    assert ids[0, 0] == (drawn[0, 0] if bos is None else bos)
