"""What lm-eval asks of a language model, answered by both heads and both routing rules from one observation.

A request is a context and a continuation. Its tokens, the context's too, pass the model once; every head's score and
both routing rules follow from what the heads said of them. The router has seen the context before it comes to the
continuation, as it has when the model is served.

Tokens are those of lm-eval's own `hf` model: the same encoding, the same token before an empty context, the same
truncation from the left. So its score of an exported model is the adaptation head's here.

Shapes: K heads (base, trained), H those and both routing rules, B requests of a batch, R of many, T positions.
"""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import has_bos_prefix
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from scale_cli.config.schema import RouterConfig
from scale_cli.errors import RunError
from scale_cli.evaluation.results import HEADS
from scale_cli.evaluation.scoring import score_tokens
from scale_cli.model.heads import HeadedModel, TokenLogProbs, token_log_probs
from scale_cli.processes import ALONE, Share, gathered

# A context and a continuation, as text and as token ids: what lm-eval hands on.
Encoded = tuple[tuple[str, str], list[int], list[int]]


class ObservedHeads(TemplateLM):  # type: ignore[misc]  # lm-eval is not typed
    """A model of lm-eval's whose answers are those of `head`, which may be changed between two evaluations.

    Args:
        model: in evaluation mode.
        tokenizer: of the base.
        router: settings of both rules, whatever the model serves.
        max_length: tokens that the model reads at once.
        batch_size: requests at once.
        mixed_precision: `no` | `bf16`.
        share: of the batches of requests, that is this process's; every one of them answers them all.
    """

    def __init__(
        self,
        model: HeadedModel,
        tokenizer: PreTrainedTokenizerBase,
        router: RouterConfig,
        *,
        max_length: int,
        batch_size: int,
        mixed_precision: str,
        share: Share = ALONE,
    ) -> None:
        super().__init__()
        self.head = "base"
        self.progress: str | None = None
        self.tokenizer: Any = tokenizer
        self._model, self._router = model, router
        self._max_length, self._batch_size, self._mixed_precision = max_length, batch_size, mixed_precision
        self._share = share
        self._scores: dict[tuple[str, str], dict[str, float]] = {}

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        token: int = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context."""
        begin: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return a text's token ids, without a second BOS where the text begins with one."""
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids: list[int] = self.tokenizer.encode(string, **options)
        return ids

    def loglikelihood(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        """Return the chosen head's log-likelihood of each continuation; none is ever called greedy.

        Args:
            requests: lm-eval's instances; those that have been observed are not observed again.
            **_: lm-eval's own progress bar is not shown.
        """
        unseen = {request.args: request for request in requests if request.args not in self._scores}
        if unseen:
            super().loglikelihood(list(unseen.values()), disable_tqdm=True)
        return [(self._scores[request.args][self.head], False) for request in requests]

    def forget(self) -> None:
        """Drop what has been observed."""
        self._scores.clear()

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of both; white space that ends a context goes to the continuation, and may be all of it."""
        context_ids, continuation_ids = super()._encode_pair(context, continuation)
        return context_ids or [self.prefix_token_id], continuation_ids

    def _loglikelihood_tokens(self, requests: list[Encoded], **_: Any) -> list[tuple[float, bool]]:
        for (context, continuation), _context_ids, continuation_ids in requests:
            if not 0 < len(continuation_ids) <= self._max_length:
                raise RunError(
                    f"{continuation!r} after {context[-40:]!r} is {len(continuation_ids)} tokens, "
                    f"of which lm-eval can score 1 to {self._max_length}"
                )
        longest_first = sorted(requests, key=lambda request: -len(request[1]) - len(request[2]))
        batches = [longest_first[at : at + self._batch_size] for at in range(0, len(requests), self._batch_size)]
        share = self._share
        shares = [batches[place :: share.num_processes] for place in range(share.num_processes)]
        said = []
        with tqdm(
            total=len(requests), desc=self.progress, unit=" requests", disable=self.progress is None, leave=False
        ) as bar:
            for batch in shares[share.index]:
                said.append(self._observe(batch))
                bar.update(share.num_processes * len(batch))
        mine_RH = torch.cat(said) if said else torch.zeros(0, len(HEADS), dtype=torch.float64)
        lengths = [sum(len(batch) for batch in of_one) for of_one in shares]
        for of_one, said_RH in zip(shares, gathered(mine_RH, lengths), strict=True):
            asked = [text for batch in of_one for text, _context, _continuation in batch]
            self._scores |= {
                text: dict(zip(HEADS, row, strict=True)) for text, row in zip(asked, said_RH.tolist(), strict=True)
            }
        return [(self._scores[text][self.head], False) for text, _, _ in requests]

    def _observe(self, batch: list[Encoded]) -> Tensor:
        """Return (R, H): what each head and rule of HEADS said of each request of a batch."""
        rows = [torch.tensor((context + continuation)[-self._max_length - 1 :]) for _, context, continuation in batch]
        # Padding stands on the right, where causal attention keeps it out of every real position.
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        ends_B = torch.tensor([len(row) - 1 for row in rows])
        starts_B = ends_B - torch.tensor([len(continuation) for _, _, continuation in batch])
        at_T = torch.arange(ids.shape[1] - 1)
        scored_BT = (at_T >= starts_B[:, None]) & (at_T < ends_B[:, None])
        device = next(self._model.parameters()).device
        ids = ids.to(device)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=self._mixed_precision == "bf16"):
            tokens = token_log_probs(self._model, ids[:, :-1], ids[:, 1:])
        on_cpu = TokenLogProbs(tokens.log_probs_KBT.cpu(), tokens.cosine_BT.cpu())
        scores = score_tokens(on_cpu, self._router)
        log_probs = scores.heads | scores.rules
        return torch.stack([torch.where(scored_BT, log_probs[head], 0.0).sum(dim=-1) for head in HEADS], dim=1)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Refuse: perplexity is measured without lm-eval."""
        raise NotImplementedError

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Refuse: only multiple choice is measured."""
        raise NotImplementedError
