"""Several expansions on one frozen base, and the posterior router over all their heads: one forward
of the base.

Expansions may bring tokens of their own, for different scripts or the same tokens. A head treats
tokens that it lacks as a base does: it gives each a share of its first piece's probability
(`PieceShares`), and reads it as the mean of its pieces. On text without the others' scripts, a head
predicts as it does alone, to a millionth of a nat a token.

Sources: ours; each expansion is SCALE's (arXiv 2511.03270), the rule is that of `routing.py`.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from .branches_scale import FinalStates
from .configuration_scale import JoinedConfig
from .expansion_scale import Expansion
from .modeling_scale import WidenedModel
from .routing import PieceShares


class JoinedForCausalLM(WidenedModel):
    """A frozen causal language model and K expansions on it; it is served, not trained.

    The softmax of the logits is the mixture of all K + 1 heads.
    """

    config_class = JoinedConfig
    # A bfloat16 base is loaded as it is; the expansions keep the precision in which they were
    # trained.
    _keep_in_fp32_modules_strict = ["members"]  # noqa: RUF012 (declared by transformers)

    def __init__(self, config: JoinedConfig, base: PreTrainedModel | None = None) -> None:
        super().__init__(config, base)
        vocab_size, known = config.vocab_size, config.known_by_heads()
        self.expansions = [Expansion(self.base, sizes) for sizes in config.expansions()]
        self.members = nn.ModuleList(self.expansions)
        for expansion, (first_known, _) in zip(self.expansions, known[1:], strict=True):
            rows = expansion.embed_tokens
            if rows.num_embeddings < vocab_size:  # it has rows for all tokens
                expansion.embed_tokens = nn.Embedding(vocab_size, rows.embedding_dim)
            if expansion.new_tokens is not None:
                expansion.new_tokens.first_id += first_known
        first = [pieces[0] for pieces in config.pieces()]
        self._shares: list[PieceShares | None] = []
        for head, (start, end) in enumerate(known):
            unknown = [*first[:start], *first[end:]]
            own = sorted(set(config.own_pieces).intersection(unknown))
            shares = PieceShares(unknown, own, config.token_ids(head)) if unknown else None
            self._shares.append(shares)
        self.freeze()
        self.eval()
        self.post_init()

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
