"""Log-probabilities of a text's tokens under several heads, and the heads' weights: one number per
token and head.

The heads belong to one widened model, or to two models: a trained one beside the untouched base.
Any method can be routed in this second way without widening anything; `route` has to be
compared with it.

Shapes: K heads (the base's and the trained one's, or the base's alone), B batch, T positions, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from .cache_scale import CACHE
from .pass_scale import ScaleCache
from .routing import (
    cosine_log_weights,
    log_prior,
    logit_cosine,
    observed_log_probs,
    parts_of_positions,
    posterior_log_weights,
)
from .vocabulary_scale import NewTokens, embed

# (B, positions, V) logits of every head at some positions of one forward pass.
HeadLogits = Callable[[slice], Sequence[Tensor]]


@dataclass(frozen=True)
class TokenLogProbs:
    """The heads' log-probabilities of observed tokens, and the similarity of their predictions."""

    log_probs_KBT: Tensor  # of the observed token, under each head, in nats
    cosine_BT: Tensor  # between the logit vectors of the first and the last head

    def log_weights(self, rule: str, router: Any) -> Tensor:
        """Return (K, B, T): the log-weights that a rule gives the heads when predicting each token.

        `router` has the rules' `prior` and `threshold`, as the config does.
        """
        if rule == "cosine":
            return cosine_log_weights(self.cosine_BT, router.threshold)
        prior_K = log_prior(router.prior, self.log_probs_KBT.device)
        return posterior_log_weights(self.log_probs_KBT, prior_K)[..., :-1]


def token_log_probs(
    model: Any,  # Streams, or an export that gives both heads
    input_ids: Tensor,
    next_ids_BT: Tensor,
    cache: Any = None,  # ScaleCache, which holds what came before
) -> TokenLogProbs:
    """Return the log-probabilities of the token after each of `input_ids` (B, T), under a model's
    heads, never holding all positions' logits.
    """
    logits_at = model.head_logits(input_ids, cache=cache)
    log_probs = []
    cosines = []
    for at in parts_of_positions(next_ids_BT, model.config.vocab_size):
        heads = [logits.float() for logits in logits_at(at)]
        said = [observed_log_probs(logits, next_ids_BT[:, at]) for logits in heads]
        log_probs.append(torch.stack(said))
        cosines.append(logit_cosine(heads[0], heads[-1]))
    return TokenLogProbs(torch.cat(log_probs, dim=-1), torch.cat(cosines, dim=-1))


class Streams(Protocol):
    """What runs a base and a model trained from it, whatever kind of model that is: a widened model
    holds both in one row, an adapter runs on the base's weights (`adapter_pair.py`), a copy has
    weights of its own.
    """

    heads: Sequence[str]  # those that `head_logits` gives
    base: Any
    config: Any
    generation_config: Any
    base_is_apart: bool  # it is a plain model of its own, which reads all of its tokens
    decoding_cache: type[ScaleCache]  # of answers; scoring takes a ScaleCache

    def head_logits(self, input_ids: Tensor, cache: Any = None, **given: Any) -> HeadLogits:
        """Run the heads over `input_ids` (B, T); `given` are the attention mask and the positions.

        Return a function that gives every head's logits at any positions.
        """


class ModelPair(nn.Module):
    """A plain base, and a plain model trained from it; or one of the two alone."""

    decoding_cache: type[ScaleCache] = ScaleCache

    def __init__(self, base: Any = None, trained: Any = None) -> None:
        super().__init__()
        self.base = base
        self.trained = trained
        self.heads: Sequence[str] = [
            name for name in ("base", "trained") if getattr(self, name) is not None
        ]
        self.base_is_apart = not isinstance(base, BaseOfNewTokens)
        self.config = (base or trained).config
        self.generation_config = (trained or base).generation_config

    def head_logits(self, input_ids: Tensor, cache: Any = None, **given: Any) -> HeadLogits:
        read: list[tuple[Any, Tensor]] = []  # what each head reads
        # The cache holds the trained model's layers, then the base's; before the first token, none.
        kept: list[Any] = []
        for name in reversed(self.heads):
            model = getattr(self, name)
            own = None
            if cache is not None:
                own = DynamicCache()
                end = len(kept) + model.config.num_hidden_layers
                own.layers = cache.layers[len(kept) : end]
            decoded = model.get_decoder()(
                input_ids, use_cache=cache is not None, **{CACHE: own}, **given
            )
            read.insert(0, (model.get_output_embeddings(), decoded.last_hidden_state))
            if own is not None:
                kept += own.layers
        if cache is not None:
            cache.layers = kept
        return lambda at: [head(states[:, at].contiguous()) for head, states in read]


class BaseOfNewTokens(nn.Module):
    """A plain base that reads new tokens and gives them shares of its pieces' probability; it is
    never trained.
    """

    def __init__(self, base: Any, new: NewTokens, config: Any) -> None:
        super().__init__()
        self.config = config  # of a model that has the new tokens
        self.base = base
        self.new = new

    def get_decoder(self) -> Any:
        decoder = self.base.get_decoder()
        return lambda ids, **options: decoder(
            inputs_embeds=embed(decoder.embed_tokens, self.new, ids), **options
        )

    def get_output_embeddings(self) -> Any:
        head = self.base.get_output_embeddings()
        return lambda states: self.new.shared(head(states))


def base_alone(model: Streams) -> ModelPair:
    """Return the base of a model as it is served: one head, and no new tokens."""
    base = model.base
    return ModelPair(base.base if isinstance(base, BaseOfNewTokens) else base)


def beside_new_tokens(base: PreTrainedModel, trained: Any) -> nn.Module:
    """Return an untouched base that can also read the new tokens of a trained plain model."""
    config = trained.config
    if not getattr(config, "new_tokens", None):
        return base
    new = NewTokens(base, config.new_tokens, config.own_pieces).to(trained.device)
    return BaseOfNewTokens(base, new, config)
