"""Several expansions on one frozen base, and the posterior router over all their heads: one forward
of the base.

Expansions may bring tokens of their own, for different scripts or the same tokens. A head treats
tokens that it lacks as a base does: it gives each a share of its first piece's probability
(`PieceShares`), and reads it as the mean of its pieces. On text without the others' scripts, a head
predicts as it does alone, to a millionth of a nat a token.

Sources: ours; each expansion is SCALE's (arXiv 2511.03270), the rule is that of `routing.py`.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from .configuration_scale import JoinedConfig, ScaleConfig
from .expansion_scale import Expansion
from .modeling_scale import WidenedModel
from .routing import PieceShares
from .vocabulary_scale import pieces_of


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
        self.heads = config.head_names
        vocab_size = config.vocab_size
        known = config.known_by_heads()
        self.expansions = []
        for member in config.members:
            sizes = ScaleConfig(base_config=config.base_config, **member["expansion"])
            self.expansions.append(Expansion(self.base, sizes))
        self.members = nn.ModuleList(self.expansions)
        for expansion, (first_known, _) in zip(self.expansions, known[1:], strict=True):
            rows = expansion.embed_tokens
            if rows.num_embeddings < vocab_size:  # it has rows for all tokens
                expansion.embed_tokens = nn.Embedding(vocab_size, rows.embedding_dim)
            if expansion.new_tokens is not None:
                expansion.new_tokens.first_id += first_known
        first = [pieces[0] for pieces in pieces_of(config.new_tokens)]
        self._shares = []
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

    def train(self, mode: bool = True) -> JoinedForCausalLM:  # noqa: ARG002 (as every module's)
        """Stay in evaluation mode: nothing in this model trains."""
        return super().train(False)
