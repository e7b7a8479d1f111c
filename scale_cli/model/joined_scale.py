"""Several expansions on one frozen base, and the posterior router over all their heads: one forward
of the base.

Expansions may bring tokens of their own, for different scripts or the same tokens. A head treats
tokens that it lacks
as a base does: it gives each a share of its first piece's probability (`PieceShares`), and reads it
    as the mean of its
pieces. On text without the others' scripts, a head predicts as it does alone, to a millionth of a
nat a token.

Sources: ours; each expansion is SCALE's (arXiv 2511.03270), the rule is that of `routing.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from .branches_scale import FinalStates
from .configuration_scale import JoinedConfig, ScaleConfig
from .expansion_scale import Expansion
from .modeling_scale import WidenedModel
from .routing import piece_shares


class JoinedForCausalLM(WidenedModel):
    """A frozen causal language model and K expansions on it; it is served, not trained.

    The softmax of the logits is the mixture of all K + 1 heads.
    """

    config_class = JoinedConfig
    # A bfloat16 base is loaded as it is; the expansions keep the precision in which they were
    # trained.
    _keep_in_fp32_modules_strict = ["members"]  # noqa: RUF012 (declared by transformers)

    def __init__(self, config: JoinedConfig, base: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        self.base: Any = self._empty_base() if base is None else base
        self.members = nn.ModuleList(
            self._expansion(sizes, head) for head, sizes in enumerate(config.expansions(), start=1)
        )
        first = [pieces[0] for pieces in config.pieces()]
        self._shares = piece_shares(
            first, config.own_pieces, config.known_by_heads(), config.vocab_size
        )
        self.generation_config = self.base.generation_config
        self.freeze()
        self.eval()
        self.post_init()

    def _expansion(self, sizes: ScaleConfig, head: int) -> Expansion:
        """Return an expansion's blocks, with rows for all tokens in its input embedding."""
        expansion = Expansion(self.base, sizes)
        if sizes.vocab_size < self.config.vocab_size:
            expansion.embed_tokens = nn.Embedding(
                self.config.vocab_size, sizes.expansion_hidden_size
            )
        if expansion.new_tokens is not None:
            expansion.new_tokens.first_id += self.config.known_tokens(head).start
        return expansion

    @property
    def expansions(self) -> Sequence[Expansion]:
        return cast(Sequence[Expansion], self.members)

    def freeze(self) -> None:
        self.requires_grad_(False)

    def of_all_tokens(self, head: int, logits: Tensor) -> Tensor:
        """Return a head's logits of all tokens, from its logits of the tokens that it knows (the
        last dimension).
        """
        shares = self._shares[head]
        return logits if shares is None else shares(logits)

    def routed_logits(self, states: FinalStates) -> list[Tensor]:
        logits = super().routed_logits(states)
        return [self.of_all_tokens(head, of_one) for head, of_one in enumerate(logits)]

    def train(self, mode: bool = True) -> JoinedForCausalLM:  # noqa: ARG002 (as every module's)
        """Stay in evaluation mode: nothing in this model trains."""
        return super().train(False)
