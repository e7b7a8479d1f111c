"""A vocabulary head, or a whole base, in 4 bits (GPTQ), by vLLM's own kernels, beside bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from scale_cli.methods.method import PROJECTIONS
from tests.serving.engine.conftest import Ask, random_adapter
from tests.serving.engine.test_families import (
    PRIOR,
    SIZES,
    job_of,
    of_pair,
    routed_log_probs,
    said_by,
    tell_of_the_router,
)
from tests.torture.attacker import edit_json

BITS = 4
GROUP = 32
# more than one tile of a head that is not quantised
VOCABULARY = 9024
SCHEME = {
    "quant_method": "gptq",
    "bits": BITS,
    "group_size": GROUP,
    "desc_act": False,
    "sym": True,
}


def packed(values_KN: Tensor) -> Tensor:
    """Return eight values of a column in each int32, as GPTQ lays them."""
    shifted = values_KN.long().unflatten(0, (-1, 8)) << (BITS * torch.arange(8))[:, None]
    return shifted.sum(dim=1).to(torch.int32)


class FourBits(NamedTuple):
    """A matrix in 4 bits, each GROUP of a column's values with a scale."""

    values_KN: Tensor
    scales_GN: Tensor

    @classmethod
    def drawn(cls, num_inputs: int, num_outputs: int, size: float) -> FourBits:
        """Draw one at random, whose scales are `size` to 2.7 times that."""
        values_KN = torch.randint(0, 2**BITS, (num_inputs, num_outputs))
        random_GN = torch.rand(num_inputs // GROUP, num_outputs)
        return cls(values_KN, (size * (1 + 1.7 * random_GN)).bfloat16())

    @property
    def whole_NK(self) -> Tensor:
        """The weight that it stands for, in bfloat16."""
        scales_KN = self.scales_GN.float().repeat_interleave(GROUP, dim=0)
        return ((self.values_KN - 8) * scales_KN).T.contiguous().bfloat16()

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a GPTQ file in the place of the weight of `name`."""
        num_inputs, num_outputs = self.values_KN.shape
        zeros = torch.full((num_inputs // GROUP, num_outputs // 8), 0x77777777, dtype=torch.int32)
        return {
            f"{name}.qweight": packed(self.values_KN),
            f"{name}.scales": self.scales_GN,
            f"{name}.qzeros": zeros,
            f"{name}.g_idx": (torch.arange(num_inputs) // GROUP).int(),
        }


def quantise(folder: Path, matrices: dict[str, FourBits]) -> None:
    """Write a saved model's matrices in 4 bits in the place of their weights."""
    tensors = load_file(folder / "model.safetensors")
    for name, matrix in matrices.items():
        del tensors[f"{name}.weight"]
        tensors |= matrix.tensors(name)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def assert_as_near(answers: dict[str, Any], expected: Tensor) -> None:
    """Hold what is in 4 bits to what bfloat16 is by itself, for the scales are all that is rounded."""
    away = {name: (said_by(told) - expected).abs() for name, told in answers.items()}
    assert away["quantised"].mean() <= 1.5 * away["whole"].mean(), {
        name: float(of.mean()) for name, of in away.items()
    }
    assert away["quantised"].max() <= 2.0 * away["whole"].max()


def job_in_bfloat16(folder: Path) -> dict[str, Any]:
    return job_of(folder, "Llama", dtype="bfloat16")


def test_a_quantised_head_routes_as_the_head_that_it_stands_for(ask: Ask, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": VOCABULARY})).bfloat16()
    head = FourBits.drawn(SIZES["hidden_size"], VOCABULARY, 0.03)
    model.lm_head.weight.data = head.whole_NK
    for name in ("whole", "quantised"):
        model.save_pretrained(tmp_path / name)
        tell_of_the_router(tmp_path / name)

    quantise(tmp_path / "quantised", {"lm_head": head})
    edit_json(
        tmp_path / "quantised" / "config.json", {"quantization_config": {**SCHEME, "lm_head": True}}
    )
    jobs = {name: job_in_bfloat16(tmp_path / name) for name in ("whole", "quantised")}
    assert_as_near(ask(jobs, tmp_path), routed_log_probs(model.float()))


def test_an_adapter_routes_beside_a_quantised_base_as_beside_the_weights_that_it_stands_for(
    ask: Ask, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": VOCABULARY, "intermediate_size": 256}
    base = LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16()
    matrices = {
        name: FourBits.drawn(module.in_features, module.out_features, 0.02)
        for name, module in base.named_modules()
        if name.endswith(tuple(PROJECTIONS))
    }
    for name, matrix in matrices.items():
        base.get_submodule(name).weight.data = matrix.whole_NK

    for name in ("whole", "quantised"):
        base.save_pretrained(tmp_path / f"{name} base")
        trained = random_adapter(base, tmp_path / name, tmp_path / f"{name} base", prior=PRIOR)
    quantise(tmp_path / "quantised base", matrices)
    for name in ("quantised base", "quantised"):
        edit_json(tmp_path / name / "config.json", {"quantization_config": SCHEME})

    jobs = {name: job_in_bfloat16(tmp_path / name) for name in ("whole", "quantised")}
    assert_as_near(ask(jobs, tmp_path), of_pair(base.float(), trained.float()))
