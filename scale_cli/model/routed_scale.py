"""A plain export served with its router: the family's own model, whose one vocabulary head gives
both heads' logits.

The plain model's hidden row holds both streams side by side, h = [x ; u]. Its vocabulary head has
the columns of both, [H | H']. So one product gives both heads' logits, z_base = H x and
z_trained = z_base + H' u, and the posterior rule of `routing.py` mixes them. `scale_router` in
config.json says how many columns are whose.

Layers, attention, cache, quantisation and devices are transformers' own. The router's memory
between two calls is one more layer of the cache, so every operation on the cache also applies to
it.

Shapes: K = 2 heads (0 is the base's), B batch, T positions, D channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    Exaone4ForCausalLM,
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    Olmo2ForCausalLM,
    Olmo3ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from .cache_scale import CACHE, require_state
from .routing import RouterMemory, base_shares, evidence_of_words, route


class RouterLayer:
    """The router's memory as one more layer of a cache: reordered, cropped, repeated and reset with
    the others.
    """

    supports_early_init = False
    is_initialized = True
    is_sliding = False
    is_croppable = True
    keys = values = None

    def __init__(self, layers: list[Any]) -> None:
        self.is_compileable = all(layer.is_compileable for layer in layers)
        self._first = layers[0]
        self.is_empty = True
        self.last: RouterMemory | None = None
        self._forget_how_it_came()

    def _forget_how_it_came(self) -> None:
        """Drop the state that `crop` needs: the memory before the last call, and the rows and
        weights of that call.
        """
        self.before: RouterMemory | None = None
        self.call: tuple[Tensor, Tensor] | None = None

    def reset(self) -> None:
        """Forget everything; the tensors that a compiled step writes into keep their addresses."""
        self.is_empty = True
        self._forget_how_it_came()

    def keep(self, memory: RouterMemory, rows_BTD: Tensor, log_weights_KBT: Tensor) -> None:
        if not self.is_compileable:
            self.before = None if self.is_empty else self.last
            self.call = (rows_BTD, log_weights_KBT)
            self.last = memory
        elif self.last is None or self.last.logits_KBV.shape != memory.logits_KBV.shape:
            self.last = RouterMemory(*(tensor.clone() for tensor in memory))
            if not torch.compiler.is_compiling():
                for tensor in self.last:
                    torch._dynamo.mark_static_address(tensor)
        else:
            for tensor, now in zip(self.last, memory, strict=True):
                tensor.copy_(now)
        self.is_empty = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens of the last call, as assisted decoding does with tokens that it
        rejects.
        """
        if tokens_to_remove > 0:  # transformers 4 passes the number of tokens to keep
            raise NotImplementedError("assisted decoding of a routed model needs transformers 5")
        num_removed = abs(tokens_to_remove)
        if num_removed == 0 or self.is_empty:
            return
        if self.call is None or num_removed > self.call[0].shape[1]:
            raise NotImplementedError(
                "a routed model's cache can remove only the tokens of the last call, not earlier ones"
            )
        rows_BTD = self.call[0][:, :-num_removed]
        log_weights_KBT = self.call[1][..., :-num_removed]
        if rows_BTD.shape[1]:
            self.call = rows_BTD, log_weights_KBT
            self.last = None
        else:
            self.last = self.before
            self.is_empty = self.before is None
            self._forget_how_it_came()

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.last is not None:
            self.last = self.last.chosen(indices)
        self._forget_how_it_came()

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.last is not None:
            self.last = self.last.repeated(repeats)
        self._forget_how_it_came()

    def offload(self) -> None:
        pass

    def prefetch(self) -> None:
        """Prefetch the next layer, which is the first one."""
        self._first.prefetch()

    def get_max_length(self) -> int:
        return -1  # unlimited


