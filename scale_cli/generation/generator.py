"""Continue prompts with a base, a trained model or an export, and tell which head gave each token.

Shapes: K heads (base, trained; of a joined model base and every member), B prompts, T positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from scale_cli.config.schema import ModelConfig
from scale_cli.data.conversations import Messages
from scale_cli.data.tokens import prompt_ids
from scale_cli.errors import ConfigError, RunFolderError, one_line
from scale_cli.evaluation.continuations import before_end, ends_of, padded_left
from scale_cli.export.router_keys import head_names, routed_class
from scale_cli.generation.streaming import Decoder, HeadStreamer, TextStreamer
from scale_cli.model.cache_scale import ScaleCache
from scale_cli.model.heads import token_log_probs
from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.model.routed_scale import Routed
from scale_cli.processes import placed
from scale_cli.storage.atomic import read_json
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.records import BaseRecord
from scale_cli.upscale.base import load_written
from scale_cli.upscale.folder import load_any_base
from scale_cli.upscale.method import router_of
from scale_cli.upscale.run import open_folder
from scale_cli.upscale.tokenizer import load_tokenizer


@dataclass(frozen=True)
class _Number:
    """What an option takes: a kind of number, from the least to the most."""

    kind: Callable[[str], float]
    least: float
    most: float = math.inf


# What of transformers' GenerationConfig may be set beside the options that have names of their own.
_OPTIONS = {
    "top_k": _Number(int, 0),
    "min_p": _Number(float, 0.0, 1.0),
    "typical_p": _Number(float, 0.0, 1.0),
    "epsilon_cutoff": _Number(float, 0.0, 1.0),
    "eta_cutoff": _Number(float, 0.0, 1.0),
    "repetition_penalty": _Number(float, 1e-3, 1e3),
    "no_repeat_ngram_size": _Number(int, 0),
    "min_new_tokens": _Number(int, 0),
    "num_beams": _Number(int, 1, 256),
    "length_penalty": _Number(float, -1e3, 1e3),
    "max_time": _Number(float, 1e-3, 1e9),
}


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    max_new_tokens: int = 128  # at most so many
    temperature: float = 0.0  # 0 takes the likeliest token
    top_p: float = 1.0  # sample among the likeliest tokens that make up this share; 1 for all
    seed: int = 0  # of the sampling
    # further numbers of transformers' GenerationConfig, by its names: `top_k`, `num_beams`
    options: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if (least := self.options.get("min_new_tokens", 0)) > self.max_new_tokens:
            raise ConfigError(f"--set min_new_tokens={least}: is more than --max-new-tokens {self.max_new_tokens}")
        if self.top_p < 1.0 and self.temperature == 0.0:
            raise ConfigError(f"--top-p {self.top_p:g}: does nothing at temperature 0; add --temperature 1")

    def settings(self, ends: list[int], padding: int) -> GenerationConfig:
        """Return them as transformers' own."""
        sampled = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
        try:
            settings = GenerationConfig(
                max_new_tokens=self.max_new_tokens,
                eos_token_id=ends or None,
                pad_token_id=padding,
                **{**(sampled if self.temperature > 0 else {"do_sample": False}), **self.options},
            )
            settings.validate(strict=True)
        except ValueError as error:
            raise ConfigError(f"--set: {one_line(error)}") from None
        return settings


def parsed_options(given: list[str]) -> dict[str, float]:
    """Return `KEY=NUMBER` strings as numbers by name."""
    options: dict[str, float] = {}
    for option in given:
        key, _, value = option.partition("=")
        if key not in _OPTIONS:
            raise ConfigError(f"--set {option}: write KEY=NUMBER; KEY is one of {', '.join(_OPTIONS)}")
        wanted = _OPTIONS[key]
        try:
            options[key] = wanted.kind(value)
        except ValueError:
            raise ConfigError(f"--set {option}: {value!r} is not a number of the kind that {key} takes") from None
        if not wanted.least <= options[key] <= wanted.most:  # nor is NaN
            limits = f"at least {wanted.least:g}" + (f", at most {wanted.most:g}" if wanted.most < math.inf else "")
            raise ConfigError(f"--set {option}: {key} is {limits}")
    return options


@dataclass(frozen=True)
class SpokenToken:
    """One generated token."""

    text: str  # of it
    base_weight: float | None  # the base head's share in its prediction; None where one head alone is served
    shares: dict[str, float] | None = None  # every head's share, by name; None likewise


@dataclass(frozen=True)
class Continuation:
    """A prompt and what was generated after it."""

    prompt: str
    completion: str
    tokens: list[SpokenToken]


