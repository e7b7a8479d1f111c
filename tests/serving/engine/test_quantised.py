"""A vocabulary head in 4 bits (GPTQ), by vLLM's own kernel, beside the same head in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.serving.engine.conftest import Ask
from tests.serving.engine.test_families import (
    ENGINE,
    IDS,
    SIZES,
    routed_log_probs,
    tell_of_the_router,
)

BITS = 4
GROUP = 32
# more than one tile of a head that is not quantised
WIDTH = SIZES["hidden_size"]
VOCABULARY = 9024
SCHEME = {
    "quant_method": "gptq",
    "bits": BITS,
    "group_size": GROUP,
    "desc_act": False,
    "sym": True,
    "lm_head": True,
}


def packed(values_KN: Tensor) -> Tensor:
    """Return eight values of a column in each int32, as GPTQ lays them."""
    shifted = values_KN.long().unflatten(0, (-1, 8)) << (BITS * torch.arange(8))[:, None]
    return shifted.sum(dim=1).to(torch.int32)


def quantise_head(folder: Path, values_KN: Tensor, scales_GN: Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors["lm_head.qweight"] = packed(values_KN)
    tensors["lm_head.scales"] = scales_GN
    tensors["lm_head.qzeros"] = torch.full(
        (len(scales_GN), VOCABULARY // 8), 0x77777777, dtype=torch.int32
    )
    tensors["lm_head.g_idx"] = (torch.arange(WIDTH) // GROUP).int()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, "quantization_config": SCHEME}))


def test_a_quantised_head_routes_as_the_head_that_it_stands_for(ask: Ask, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": VOCABULARY}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16()
    values_KN = torch.randint(0, 2**BITS, (WIDTH, VOCABULARY))
    scales_GN = (0.03 + 0.05 * torch.rand(WIDTH // GROUP, VOCABULARY)).bfloat16()
    whole_KN = (values_KN - 8) * scales_GN.float().repeat_interleave(GROUP, dim=0)
    model.lm_head.weight.data = whole_KN.T.contiguous().bfloat16()
    routed = {
        "hf_overrides": {"architectures": ["ScaleRoutedLlamaForCausalLM"]},
        "dtype": "bfloat16",
    }
    sampling = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
    jobs: dict[str, Any] = {}
    for name in ("whole", "quantised"):
        model.save_pretrained(tmp_path / name)
        tell_of_the_router(tmp_path / name)
        rounds = [{"prompts": IDS.tolist(), "sampling": sampling}]
        jobs[name] = {
            "folder": str(tmp_path / name),
            "engine": {**ENGINE, **routed},
            "rounds": rounds,
        }
    quantise_head(tmp_path / "quantised", values_KN, scales_GN)
    expected = routed_log_probs(model.float())
    away = {
        name: (
            torch.tensor([of[1:] for of in told["rounds"][0]["prompt_log_probs"]]) - expected
        ).abs()
        for name, told in ask(jobs, tmp_path).items()
    }
    # As near as bfloat16 is by itself, for the scales are all that is rounded.
    assert away["quantised"].mean() <= 1.5 * away["whole"].mean(), {
        name: float(of.mean()) for name, of in away.items()
    }
    assert away["quantised"].max() <= 2.0 * away["whole"].max()