class RoutedModel(nn.Module):
    """Common part of every family's routed class: the forward pass, and the hooks that generation
    calls.
    """

    heads = ("base", "trained")
    log_weights_KB: Tensor  # of the heads in what was last predicted, unless it is compiled
    config: Any
    model: Any
    lm_head: Any
    loss_function: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        router = getattr(config, "scale_router", None)
        if router is None:
            raise ValueError(
                "config.json has no scale_router: this is a plain model without a router"
            )
        sizes = router["stream_sizes"]
        if sum(sizes) != config.hidden_size:
            raise ValueError(
                "config.json: scale_router does not fit hidden_size; it belongs to another model"
            )
        self._num_base, self._num_added = sizes
        self._prior = router["prior"]
        self._shares = base_shares(router)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        evidence_mask: Tensor | None = None,
        router_prior: float | Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return scores whose softmax is the mixture of the heads; the arguments are those of the
        family's own class.

        `cache` and `past_key_values` are two names of one argument.

        `evidence_mask` (B, T) is True if neither a token nor the one before it is padding. By
        default it is derived from `attention_mask`; ValueError if that does not have two
        dimensions, or for `inputs_embeds`. `router_prior`, a number or (B,), is the base head's
        weight at the first token; by default, the export's. `generate` takes it too.
        """
        if input_ids is None or inputs_embeds is not None:
            raise ValueError(
                "inputs_embeds: the router weighs its heads by the tokens of the text; pass input_ids"
            )
        cache = past_key_values if cache is None else cache
        layer = None if cache is None else _router_layer(cache)
        if layer is None or layer.is_empty:
            require_state(attention_mask, position_ids, input_ids.shape[1])
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            **{CACHE: cache},
            **kwargs,
        )
        cache = getattr(outputs, CACHE) if cache is None else cache
        if cache is not None and layer is None:
            layer = RouterLayer(cache.layers)
            cache.layers.append(layer)
        rows_BTD = outputs.last_hidden_state
        logits, log_weights_KBT, memory = route(
            lambda at: self._logits_of_rows(rows_BTD[:, at]),
            input_ids,
            self.config.vocab_size,
            base_prior=self._prior if router_prior is None else router_prior,
            memory=self._last(layer),
            attention_mask=attention_mask,
            evidence_BT=evidence_mask,
            logits_to_keep=logits_to_keep,
        )
        if layer is not None:
            memory = RouterMemory(*(tensor.detach() for tensor in memory))
            layer.keep(memory, rows_BTD.detach(), log_weights_KBT.detach())
        if not torch.compiler.is_compiling():
            self.log_weights_KB = log_weights_KBT[..., -1]
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=logits.shape[-1], **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE: getattr(outputs, CACHE)},
        )

    def _last(self, layer: RouterLayer | None) -> RouterMemory | None:
        """Return the router's memory after the last token; after a crop, compute it again from the
        last row kept.
        """
        if layer is None or layer.is_empty:
            return None
        if layer.last is None and layer.call is not None:
            rows_BTD, log_weights_KBT = layer.call
            logits_KBV = self._logits_of_rows(rows_BTD[:, -1:])[:, :, 0]
            layer.last = RouterMemory(
                log_weights_KBT[..., -1], logits_KBV, logits_KBV.logsumexp(dim=-1)
            )
        return layer.last

    def head_logits(self, input_ids: Tensor, cache: Any = None) -> Callable[[slice], Any]:
        """Run the decoder over `input_ids` (B, T); return a function that gives both heads' logits
        at any positions.
        """
        outputs = self.model(input_ids=input_ids, use_cache=cache is not None, **{CACHE: cache})
        return lambda at: self._logits_of_rows(outputs.last_hidden_state[:, at])

    def _logits_of_rows(self, rows_BTD: Tensor) -> Tensor:
        """Return (K, B, T, V) float32, reading the matrix only once.

        For many rows, and in float32, each stream is multiplied with its own columns. For one row
        in 16 bits, reading the matrix takes the time, not the arithmetic: the whole head is called
        with one row for each head, in which u is zero for the base. In float32 a processor would
        read the matrix once per row. A head that is no plain matrix (quantised, offloaded, split
        over devices) is called as a whole too.
        """
        head = self.lm_head
        plain = (
            type(head) is nn.Linear
            and type(head.weight) is nn.Parameter
            and not hasattr(head, "_hf_hook")
        )
        if plain and (rows_BTD.shape[0] * rows_BTD.shape[1] > 1 or rows_BTD.dtype == torch.float32):
            # Flattened first: on a slice of a three-dimensional tensor, `linear` makes one product
            # per sequence.
            rows_ND = rows_BTD.flatten(0, 1)
            base_NV, added_NV = (
                F.linear(rows_ND[:, at], head.weight[:, at]).float()
                for at in (slice(self._num_base), slice(self._num_base, None))
            )
            heads_KBTV = torch.stack([base_NV, base_NV + added_NV]).unflatten(1, rows_BTD.shape[:2])
        else:
            x_BTD = F.pad(rows_BTD[..., : self._num_base], (0, self._num_added))
            heads_KBTV = head(torch.stack([x_BTD, rows_BTD])).float()
        if self._shares is None:
            return heads_KBTV
        num_old = heads_KBTV.shape[-1] - len(self._shares.first)
        return torch.stack([self._shares(heads_KBTV[0, ..., :num_old]), heads_KBTV[1]])

    def prepare_inputs_for_generation(
        self,
        input_ids: Any,
        *args: Any,
        inputs_embeds: Any = None,
        judged_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Add `evidence_mask`: for a static cache, the prepared mask has four dimensions and does
        not show padding.

        `judged_mask` (B, prompt) is False for tokens by which the router shall not judge, such as a
        chat template's.
        """
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(  # type: ignore[misc]
            input_ids, *args, inputs_embeds=inputs_embeds, **kwargs
        )
        ids = inputs.get("input_ids")
        if not isinstance(ids, Tensor):  # `forward` says what it needs
            return inputs

        mask = kwargs.get("attention_mask")
        layer = None if (cache := kwargs.get(CACHE)) is None else _router_layer(cache)
        if layer is None or layer.is_empty:
            require_state(mask, None, ids.shape[1])
        if judged_mask is None:
            judged_mask = torch.ones_like(input_ids, dtype=torch.bool)
        inputs["evidence_mask"] = evidence_of_words(
            judged_mask, mask, input_ids.shape[1], ids.shape[1]
        )
        return inputs

    def init_continuous_batching(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise NotImplementedError: the paged cache does not hold the router's memory."""
        raise NotImplementedError(
            "a routed model has no continuous batching in transformers: serve without it, or in vLLM with our plug-in"
        )


class ScaleRoutedLlamaForCausalLM(RoutedModel, LlamaForCausalLM):
    """A Llama with its router."""


class ScaleRoutedMistralForCausalLM(RoutedModel, MistralForCausalLM):
    """A Mistral with its router."""


class ScaleRoutedQwen2ForCausalLM(RoutedModel, Qwen2ForCausalLM):
    """A Qwen2 with its router."""


class ScaleRoutedQwen3ForCausalLM(RoutedModel, Qwen3ForCausalLM):
    """A Qwen3 with its router."""


class ScaleRoutedGemma3ForCausalLM(RoutedModel, Gemma3ForCausalLM):
    """A Gemma 3 with its router."""


class ScaleRoutedOlmo2ForCausalLM(RoutedModel, Olmo2ForCausalLM):
    """An OLMo 2 with its router."""


class ScaleRoutedOlmo3ForCausalLM(RoutedModel, Olmo3ForCausalLM):
    """An OLMo 3 with its router."""


class ScaleRoutedExaone4ForCausalLM(RoutedModel, Exaone4ForCausalLM):
    """An EXAONE 4 with its router."""


def _router_layer(cache: Any) -> RouterLayer | None:
    """Return the router's layer of a cache; None if the cache is new. ValueError: another model
    filled the cache.
    """
    if cache.layers and isinstance(cache.layers[-1], RouterLayer):
        return cache.layers[-1]
    if cache.get_seq_length() > 0:
        raise ValueError(
            f"{CACHE}: another model filled this cache, but the router must read its tokens; pass a new cache"
        )
    return None
