"""What a request's prompt tells the router: the heads' prior, and the tokens that it judges by.

vLLM gives a model tokens and blocks of its cache, but no requests. Of all that can be added to vLLM
without a change of it, only a logits processor is told the whole prompt of every request. So this
one leaves the logits alone. It keeps a row for each place of the batch, which the model reads.

Both are as in `scale generate`: the prior is `PriorByScript` of the user's words, and a chat
template's words are no evidence. The ids tell which they are (chat_turns.py).

Shapes: R places of the batch, P positions of a document.
"""

from __future__ import annotations

import math
from typing import ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

from ..chat_turns import ChatTurns, read_prompt
from ..model.script_prior import PriorByScript


class Prompts(LogitsProcessor):
    """The prompts of all requests in the batch, in its order."""

    # vLLM makes this object, then the model, both with one configuration.
    of_engines: ClassVar[WeakValueDictionary[int, Prompts]] = WeakValueDictionary()

    def __init__(self, vllm_config: VllmConfig, device: torch.device, _is_pin_memory: bool) -> None:
        model = vllm_config.model_config
        num_places = vllm_config.scheduler_config.max_num_seqs
        self.prior_R = torch.zeros(num_places, dtype=torch.float64, device=device)
        self.judged_RP = torch.ones(
            num_places, model.max_model_len, dtype=torch.bool, device=device
        )
        self._prior = PriorByScript.of_export(model.hf_config.scale_router)
        self._tokenizer = cached_tokenizer_from_config(model)
        self._turns = None if self._tokenizer is None else ChatTurns.of(self._tokenizer)
        self._read: dict[int, tuple[float, Tensor]] = {}
        self.of_engines[id(vllm_config)] = self

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch: requests come, go, and change places."""
        if batch_update is None:
            return
        process_dict_updates(self._read, batch_update, lambda _, prompt, __: self.read(prompt))
        read = [self._read[place] for place in range(batch_update.batch_size)]
        if read:
            priors, judged = zip(*read, strict=True)
            self.prior_R[: len(read)] = torch.tensor(priors, dtype=torch.float64)
            padded = pad_sequence(list(judged), batch_first=True, padding_value=True)
            self.judged_RP[: len(read)] = True
            self.judged_RP[: len(read), : padded.shape[1]] = padded

    def read(self, ids: list[int] | None) -> tuple[float, Tensor]:
        """Return the log-odds of the trained head before a prompt, and which of its tokens are
        evidence.

        Without a tokenizer (`skip_tokenizer_init`) the script is not known, and all tokens are.
        """
        assert ids is not None, "prompt embeddings are refused"
        if self._tokenizer is None:
            words = ""
            said = [True] * len(ids)
        else:
            words, said = read_prompt(self._tokenizer, self._turns, ids)
        base = self._prior(words)
        return math.log(1.0 - base) - math.log(base), torch.tensor(said)

    def apply(self, logits: Tensor) -> Tensor:
        """Return the logits as they are."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """Return True, so that vLLM skips `apply` where it can."""
        return True