class Generator:
    """A model and its tokenizer: a base, or from a run, one of its folders, or an export."""

    def __init__(self, source: Path | ModelConfig, *, plainly: bool = False) -> None:
        """Open a model; an export plainly is its trained head alone."""
        self.model, self.tokenizer = (
            _opened_base(source) if isinstance(source, ModelConfig) else _opened(source, plainly=plainly)
        )
        self.ends = ends_of(self.model.generation_config, self.tokenizer)

    def prompt_ids(self, prompt: str | Messages) -> Tensor:
        """Return (T,) ids: of a text after the boundary that documents have in training; of turns as written."""
        text = prompt if isinstance(prompt, str) else self._asked(prompt)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"prompt {text!r}: is not UTF-8") from None
        if isinstance(prompt, str):
            ids = prompt_ids(self.tokenizer, text)
        else:
            ids = self.tokenizer(text, add_special_tokens=False).input_ids
        if not ids:
            raise ConfigError("prompt: empty, and the tokenizer has no boundary to start from")
        if len(ids) >= self.num_positions:
            raise ConfigError(
                f"prompt: {len(ids):,} tokens long; the model's context is {self.num_positions:,}, the answer included"
            )
        return torch.tensor(ids, device=self.model.device)

    @property
    def num_positions(self) -> int:
        """How many tokens the model's context holds."""
        return int(self.model.config.max_position_embeddings)

    def _asked(self, messages: Messages) -> str:
        """Return what asks for the assistant's next turn, by the chat template."""
        if not self.tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template: this is no model to talk to; give it a text to go on with"
            )
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a template is a program, and refuses by an exception of its own
            raise ConfigError(f"refused by the chat template: {one_line(error)}") from None

    @torch.no_grad()
    def continue_all(
        self, prompts: Sequence[str | Messages], sampling: Sampling, streamer: BaseStreamer | None = None
    ) -> list[Continuation]:
        """Continue texts or conversations, all in one batch; a streamer is told of every token as it comes."""
        rows = [self.prompt_ids(prompt) for prompt in prompts]
        generated = self.generate(rows, sampling, streamer)
        return [self._continuation(prompt, row, new) for prompt, row, new in zip(prompts, rows, generated, strict=True)]

    @torch.no_grad()
    def generate(
        self, rows: Sequence[Tensor], sampling: Sampling, streamer: BaseStreamer | None = None
    ) -> list[Tensor]:
        """Return the new ids of some prompts' ids; each text ends where the model's context does, at the latest."""
        rooms = [self.num_positions - len(row) for row in rows]
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, max(rooms)))
        padding = self.tokenizer.pad_token_id
        settings = sampling.settings(self.ends, next(iter(self.ends), 0) if padding is None else padding)
        ids_BT, mask_BT = padded_left(rows, settings.pad_token_id)
        torch.manual_seed(sampling.seed)
        # The weights of the heads are read where the router leaves them.
        seen = {"past_key_values": streamer.cache} if isinstance(streamer, HeadStreamer) else {}
        try:
            generated = self.model.generate(
                ids_BT, attention_mask=mask_BT, generation_config=settings, streamer=streamer, **seen
            )
        except ValueError as error:  # some values are only looked at when they are used
            if not sampling.options:
                raise
            raise ConfigError(f"--set: {one_line(error)}") from None
        return [new[:room] for new, room in zip(generated[:, ids_BT.shape[1] :], rooms, strict=True)]

    def _continuation(self, prompt: str | Messages, row: Tensor, new: Tensor) -> Continuation:
        new = before_end(self.ends, new)
        shares = self._head_shares(torch.cat([row, new]))[len(row) - 1 :] if len(new) else []
        decoder = Decoder(self.tokenizer, int(row[-1]))
        added = [decoder.added(token) for token in new.tolist()]
        if added:
            added[-1] += decoder.rest()
        tokens = [
            SpokenToken(text, None if share is None else share["base"], share)
            for text, share in zip(added, shares, strict=True)
        ]
        said = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
        return Continuation(said, "".join(added), tokens)

    def streamer(self, prompt: str, *, show_heads: bool) -> TextStreamer | None:
        """Return what prints one prompt's continuation as it comes; None where the heads are only known afterwards."""
        if not (show_heads and self.head_names()):
            return TextStreamer(prompt, self.tokenizer, self.ends)
        if getattr(self.model.config, "router_rule", None) == "cosine":
            return None
        cache: Any = DynamicCache() if isinstance(self.model, Routed) else ScaleCache()
        return HeadStreamer(prompt, self.tokenizer, self.ends, cache, lambda: _log_weights(cache), self.head_names())

    def head_names(self) -> list[str]:
        """Return the names of the heads that are routed among; none where one head alone is served."""
        if isinstance(self.model, Routed):
            return head_names(self.model.num_heads)
        names: list[str] = getattr(self.model.config, "head_names", [])
        return names

    def _head_shares(self, ids_T: Tensor) -> Sequence[dict[str, float] | None]:
        """Return every head's share in the prediction of every token but the first."""
        model, names = self.model, self.head_names()
        if not names:
            return [None] * (len(ids_T) - 1)
        if isinstance(model, Routed):
            log_weights_KBT = model.log_weights(ids_T[None, :-1])
        else:
            router = router_of(model)
            log_weights_KBT = token_log_probs(model, ids_T[None, :-1], ids_T[None, 1:]).log_weights(router.rule, router)
        return [dict(zip(names, shares_K, strict=True)) for shares_K in log_weights_KBT[:, 0].exp().T.tolist()]


def _opened_base(base: ModelConfig) -> tuple[Any, Any]:
    return placed(load_any_base(base)), load_tokenizer(base)


def _opened(path: Path, *, plainly: bool) -> tuple[Any, Any]:
    folder = RunFolder(path).final if RunFolder(path).final.is_dir() else path
    if not (folder / "config.json").is_file():
        raise RunFolderError(f"{path}: holds no model: neither a run with a final/, nor a checkpoint, nor an export")
    if BaseRecord.is_in(folder):
        opened = open_folder(folder)
        return opened.load(), opened.tokenizer
    kind = read_json(folder / "config.json").get("model_type")
    loader: Any = {"scale": ScaleForCausalLM, "scale-joined": JoinedForCausalLM}.get(kind, AutoModelForCausalLM)
    routed = None if plainly else routed_class(folder)
    return placed(load_written(routed or loader, folder)).eval(), load_tokenizer(ModelConfig(base=str(folder)))


def _log_weights(cache: Any) -> Tensor:
    """Return (K, B): the weights of the heads that the router has left in a cache."""
    memory = cache.router if isinstance(cache, ScaleCache) else cache.layers[-1].last
    assert memory is not None, "the posterior rule has read the prompt"
    return memory.log_weights_KB
