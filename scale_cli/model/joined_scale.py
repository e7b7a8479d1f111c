"""Several expansions on one frozen base, and the posterior router over all their heads: one forward of the base.

Source: ours; each expansion is SCALE's (arXiv 2511.03270), the rule that of `routing.py` with K + 1 heads.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from .branches_scale import Branch
from .configuration_scale import JoinedConfig
from .expansion_scale import Expansion
from .serving_scale import WidenedModel


class JoinedForCausalLM(WidenedModel):
    """A frozen causal language model and K expansions, each on it or upon an earlier one; it is served, not trained.

    The softmax of the logits is the mixture of all K + 1 heads.
    """

    config_class = JoinedConfig
    # A base in bfloat16 is loaded as it is; what was trained beside it stays in the precision it was trained in.
    _keep_in_fp32_modules_strict = ["members"]  # noqa: RUF012 (declared by transformers)

    def __init__(self, config: JoinedConfig, base: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        if base is None:
            base = AutoModelForCausalLM.from_config(
                config.base(), attn_implementation=config._attn_implementation, dtype=config.dtype
            )
        self.base: Any = base
        paths: list[list[Expansion]] = [[]]  # of every head, what stands below the next one
        for member, sizes in zip(config.members, config.stages(), strict=True):
            below = paths[member["parent"]]
            paths.append([*below, Expansion(base, below, sizes)])
        self.members = nn.ModuleList(path[-1] for path in paths[1:])
        self.branches = [
            Branch(path[-1], member["parent"]) for path, member in zip(paths[1:], config.members, strict=True)
        ]
        self.routed_heads = range(len(paths))
        self.generation_config = base.generation_config
        self.freeze()
        self.eval()
        self.post_init()

    def freeze(self) -> None:
        """Let nothing train."""
        self.requires_grad_(False)

    @property
    def root(self) -> Any:
        """The plain model at the bottom."""
        return self.base

    def train(self, mode: bool = True) -> JoinedForCausalLM:  # noqa: ARG002 (as every module's)
        """Stay in evaluation mode: it has nothing that trains."""
        return super().train(False)
