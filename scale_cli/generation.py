"""Continue prompts with a base, a trained model or an export, and show which head gave each token.

Shapes: K heads (base, trained; in a joined model the base and every member), B prompts, T positions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from scale_cli.config.schema import ModelConfig
from scale_cli.config.vocabulary import Script
from scale_cli.data.conversations import Messages, conversation_ids, said_tokens
from scale_cli.data.decoding import Decoder, text_pieces
from scale_cli.data.encoding import prompt_ids
from scale_cli.errors import ConfigError, RunFolderError, one_line
from scale_cli.evaluation.selectable_heads import (
    SelectableHeads,
    before_end,
    ends_of,
    padded_left,
)
from scale_cli.export.plain_folder import routed_class
from scale_cli.model.heads import token_log_probs
from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.model.routed_scale import RoutedModel
from scale_cli.processes import move_to_device
from scale_cli.runs.folder import RunFolder
from scale_cli.runs.method_folder import router_of, set_router
from scale_cli.runs.opened import MethodFolder, open_folder
from scale_cli.storage.atomic import read_json
from scale_cli.terminal import printable
from scale_cli.upscale.base import load_base, load_written
from scale_cli.upscale.base_record import BaseRecord
from scale_cli.upscale.base_tokenizer import load_tokenizer

_COLDEST = 1e-6


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    max_new_tokens: int = 128  # upper limit
    temperature: float = 0.0  # 0 takes the likeliest token
    top_p: float = 1.0  # sample from the likeliest tokens that make up this share; 1 for all
    seed: int = 0  # of the sampling

    @property
    def draws(self) -> bool:
        """Whether it draws at all: colder than this, logits overflow, and the likeliest token is certain anyway."""
        return self.temperature >= _COLDEST

    def __post_init__(self) -> None:
        if self.top_p < 1.0 and self.temperature == 0.0:
            raise ConfigError(
                f"--top-p {self.top_p:g}: does nothing at temperature 0; add --temperature 1"
            )


@dataclass(frozen=True)
class PriorByScript:
    """The base head's weight at the start of a prompt, by the script of the user's words."""

    otherwise: float  # where the script does not tell
    in_script: float | None = None  # where it is the new language's; None: it never tells
    script: Script = field(default_factory=lambda: Script(()))

    def __call__(self, words: str) -> float:
        share = self.script.share(words)
        if self.in_script is None or share is None or 0.0 < share < 0.5:
            return self.otherwise
        return self.in_script if share else 1.0 - self.in_script


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
    shares: dict[str, float] | None = (
        None  # of each head in its prediction, by name; None if there is one head
    )


@dataclass(frozen=True)
class Continuation:
    """A prompt and what was generated after it."""

    prompt: str
    completion: str
    tokens: list[SpokenToken]


class Generator:
    """A model and its tokenizer, from a base, a run, a folder of a run, or an export."""

    def __init__(
        self, source: Path | ModelConfig, *, plainly: bool = False, beside_base: bool = False
    ) -> None:
        """Open a model.

        Args:
            source: a base, or the folder of a run, a checkpoint or an export.
            plainly: open an export as its trained head alone.
            beside_base: route between a run's trained model and its base, whichever method trained it.
        """
        self.model: Any
        if isinstance(source, ModelConfig):
            self.model, self.tokenizer = move_to_device(load_base(source)), load_tokenizer(source)
        else:
            self.model, self.tokenizer = _opened(source, plainly=plainly, beside_base=beside_base)
        self.prior = _prior_of(self.model)
        self.ends = ends_of(self.model.generation_config, self.tokenizer)
        self.model.generation_config = (
            GenerationConfig()
        )  # no penalty and no beam of the base: what is asked for acts

    def prompt_ids(self, prompt: str | Messages) -> Tensor:
        """Return (T,) ids: of a text after the boundary that begins training documents, or of turns."""
        try:
            json.dumps(prompt, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ConfigError(f"prompt {prompt!r}: is not UTF-8") from None
        ids = (
            prompt_ids(self.tokenizer, prompt)
            if isinstance(prompt, str)
            else self._conversation_ids(prompt)
        )
        if not ids:
            raise ConfigError(
                "prompt: empty, and the tokenizer has neither BOS nor EOS to start from; give a text"
            )
        if len(ids) >= self.num_positions:
            raise ConfigError(
                f"prompt: {len(ids):,} tokens, but prompt and answer must fit in the model's context of "
                f"{self.num_positions:,}; shorten the prompt"
            )
        return torch.tensor(ids, device=self.model.device)

    def _conversation_ids(self, messages: Messages) -> list[int]:
        if not self.tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template, so this model cannot chat; give it a text to continue"
            )
        try:
            return conversation_ids(self.tokenizer, messages)
        except Exception as error:  # a template is a program with exceptions of its own
            raise ConfigError(
                f"the chat template refuses these messages: {one_line(error)}"
            ) from None

    def framed(self, prompt: str | Messages) -> FramedPrompt:
        """Return a prompt as it is read: of a conversation, the router judges what was said alone."""
        ids_T = self.prompt_ids(prompt)
        if isinstance(prompt, str):
            words, judged = prompt, [True] * len(ids_T)
        else:
            words = "\n".join(str(turn["content"]) for turn in prompt if turn["role"] == "user")
            judged = said_tokens(self.tokenizer, prompt)
        base_prior = self.prior(words) if self.head_names() else None
        return FramedPrompt(ids_T, torch.tensor(judged, device=ids_T.device), base_prior)

    @property
    def num_positions(self) -> int:
        return int(self.model.config.max_position_embeddings)

    @torch.no_grad()
    def continue_all(
        self,
        prompts: Sequence[str | Messages],
        sampling: Sampling,
        streamer: BaseStreamer | None = None,
    ) -> list[Continuation]:
        """Continue texts or conversations in one batch; a streamer gets each token as it comes."""
        framed = [self.framed(prompt) for prompt in prompts]
        generated = self.generate(framed, sampling, streamer)
        return [
            self._continuation(*of_prompt)
            for of_prompt in zip(prompts, framed, generated, strict=True)
        ]

    def generate(
        self,
        prompts: Sequence[FramedPrompt],
        sampling: Sampling,
        streamer: BaseStreamer | None = None,
    ) -> list[Tensor]:
        """Return the new ids after each prompt; a text ends at the latest where the context does."""
        rooms = [self.num_positions - len(prompt.ids_T) for prompt in prompts]
        padding = self.tokenizer.pad_token_id
        padding = next(iter(self.ends), 0) if padding is None else padding
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        ids_BT, mask_BT = padded_left([prompt.ids_T for prompt in prompts], padding)
        torch.manual_seed(sampling.seed)
        settings = GenerationConfig(
            max_new_tokens=min(sampling.max_new_tokens, max(rooms)),
            eos_token_id=self.ends or None,
            pad_token_id=padding,
            do_sample=sampling.draws,
            **(drawn if sampling.draws else {}),
        )
        options: dict[str, Any] = {"generation_config": settings, "streamer": streamer}
        if self.head_names():
            priors = [prompt.base_prior for prompt in prompts]
            options["router_prior"] = torch.tensor(priors, dtype=torch.float64)
            if not all(bool(prompt.judged_T.all()) for prompt in prompts):
                options["judged_mask"] = padded_left([prompt.judged_T for prompt in prompts], 0)[0]
        generated = self.model.generate(ids_BT, attention_mask=mask_BT, **options)
        return [
            new[:room] for new, room in zip(generated[:, ids_BT.shape[1] :], rooms, strict=True)
        ]

    def _continuation(
        self, prompt: str | Messages, framed: FramedPrompt, new: Tensor
    ) -> Continuation:
        new = before_end(self.ends, new)
        shares = self.head_shares(framed, new)[len(framed.ids_T) - 1 :] if len(new) else []
        added = text_pieces(self.tokenizer, framed.ids_T.tolist(), new.tolist())
        tokens = [SpokenToken(*spoken) for spoken in zip(added, shares, strict=True)]
        said = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
        return Continuation(said, "".join(added), tokens)

    def head_names(self) -> list[str]:
        """Return the names of the routed heads; empty if one head alone is served."""
        if isinstance(self.model, SelectableHeads):
            return self.model.heads
        if isinstance(self.model, RoutedModel):  # its config has no names
            added = range(1, self.model.num_heads)
            return (
                ["base", "trained"]
                if len(added) == 1
                else ["base", *(f"head {head}" for head in added)]
            )
        names: list[str] = getattr(self.model.config, "head_names", [])
        return names

    def head_shares(self, prompt: FramedPrompt, new_T: Tensor) -> Sequence[dict[str, float] | None]:
        """Return each head's share in the prediction of every token but the first, by name."""
        names, ids_T = self.head_names(), torch.cat([prompt.ids_T, new_T])
        if not names:
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
            dict(zip(names, shares_K, strict=True))
            for shares_K in log_weights_KBT[:, 0].exp().T.tolist()
        ]


