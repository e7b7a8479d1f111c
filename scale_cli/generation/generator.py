"""Continue prompts with a base, a trained model or an export, and show which head gave each token.

Shapes: K heads (base, trained), B prompts, T positions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from scale_cli.config.schema import Head, ModelConfig
from scale_cli.data.conversations import Messages, conversation_ids, said_tokens
from scale_cli.data.decoding import Decoder, text_pieces
from scale_cli.data.encoding import prompt_ids
from scale_cli.errors import ConfigError, one_line
from scale_cli.evaluation.around_generate import before_end, ends_of, padded_left
from scale_cli.generation.opening import open_model
from scale_cli.terminal import printable

_COLDEST = 1e-6


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    max_new_tokens: int = 128  # upper limit
    temperature: float = 0.0  # 0 takes the likeliest token
    top_p: float = 1.0  # sample from the likeliest tokens that make up this share; 1 for all
    seed: int = 0  # of the sampling

    def __post_init__(self) -> None:
        if self.top_p < 1.0 and self.temperature == 0.0:
            raise ConfigError(
                f"--top-p {self.top_p:g}: does nothing at temperature 0; add --temperature 1"
            )


@dataclass(frozen=True)
class FramedPrompt:
    """A prompt as the model and its router read it."""

    ids_T: Tensor
    judged_T: Tensor  # whether the router judges by a token: not by a chat template's
    base_prior: float | None  # weight of the base's head before it; None: one head serves


@dataclass(frozen=True)
class SpokenToken:
    """One generated token."""

    text: str  # that it adds
    shares: dict[str, float] | None  # of each head in its prediction; None if there is one head


@dataclass(frozen=True)
class Continuation:
    """A prompt and what was generated after it."""

    prompt: str
    completion: str
    tokens: list[SpokenToken]


class HeadShares(StoppingCriteria):
    """Notes the heads' shares in every token that `generate` writes; it stops nothing."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._of_tokens: list[Tensor] = []  # (K, B) of each

    def __call__(self, input_ids: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        """Note the shares in the token that was just chosen."""
        self._of_tokens.append(self._model.log_weights_KB.exp())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def of_row(self, row: int) -> list[list[float]]:
        """Return the shares of all heads in each token of a text."""
        return [shares_KB[:, row].tolist() for shares_KB in self._of_tokens]


class Generator:
    """A model and its tokenizer, from a base, a run, a folder of a run, or an export."""

    def __init__(
        self, source: Path | ModelConfig, head: Head | None = None, base: str | None = None
    ) -> None:
        """Open a model.

        Args:
            source: a base, or the folder of a run, a checkpoint or an export.
            head: what answers; None: what the run's config or the export says.
            base: folder or hub id of the base, where `source` is an adapter or a model that others
                trained from it; None: what the folder names.
        """
        self.model, self.tokenizer, self.prior = open_model(source, head, base)
        self.num_positions = int(self.model.config.max_position_embeddings)
        # Of the routed heads, the base's first; empty if one head alone is served.
        self.head_names: list[str] = list(self.model.heads) if self.prior else []
        self.ends = ends_of(self.model.generation_config.eos_token_id, self.tokenizer)
        # No penalty and no beam of the base: what is asked for acts.
        self.model.generation_config = GenerationConfig()

    def prompt_ids(self, prompt: str | Messages) -> Tensor:
        """Return (T,) ids: of a text after the boundary that begins documents, or of turns."""
        try:
            json.dumps(prompt, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ConfigError(f"prompt {prompt!r}: is not UTF-8") from None
        if isinstance(prompt, str):
            ids = prompt_ids(self.tokenizer, prompt)
        elif not self.tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template, so this model cannot chat; "
                "give it a text to continue"
            )
        else:
            try:
                ids = conversation_ids(self.tokenizer, prompt)
            except Exception as error:  # a template is a program with exceptions of its own
                raise ConfigError(
                    f"the chat template refuses these messages: {one_line(error)}"
                ) from None
        if not ids:
            raise ConfigError(
                "prompt: empty, and the tokenizer has neither BOS nor EOS to start from; "
                "give a text"
            )
        if len(ids) >= self.num_positions:
            raise ConfigError(
                f"prompt: {len(ids):,} tokens, but prompt and answer must fit in the model's "
                f"context of {self.num_positions:,}; shorten the prompt"
            )
        return torch.tensor(ids, device=self.model.device)

    def framed(self, prompt: str | Messages) -> FramedPrompt:
        """Return a prompt as it is read; of a conversation, only what was said is judged."""
        ids_T = self.prompt_ids(prompt)
        if isinstance(prompt, str):
            words = prompt
            judged = [True] * len(ids_T)
        else:
            words = "\n".join(str(turn["content"]) for turn in prompt if turn["role"] == "user")
            judged = said_tokens(self.tokenizer, prompt)
        base_prior = None if self.prior is None else self.prior(words)
        return FramedPrompt(ids_T, torch.tensor(judged, device=ids_T.device), base_prior)

    @torch.no_grad()
    def continue_all(
        self,
        prompts: Sequence[str | Messages],
        sampling: Sampling,
        streamer: BaseStreamer | None = None,
    ) -> list[Continuation]:
        """Continue texts or conversations in one batch; a streamer gets each token as it comes."""
        framed = [self.framed(prompt) for prompt in prompts]
        seen = HeadShares(self.model) if self.head_names else None
        generated = self.generate(framed, sampling, streamer, seen)
        continuations = []
        for row, (prompt, read, whole) in enumerate(zip(prompts, framed, generated, strict=True)):
            new = before_end(self.ends, whole).tolist()
            added = text_pieces(self.tokenizer, read.ids_T.tolist(), new)
            tokens = [SpokenToken(text, None) for text in added]
            if seen is not None:
                tokens = [  # shares are also noted of what was cut off behind the end
                    SpokenToken(text, dict(zip(self.head_names, shares, strict=True)))
                    for text, shares in zip(added, seen.of_row(row), strict=False)
                ]
            said = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
            continuations.append(Continuation(said, "".join(added), tokens))
        return continuations

    def generate(
        self,
        prompts: Sequence[FramedPrompt],
        sampling: Sampling,
        streamer: BaseStreamer | None = None,
        seen: HeadShares | None = None,  # notes what each head has in each token
    ) -> list[Tensor]:
        """Return the new ids after each prompt.

        A text ends at the latest where the context does.
        """
        rooms = [self.num_positions - len(prompt.ids_T) for prompt in prompts]
        padding = self.tokenizer.pad_token_id
        if padding is None or padding >= self.model.config.vocab_size:  # added without a row
            padding = next(iter(self.ends), 0)
        settings: dict[str, Any] = {
            "max_new_tokens": min(sampling.max_new_tokens, max(rooms)),
            "eos_token_id": self.ends or None,
            "pad_token_id": padding,
            # Colder than this, logits overflow, and the likeliest token is certain anyway.
            "do_sample": sampling.temperature >= _COLDEST,
        }
        if settings["do_sample"]:
            settings |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        options: dict[str, Any] = {}
        if self.head_names:
            priors = [prompt.base_prior for prompt in prompts]
            options["router_prior"] = torch.tensor(priors, dtype=torch.float64)
            if not all(bool(prompt.judged_T.all()) for prompt in prompts):
                options["judged_mask"] = padded_left([prompt.judged_T for prompt in prompts], 0)[0]
        ids_BT, mask_BT = padded_left([prompt.ids_T for prompt in prompts], padding)
        torch.manual_seed(sampling.seed)
        generated = self.model.generate(
            ids_BT,
            attention_mask=mask_BT,
            generation_config=GenerationConfig(**settings),
            streamer=streamer,
            stopping_criteria=None if seen is None else StoppingCriteriaList([seen]),
            **options,
        )
        new_BT = generated[:, ids_BT.shape[1] :]
        return [new[:room] for new, room in zip(new_BT, rooms, strict=True)]


class TextStreamer(BaseStreamer):
    """Prints a prompt, and the text of each token as it comes."""

    def __init__(self, prompt: str, generator: Generator) -> None:
        self._prompt = prompt
        self._generator = generator
        self._decoder: Decoder | None = None

    def put(self, value: Tensor) -> None:
        """Take the prompt's ids (1, T) first, then one token per call."""
        if self._decoder is None:
            self._decoder = Decoder(self._generator.tokenizer, value[0].tolist())
            typer.echo(printable(self._prompt), nl=False)
        elif int(value) not in self._generator.ends:
            typer.echo(printable(self._decoder.add(int(value))), nl=False)

    def end(self) -> None:
        """End the line."""
        typer.echo()
