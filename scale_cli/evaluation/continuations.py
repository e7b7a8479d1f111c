"""Every head of a model, and every routing rule over them, as a model for transformers' `generate`.

It measures language confusion: of the letters with which a head continues a held-out prompt, those in the prompt's
script. A letter's script is the first word of its Unicode name, after compatibility forms are replaced by plain ones.
Han and kana count as one script, since Japanese mixes them. Digits, signs and incomplete characters do not count.

Shapes: K heads, B batch, T positions, V vocabulary; P prompts, H heads and rules.
"""

from __future__ import annotations

import copy
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import CausalLMOutputWithPast

from scale_cli.config.schema import ContinuationsConfig
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.evaluation.results import HEADS, Values
from scale_cli.evaluation.scoring import TWO_HEADS, Passes
from scale_cli.model.branches_scale import ScaleCache
from scale_cli.model.heads import HeadedModel, RouterSettings
from scale_cli.model.routing import cosine_serves_base, evidence_of, log_prior, logit_cosine, route
from scale_cli.processes import ALONE, Share, autocast, shared_out
from scale_cli.terminal import progress_bar

_HAN_AND_KANA = ("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "IDEOGRAPHIC")


def ends_of(settings: GenerationConfig, tokenizer: Any) -> list[int]:
    """Return the tokens that end a text: the end of a training document, and those of the generation settings."""
    named = settings.eos_token_id
    ends = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    return [end for end in dict.fromkeys(ends) if end is not None]


def before_end(ends: Sequence[int], new_T: Tensor) -> Tensor:
    ended = torch.isin(new_T, torch.tensor(ends, dtype=new_T.dtype, device=new_T.device)).nonzero()
    return new_T[: int(ended[0])] if len(ended) else new_T


def padded_left(prompts: Sequence[Tensor], padding: int) -> tuple[Tensor, Tensor]:
    """Return prompts padded on the left, (B, T) ids, and a mask: 1 for tokens, 0 for padding."""
    ids_BT = pad_sequence(
        list(prompts), batch_first=True, padding_value=padding, padding_side="left"
    )
    mask_BT = pad_sequence(
        [torch.ones_like(ids) for ids in prompts], batch_first=True, padding_side="left"
    )
    return ids_BT, mask_BT


class SelectableHeads(PreTrainedModel, GenerationMixin):
    """A model in evaluation mode that answers with `head`, which may be changed between two generations.

    It computes all heads whichever one answers, as scoring does, so the choice does not change what a head says.
    """

    # It supports whatever attention the model has.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True

    def __init__(
        self, model: HeadedModel, router: RouterSettings, heads: Sequence[str] = TWO_HEADS
    ) -> None:
        super().__init__(copy.deepcopy(model.config))
        self.head = heads[0]
        of_two: Any = getattr(model, "trained", model)
        self.own_generation_config = of_two.generation_config
        self.generation_config = copy.deepcopy(self.own_generation_config)
        self._model, self._router, self._heads = model, router, list(heads)

    def answers(self, ids_BT: Tensor, mask_BT: Tensor, **options: Any) -> Tensor:
        """Return (B, new) ids: what `generate` adds to prompts that are padded on the left."""
        model: Any = self  # transformers types it for its own classes only
        whole: Tensor = model.generate(ids_BT, attention_mask=mask_BT, **options)
        return whole[:, ids_BT.shape[1] :]

    def tie_weights(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing; lm-eval calls it."""

    def forward(
        self,
        input_ids: Tensor,  # (B, T)
        attention_mask: Tensor | None = None,  # (B, past + T), 1 for tokens; padding is on the left
        position_ids: Tensor | None = None,  # (B, T); counted from the cache's length if not given
        past_key_values: Any = None,  # made by this class, or an empty one of transformers, which is replaced
        logits_to_keep: int = 0,  # for the last positions only; 0 for all
        **_: Any,  # other arguments of transformers, which change no answer
    ) -> CausalLMOutputWithPast:
        cache = (
            past_key_values if isinstance(past_key_values, ScaleCache) else self._model.new_cache()
        )
        logits_at = self._model.head_logits(input_ids, attention_mask, position_ids, cache)
        if self.head == "posterior":
            routed = route(
                logits_at,
                input_ids,
                self.config.vocab_size,
                prior_K=log_prior(self._router.prior, len(self._heads), input_ids.device),
                switch_rate=self._router.switch_rate,
                memory=cache.router,
                evidence_BT=evidence_of(attention_mask, input_ids.shape[1]),
                logits_to_keep=logits_to_keep,
            )
            cache.router = routed.memory
            return CausalLMOutputWithPast(logits=routed.scores_BTV, past_key_values=cache)
        heads = logits_at(slice(-logits_to_keep or None, None))
        if self.head == "cosine":
            serves_base = cosine_serves_base(
                logit_cosine(heads[0], heads[-1]), self._router.threshold
            )
            logits = torch.where(serves_base.unsqueeze(-1), heads[0].to(heads[-1].dtype), heads[-1])
        else:
            logits = heads[self._heads.index(self.head)]
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)


@dataclass(frozen=True)
class Prompt:
    """The beginning of a document."""

    ids: list[int]
    script: str  # that most of its letters have


def count_letters(
    answers: SelectableHeads,
    corpus: TokenisedCorpus,
    tokenizer: PreTrainedTokenizerBase,
    asked: ContinuationsConfig,
    passes: Passes,  # batch size and precision
    *,
    progress: str | None = None,  # label of the progress bar; None for no bar
    share: Share = ALONE,  # this process's share of the batches; each process returns the whole
) -> dict[str, Values]:
    """Return (P, 2) by head and rule: after each prompt, its letters in the prompt's script, and all its letters."""
    prompts = list(prompts_of(corpus, tokenizer, asked))
    longest_first = sorted(range(len(prompts)), key=lambda place: -len(prompts[place].ids))
    batches = [
        longest_first[at : at + passes.batch_size]
        for at in range(0, len(prompts), passes.batch_size)
    ]

    def count(batch: Sequence[int]) -> list[Tensor]:
        begun, counts_HB2 = [prompts[place] for place in batch], []
        for head in HEADS:
            said = continuations(
                answers, head, tokenizer, asked.new_tokens, passes.mixed_precision, begun
            )
            of_each = zip(begun, map(scripts_of, said), strict=True)
            counts_HB2.append(
                [(scripts.count(prompt.script), len(scripts)) for prompt, scripts in of_each]
            )
        return list(torch.tensor(counts_HB2).unbind(dim=1))

    counts_PH2 = np.empty((len(prompts), len(HEADS), 2))
    with progress_bar(
        total=len(prompts), desc=progress, unit=" prompts", disable=progress is None, leave=False
    ) as bar:
        for place, counts_H2 in shared_out(batches, share, count, bar.update):
            counts_PH2[place] = counts_H2
    return {head: counts_PH2[:, column] for column, head in enumerate(HEADS)}


def prompts_of(
    corpus: TokenisedCorpus, tokenizer: Any, asked: ContinuationsConfig
) -> Iterator[Prompt]:
    """Yield the beginnings of a corpus's first documents that have a letter."""
    num_found, markers = 0, corpus.markers
    before = [markers.context] if markers.bos is None and markers.context is not None else []
    for index in range(len(corpus)):
        if num_found == asked.prompts:
            return
        ids = corpus.document(index).tolist()[: asked.prompt_tokens]
        if ids and ids[-1] == markers.eos:
            ids = ids[:-1]  # the document is shorter
        if scripts := scripts_of(tokenizer.decode(ids, skip_special_tokens=True)):
            yield Prompt(before + ids, Counter(scripts).most_common(1)[0][0])
            num_found += 1


@torch.no_grad()
def continuations(
    answers: SelectableHeads,
    head: str,  # or rule, by name
    tokenizer: Any,
    new_tokens: int,
    mixed_precision: str,
    batch: Sequence[Prompt],
) -> list[str]:
    """Return a head's greedy continuations of some prompts."""
    ends = ends_of(answers.own_generation_config, tokenizer)
    answers.generation_config = GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=ends or None,
        pad_token_id=next(iter(ends), 0),
    )
    answers.head = head
    ids_BT, mask_BT = padded_left(
        [torch.tensor(prompt.ids, device=answers.device) for prompt in batch], padding=0
    )
    with autocast(answers.device.type, mixed_precision):
        generated = answers.answers(ids_BT, mask_BT)
    return [
        tokenizer.decode(before_end(ends, row), skip_special_tokens=True) for row in generated.cpu()
    ]


def scripts_of(text: str) -> list[str]:
    plain = unicodedata.normalize("NFKC", text)
    return [script for letter in plain if letter.isalpha() and (script := _script(letter))]


@cache
def _script(letter: str) -> str:
    """Return a letter's script; empty if it has none."""
    word = unicodedata.name(letter, "").partition(" ")[0]
    return "" if word == "MODIFIER" else "HAN AND KANA" if word in _HAN_AND_KANA else word
