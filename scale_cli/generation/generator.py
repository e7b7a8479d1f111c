"""Continue prompts with a base, a trained model or an export, and show which head gave each token.

Shapes: K heads (base, trained), B prompts, T positions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from scale_cli.config.schema import Head, ModelConfig
from scale_cli.data.conversations import Messages, conversation_ids, said_tokens
from scale_cli.data.decoding import Decoder, text_pieces
from scale_cli.data.encoding import prompt_ids
from scale_cli.errors import ConfigError, one_line
from scale_cli.evaluation.selectable_heads import (
    SelectableHeads,
    before_end,
    ends_of,
    padded_left,
)
from scale_cli.generation.opening import open_model
from scale_cli.model.heads import token_log_probs
from scale_cli.model.routed_scale import RoutedModel
from scale_cli.model.script_prior import PriorByScript
from scale_cli.runs.method_folder import router_of
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


class Generator:
    """A model and its tokenizer, from a base, a run, a folder of a run, or an export."""

    def __init__(self, source: Path | ModelConfig, head: Head | None = None) -> None:
        """Open a model.

        Args:
            source: a base, or the folder of a run, a checkpoint or an export.
            head: what answers; None: what the run's config or the export says.
        """
        self.model, self.tokenizer = open_model(source, head)
        config = self.model.config
        self.num_positions = int(config.max_position_embeddings)
        # Of the routed heads, the base's first; empty if one head alone is served.
        self.head_names: list[str] = list(getattr(config, "head_names", []))
        self.prior = PriorByScript(
            getattr(config, "router_prior", 0.5),
            getattr(config, "router_script_prior", None),
            getattr(config, "router_script", ()),
        )
        if isinstance(self.model, RoutedModel):  # its config has no names
            self.head_names = ["base", "trained"]
            self.prior = PriorByScript.of_export(config.scale_router)
        elif isinstance(self.model, SelectableHeads):
            self.head_names = self.model.heads
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
        base_prior = self.prior(words) if self.head_names else None
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
        continuations = []
        generated = self.generate(framed, sampling, streamer)
        for prompt, read, whole in zip(prompts, framed, generated, strict=True):
            new = before_end(self.ends, whole)
            shares = self.head_shares(read, new)[len(read.ids_T) - 1 :] if len(new) else []
            added = text_pieces(self.tokenizer, read.ids_T.tolist(), new.tolist())
            tokens = [SpokenToken(*spoken) for spoken in zip(added, shares, strict=True)]
            said = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
            continuations.append(Continuation(said, "".join(added), tokens))
        return continuations

    def generate(
        self,
        prompts: Sequence[FramedPrompt],
        sampling: Sampling,
        streamer: BaseStreamer | None = None,
    ) -> list[Tensor]:
        """Return the new ids after each prompt.

        A text ends at the latest where the context does.
        """
        rooms = [self.num_positions - len(prompt.ids_T) for prompt in prompts]
        padding = self.tokenizer.pad_token_id
        if padding is None:
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
            **options,
        )
        new_BT = generated[:, ids_BT.shape[1] :]
        return [new[:room] for new, room in zip(new_BT, rooms, strict=True)]

    def head_shares(self, prompt: FramedPrompt, new_T: Tensor) -> Sequence[dict[str, float] | None]:
        """Return each head's share in the prediction of every token but the first, by name."""
        ids_T = torch.cat([prompt.ids_T, new_T])
        if not self.head_names:
            return [None] * (len(ids_T) - 1)
        evidence_T = torch.cat([prompt.judged_T, torch.ones_like(new_T, dtype=torch.bool)])
        if isinstance(self.model, RoutedModel):
            log_weights_KBT = self.model.log_weights(
                ids_T[None, :-1],
                evidence_mask=evidence_T[None, :-1],
                router_prior=prompt.base_prior,
            )
        else:
            router = router_of(self.model).model_copy(update={"prior": prompt.base_prior})
            scored = token_log_probs(self.model, ids_T[None, :-1], ids_T[None, 1:])
            log_probs_KBT = torch.where(evidence_T[1:], scored.log_probs_KBT, 0.0)
            scored = replace(scored, log_probs_KBT=log_probs_KBT)
            log_weights_KBT = scored.log_weights(router.rule, router)
        return [
            dict(zip(self.head_names, shares_K, strict=True))
            for shares_K in log_weights_KBT[:, 0].exp().T.tolist()
        ]


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
