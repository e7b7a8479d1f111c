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
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from .branches_scale import ScaleCache
from .cache_scale import named
from .modeling_scale import ScaleForCausalLM
from .routing import (
    cosine_serves_base,
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
            serves_base_BT = cosine_serves_base(self.cosine_BT, router.threshold)
            return torch.stack([serves_base_BT, ~serves_base_BT]).double().log()
        prior_K = log_prior(router.prior, self.log_probs_KBT.device)
        return posterior_log_weights(self.log_probs_KBT, prior_K)[..., :-1]


def token_log_probs(
    model: HeadedModel,
    input_ids: Tensor,
    next_ids_BT: Tensor,
    cache: Any = None,  # of the model's own kind, which holds what came before
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


class CacheOfTwo(ScaleCache):
    """The generation state of two models: the base's cache, the trained model's beside it, and the
    router's memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trained = DynamicCache()

    def reset(self) -> None:
        super().reset()
        self.trained.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self.trained.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.trained.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.trained.batch_repeat_interleave(repeats)


class PlainHeads(nn.Module):
    """A base, and a model trained from it, whose heads are scored like the two of a widened model.

    Without a trained model it is the base alone, with one head.
    """

    new_cache: type[ScaleCache] = CacheOfTwo
    decoding_cache: type[ScaleCache] = CacheOfTwo  # what answers may take another one

    def __init__(self, base: Any, trained: Any = None) -> None:
        super().__init__()
        self.base = base
        self.trained = trained
        self.heads = ["base"] if trained is None else ["base", "trained"]
        self.config = base.config
        self.generation_config = (trained or base).generation_config

    def head_logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,  # CacheOfTwo
    ) -> HeadLogits:
        caches = {self.base: cache}
        if self.trained is not None:
            caches[self.trained] = None if cache is None else cache.trained
        hidden = {
            model: model.get_decoder()(
                input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                use_cache=cache is not None,
                **named(of_model),
            ).last_hidden_state
            for model, of_model in caches.items()
        }
        return lambda positions: [
            model.get_output_embeddings()(states[:, positions].contiguous())
            for model, states in hidden.items()
        ]


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


# A model with heads over one vocabulary; `head_logits` runs it and gives their logits at any
# positions.
HeadedModel: TypeAlias = ScaleForCausalLM | PlainHeads


def base_alone(model: HeadedModel) -> PlainHeads:
    """Return the base of a model as it is served: one head, and no new tokens."""
    base = model.base
    return PlainHeads(base.base if isinstance(base, BaseOfNewTokens) else base)


def trained_alone(model: HeadedModel) -> PlainHeads | None:
    """Return the trained model that lies beside its base, as one head; None if there is none."""
    trained = None if isinstance(model, ScaleForCausalLM) else model.trained
    return None if trained is None else PlainHeads(trained)


def base_is_apart(model: HeadedModel) -> bool:
    """Return whether a model's base is a plain model of its own, which reads all of its tokens."""
    return isinstance(model, PlainHeads) and not isinstance(model.base, BaseOfNewTokens)
