"""What lm-eval asks of a language model, answered by both heads and both routing rules from one observation.

A request is a context and a continuation. Its tokens, the context's too, pass the model once; every head's score and
both routing rules follow from what the heads said of them. The router has seen the context before it comes to the
continuation, as it has when the model is served.

Tokens are those of lm-eval's own `hf` model: the same encoding, the same token before an empty context, the same
truncation from the left. So its score of an exported model is the trained head's here. What is generated is what
that model itself generates from every head: stop strings, lengths and sampling are lm-eval's.

Shapes: K heads (base, trained), H those and both routing rules, B requests of a batch, T positions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from scale_cli.errors import RunError
from scale_cli.evaluation.results import HEADS
from scale_cli.evaluation.scoring import score_tokens
from scale_cli.evaluation.selectable_heads import SelectableHeads
from scale_cli.methods.widened import RouterConfig
from scale_cli.model.heads import HeadedModel, TokenLogProbs, token_log_probs
from scale_cli.processes import ALONE, Share, shared_out
from scale_cli.progress import progress_bar

# lm-eval's own, where a task samples its answers.
_SEED = 1234
# A context and a continuation, as text and as token ids: what lm-eval hands on.
Encoded = tuple[tuple[str, str], list[int], list[int]]


class ObservedHeads(TemplateLM):  # type: ignore[misc]  # lm-eval is not typed
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
        share: Share = ALONE,  # of the batches of requests, that is this process's; every one of them answers them all
    ) -> None:
        super().__init__()
        self.head = "base"
        self.progress: str | None = None
        self.tokenizer: Any = tokenizer
        self._model, self._router = model, router
        self._max_length, self._batch_size, self._mixed_precision = max_length, batch_size, mixed_precision
        self._share = share
        self._scores: dict[tuple[str, str], dict[str, float]] = {}
        # The answers of every head by request: several, in turn, where it is asked several times.
        self._texts: dict[str, dict[tuple[str, str], list[str]]] = {}

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

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
        return self.tokenizer.encode(string, **options)

    def loglikelihood(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        """Return the chosen head's log-likelihood of each continuation, observed once; none is ever called greedy."""
        unseen = {request.args: request for request in requests if request.args not in self._scores}
        if unseen:
            super().loglikelihood(list(unseen.values()), disable_tqdm=True)
        return [(self._scores[request.args][self.head], False) for request in requests]

    def forget(self) -> None:
        """Drop what has been observed."""
        self._scores.clear()
        self._texts.clear()

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
        with progress_bar(
            total=len(requests), desc=self.progress, unit=" requests", disable=self.progress is None, leave=False
        ) as bar:
            for (text, _context, _continuation), said_1H in shared_out(batches, self._share, self._observe, bar.update):
                self._scores[text] = dict(zip(HEADS, said_1H[0].tolist(), strict=True))
        return [(self._scores[text][self.head], False) for text, _, _ in requests]

    def _observe(self, batch: Sequence[Encoded]) -> Sequence[Tensor]:
        """Return (1, H) of each request of a batch: what each head and rule of HEADS said of it."""
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
        said_BH = torch.stack([torch.where(scored_BT, log_probs[head], 0.0).sum(dim=-1) for head in HEADS], dim=1)
        return said_BH.split(1)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Refuse: perplexity is measured without lm-eval."""
        raise NotImplementedError

    def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
        """Return the chosen head's answer to each request, from what `generate` has collected before."""
        texts, asked = self._texts[self.head], Counter[tuple[str, str]]()
        answers = []
        for request in requests:
            key = _key(request)
            answers.append(texts[key][asked[key]])
            asked[key] += 1
        return answers

    def generate(self, requests: list[Any]) -> None:
        """Let every head answer requests, each as often as it is there, by lm-eval's own `hf` model."""
        answering = SelectableHeads(self._model, self._router)
        lm_eval_model = HFLM(
            answering,
            backend="causal",
            tokenizer=self.tokenizer,
            max_length=self._max_length,
            batch_size=self._batch_size,
            mixed_precision_dtype=torch.bfloat16 if self._mixed_precision == "bf16" else None,
        )
        batches = self._generation_batches(requests, lm_eval_model.max_gen_toks)

        def answered(batch: Sequence[Any]) -> list[Tensor]:
            torch.manual_seed(_SEED)
            texts = lm_eval_model.generate_until(list(batch), disable_tqdm=True)
            return [torch.tensor(list(text.encode("utf-8", "surrogatepass")), dtype=torch.uint8) for text in texts]

        shown = self.progress is not None
        with progress_bar(
            total=len(requests) * len(HEADS), desc=self.progress, unit=" answers", disable=not shown, leave=False
        ) as bar:
            for head in HEADS:
                answering.head = head
                texts = self._texts.setdefault(head, defaultdict(list))
                for request, encoded in shared_out(batches, self._share, answered, bar.update):
                    texts[_key(request)].append(bytes(encoded.tolist()).decode("utf-8", "surrogatepass"))

    def _generation_batches(self, requests: list[Any], default_length: int) -> list[list[Any]]:
        """Return requests in batches, cut before they are shared out: no answer hangs on how many share them."""
        by_options = defaultdict(list)
        for request in requests:
            by_options[repr(request.args[1])].append(request)
        batches = []
        for alike in by_options.values():
            length = normalize_gen_kwargs(alike[0].args[1], default_length)["max_gen_toks"]
            if length >= self._max_length:
                raise RunError(f"answers of {length:,} tokens are asked of a model that reads {self._max_length:,}")
            alike.sort(key=lambda request: (-len(self.tok_encode(request.args[0])), request.args[0]))
            batches += [alike[at : at + self._batch_size] for at in range(0, len(alike), self._batch_size)]
        return batches


def _key(request: Instance) -> tuple[str, str]:
    context, options = request.args
    return context, repr(options)