def _prior_of(model: Any) -> PriorByScript:
    """Return the prior of a model that is served: as its config says, whichever config it has."""
    if isinstance(model, RoutedModel):
        router = model.config.scale_router
        ranges = router.get("script", [])
        prior, in_script = router["prior"], router.get("script_prior")
    else:
        ranges = getattr(model.config, "router_script", [])
        prior = getattr(model.config, "router_prior", 0.5)
        in_script = getattr(model.config, "router_script_prior", None)
    script = Script(tuple((first, last) for first, last in ranges))
    return PriorByScript(prior, in_script if ranges else None, script)


def _opened(path: Path, *, plainly: bool, beside_base: bool) -> tuple[Any, Any]:
    folder = RunFolder(path).final if RunFolder(path).final.is_dir() else path
    if not (folder / "config.json").is_file():
        raise RunFolderError(
            f"{path}: contains no model; give a run with a final/, a checkpoint or an export"
        )
    if BaseRecord.is_in(folder):
        opened = open_folder(folder)
        return _beside_base(opened) if beside_base else opened.load(), opened.tokenizer
    if beside_base:
        raise RunFolderError(f"{path}: does not name its base; give the run for --beside-base")
    kind = read_json(folder / "config.json").get("model_type")
    loader: Any = {"scale": ScaleForCausalLM, "scale-joined": JoinedForCausalLM}.get(
        kind, AutoModelForCausalLM
    )
    routed = None if plainly else routed_class(folder)
    return move_to_device(load_written(routed or loader, folder)).eval(), load_tokenizer(
        ModelConfig(base=str(folder))
    )


def _beside_base(opened: MethodFolder) -> SelectableHeads:
    """Return the trained model and its base with the router that the run's config asks for."""
    router = opened.run.config.method.router
    model = SelectableHeads(opened.load_two_headed(), router)
    model.head = router.rule
    set_router(model, router, opened.run.config.new_script)
    return model.eval()


class TextStreamer(BaseStreamer):
    """Prints a prompt, and the text of each token as it comes."""

    def __init__(self, prompt: str, generator: Generator) -> None:
        self._prompt, self._generator = prompt, generator
        self._decoder: Decoder | None = None

    def put(self, value: Tensor) -> None:
        """Take the prompt's ids (1, T) first, then one token per call."""
        if self._decoder is None:
            self._decoder = Decoder(self._generator.tokenizer, value[0].tolist())
            typer.echo(printable(self._prompt), nl=False)
        elif int(value) not in self._generator.ends:
            typer.echo(printable(self._decoder.add(int(value))), nl=False)

    def end(self) -> None:
        """Print what was held back, and end the line."""
        assert self._decoder is not None, "the prompt comes first"
        typer.echo(printable(self._decoder.finish()))
