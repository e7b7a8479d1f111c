"""What lm-eval asks of a language model, answered by both heads and both routing rules from one observation.

A request is a context and a continuation. Its tokens, the context's too, pass the model once; every head's score and
both routing rules follow from what the heads said of them. The router has seen the context before it comes to the
continuation, as it has when the model is served.

It is lm-eval's own `hf` model that encodes, truncates from the left, and generates: its score of an exported model is
the trained head's here, and stop strings, lengths and sampling are lm-eval's.

Shapes: K heads (base, trained), H those and both routing rules, B requests of a batch, T positions.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from scale_cli.errors import RunError
from scale_cli.evaluation.continuations import SelectableHeads
from scale_cli.evaluation.results import HEADS
from scale_cli.evaluation.scoring import observe, score_tokens
from scale_cli.methods.widened import RouterConfig
from scale_cli.model.heads import HeadedModel, TokenLogProbs
from scale_cli.processes import ALONE, Share, shared_out
from scale_cli.terminal import progress_bar

# lm-eval's own, where a task samples its answers.
_SEED = 1234
# A context and a continuation, as text and as token ids: what lm-eval hands on.
Encoded = tuple[tuple[str, str], list[int], list[int]]


class ObservedHeads(HFLM):  # type: ignore[misc]  # lm-eval is not typed
    """A model of lm-eval's whose answers are those of `head`, which may be changed between two evaluations."""

    def __init__(
        self,
        model: HeadedModel,  # in evaluation mode
        tokenizer: PreTrainedTokenizerBase,
        router: RouterConfig,  # settings of both rules, whatever the model serves
        *,
        max_length: int,  # tokens that the model reads at once
        batch_size: int,  # requests at once
        mixed_precision: str,
        progress: str | None = None,  # what to call it on a progress bar; None for no bar
        share: Share = ALONE,  # of the batches of requests, that is this process's; every one of them answers them all
    ) -> None:
        super().__init__(
            SelectableHeads(model, router),
            backend="causal",
            tokenizer=copy.deepcopy(tokenizer),  # lm-eval gives it a token for padding
            max_length=max_length,
            batch_size=batch_size,
            mixed_precision_dtype=torch.bfloat16 if mixed_precision == "bf16" else None,
        )
        self.head = "base"
        self._headed, self._router, self._mixed_precision = model, router, mixed_precision
        self._progress, self._share = progress, share
        self._stderr = sys.stderr  # for the bar; what lm-eval writes there itself goes nowhere
        self._scores: dict[tuple[str, str], dict[str, float]] = {}

    def loglikelihood(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        """Return the chosen head's log-likelihood of each continuation, observed once; none is ever called greedy."""
        unseen = {request.args: request for request in requests if request.args not in self._scores}
        if unseen:
            super().loglikelihood(list(unseen.values()), disable_tqdm=True)
        return [(self._scores[request.args][self.head], False) for request in requests]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of both; white space that ends a context goes to the continuation, and may be all of it."""
        context_ids, continuation_ids = super()._encode_pair(context, continuation)
        return context_ids or [self.prefix_token_id], continuation_ids

    def _loglikelihood_tokens(self, requests: list[Encoded], **_: Any) -> list[tuple[float, bool]]:
        for (context, continuation), _context_ids, continuation_ids in requests:
            if not 0 < len(continuation_ids) <= self.max_length:
                raise RunError(
                    f"{continuation!r} after {context[-40:]!r} is {len(continuation_ids)} tokens, "
                    f"of which lm-eval can score 1 to {self.max_length}"
                )
        longest_first = sorted(requests, key=lambda request: -len(request[1]) - len(request[2]))
        batches = [longest_first[at : at + self.batch_size] for at in range(0, len(requests), self.batch_size)]
        with self._bar(len(requests), " requests") as bar:
            for (text, _context, _continuation), said_1H in shared_out(batches, self._share, self._observe, bar.update):
                self._scores[text] = dict(zip(HEADS, said_1H[0].tolist(), strict=True))
        return [(self._scores[text][self.head], False) for text, _, _ in requests]

    def _observe(self, batch: Sequence[Encoded]) -> Sequence[Tensor]:
        """Return (1, H) of each request of a batch: what each head and rule of HEADS said of it."""
        rows = [torch.tensor((context + continuation)[-self.max_length - 1 :]) for _, context, continuation in batch]
        tokens = observe(self._headed, self._mixed_precision, rows)
        ends_B = torch.tensor([len(row) - 1 for row in rows])
        starts_B = ends_B - torch.tensor([len(continuation) for _, _, continuation in batch])
        at_T = torch.arange(int(ends_B.max()))
        scored_BT = (at_T >= starts_B[:, None]) & (at_T < ends_B[:, None])
        scores = score_tokens(TokenLogProbs(tokens.log_probs_KBT.cpu(), tokens.cosine_BT.cpu()), self._router)
        log_probs = scores.heads | scores.rules
        said_BH = torch.stack([torch.where(scored_BT, log_probs[head], 0.0).sum(dim=-1) for head in HEADS], dim=1)
        return said_BH.split(1)

    def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
        self.model.head = self.head

        def answer(batch: Sequence[int]) -> list[Tensor]:
            torch.manual_seed(_SEED)
            texts = HFLM.generate_until(self, [requests[at] for at in batch], disable_tqdm=True)
            return [torch.tensor(list(text.encode("utf-8", "surrogatepass")), dtype=torch.uint8) for text in texts]

        batches, answers = self._generation_batches(requests), [""] * len(requests)
        with self._bar(len(requests), f" answers of {self.head}") as bar:
            for at, encoded in shared_out(batches, self._share, answer, bar.update):
                answers[at] = bytes(encoded.tolist()).decode("utf-8", "surrogatepass")
        return answers

    def _generation_batches(self, requests: list[Any]) -> list[list[int]]:
        """Return the places of requests in batches, cut before they are shared out: no answer hangs on how many do."""
        by_options = defaultdict(list)
        for at, request in enumerate(requests):
            by_options[repr(request.args[1])].append(at)
        batches = []
        for alike in by_options.values():
            length = normalize_gen_kwargs(requests[alike[0]].args[1], self.max_gen_toks)["max_gen_toks"]
            if length >= self.max_length:
                raise RunError(f"answers of {length:,} tokens are asked of a model that reads {self.max_length:,}")
            contexts = {at: requests[at].args[0] for at in alike}
            alike.sort(key=lambda at: (-len(self.tok_encode(contexts[at])), contexts[at]))
            batches += [alike[at : at + self.batch_size] for at in range(0, len(alike), self.batch_size)]
        return batches

    @contextmanager
    def _bar(self, total: int, unit: str) -> Iterator[Any]:
        shown = self._progress is not None
        with (
            redirect_stderr(self._stderr),
            progress_bar(total=total, desc=self._progress, unit=unit, disable=not shown, leave=False) as bar,
        ):
            yield bar
