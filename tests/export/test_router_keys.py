from __future__ import annotations

import shutil
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from scale_cli.config.schema import ModelConfig
from scale_cli.export.dense import dense_model
from scale_cli.export.plain_folder import router_keys, write_plain
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.upscale.base import load_base
from scale_cli.upscale.run import load_tokenizer
from tests.model.test_families import IDS, tiny, write_tiny
from tests.widening import as_if_trained, joined, tiny_llama, widen


def folder_of(model: ScaleForCausalLM, base: Path, folder: Path, shared_data: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(shared_data / "ckpt-stories260K" / "hf" / name, base / name)
    folder.mkdir()
    of_base = ModelConfig(base=str(base))
    write_plain(dense_model(model, "float32"), load_tokenizer(of_base), of_base, folder, router_keys(model))
    return folder


@torch.no_grad()
def heads_of(plain: Any, router: dict[str, Any]) -> list[Tensor]:
    """The logits of every head, read off a plain model as its keys say."""
    rows_BTD = plain.model(IDS).last_hidden_state
    ends = accumulate(router["stream_sizes"], initial=0)
    columns = [slice(*pair) for pair in pairwise(ends)]
    assert columns[-1].stop == plain.config.hidden_size
    parts = [rows_BTD[..., at] @ plain.lm_head.weight[:, at].T for at in columns]
    heads = parts[:1]
    for part, parent in zip(parts[1:], router["parents"], strict=True):
        heads.append(heads[parent] + part)
    return heads


@pytest.mark.parametrize("family", ["mistral, gelu, linear rope", "qwen3"])
@torch.no_grad()
def test_of_a_tree_of_expansions_one_dense_model_has_the_logits_of_every_head(family: str) -> None:
    base = tiny(family)
    one = as_if_trained(widen(base, "preserve"))
    upon = as_if_trained(widen(one, "preserve", ratio=0.5), seed=2)
    two = as_if_trained(widen(base, "preserve", ratio=0.75), seed=3)
    model = joined(base, one=(0, one), two=(0, two), upon=(1, upon))
    router, wanted = router_keys(model), model.routed_logits(model.final_states(IDS, preserved=True))
    assert router is not None
    assert router["parents"] == [0, 0, 1]
    got = heads_of(dense_model(model, "float32", [IDS]), router)
    for logits, expected in zip(got, wanted, strict=True):
        torch.testing.assert_close(logits, expected, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize(
    "method",
    [
        {"variant": "preserve"},
        {"variant": "adapt"},
        {"variant": "route", "layers": "top:1"},
        {"variant": "route", "rule": "cosine"},
    ],
    ids=["one head", "collaborating", "collaborating above", "the cosine rule"],
)
def test_where_one_row_does_not_hold_both_heads_or_no_posterior_rule_mixes_them_there_are_no_keys(
    method: dict[str, Any],
) -> None:
    assert router_keys(as_if_trained(widen(tiny_llama(), **method))) is None


def test_an_export_that_serves_as_a_base_hands_its_router_on_to_nothing_that_is_made_of_it(
    shared_data: Path, tmp_path: Path
) -> None:
    write_tiny("qwen3", tmp_path / "base")
    model = as_if_trained(widen(tiny("qwen3"), "route"))
    base = folder_of(model, tmp_path / "base", tmp_path / "export", shared_data)
    again = as_if_trained(widen(load_base(ModelConfig(base=str(base))), "preserve"))
    folder = folder_of(again, base, tmp_path / "again", shared_data)
    assert not hasattr(AutoConfig.from_pretrained(folder), "scale_router")
