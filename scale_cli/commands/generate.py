"""The verb `scale generate`: continue prompts, or let a base write texts for replay."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from itertools import cycle, islice
from pathlib import Path

import typer

from scale_cli.config.schema import Head, RunConfig
from scale_cli.data.conversations import Messages
from scale_cli.errors import ConfigError
from scale_cli.evaluation.around_generate import TokensWritten
from scale_cli.evaluation.scoring import tokens_bar
from scale_cli.generation.generator import (
    Continuation,
    Generator,
    Sampling,
    TextStreamer,
)
from scale_cli.report import percent
from scale_cli.runs.folder import check_folder
from scale_cli.runs.precision import with_precision
from scale_cli.storage.atomic import write_text
from scale_cli.terminal import log, printable
from scale_cli.values import counted

_AT_ONCE = 32
_RULE = "-" * 8  # between the texts of several prompts
_SEEDS_APART = 1_000_003


def generate(
    path: Path,
    prompts: list[str] | None,
    sampling: Sampling,
    *,
    chat: bool,
    as_json: bool,
    show_heads: bool,
    head: Head | None,
    base: str | None,
) -> None:
    """Continue prompts, or lines of standard input; print the heads' shares on standard error.

    A single prompt is printed token by token. In a chat, each prompt is the first turn of a
    conversation; at a terminal without prompts, the user types the turns.
    """
    if chat and not prompts and not as_json and sys.stdin is not None and sys.stdin.isatty():
        _converse(Generator(path, head, base), sampling, show_heads=show_heads)
        return
    lines = sys.stdin or ()  # None if closed
    prompts = prompts or [line.rstrip("\r\n") for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(
            "--prompt: no prompt given, and standard input is empty; add --prompt TEXT"
        )
    generator = Generator(path, head, base)
    asked = [[{"role": "user", "content": prompt}] for prompt in prompts] if chat else prompts
    room = min(generator.num_positions - len(generator.prompt_ids(each)) for each in asked)
    if room < sampling.max_new_tokens:
        typer.echo(
            f"the model's context of {generator.num_positions:,} tokens leaves {room:,} to write",
            err=True,
        )
    streams = len(prompts) == 1 and not as_json and not show_heads
    with tokens_bar(len(prompts) * sampling.max_new_tokens, None if streams else "writing") as bar:
        already = "" if chat else prompts[0]
        streamer = TextStreamer(already, generator) if streams else TokensWritten(bar)
        continuations = []
        for first in range(0, len(asked), _AT_ONCE):
            # Each batch draws by a seed of its own; the first by the one that was given.
            seed = (sampling.seed + _SEEDS_APART * (first // _AT_ONCE)) % 2**32
            batch = asked[first : first + _AT_ONCE]
            continuations += generator.continue_all(batch, replace(sampling, seed=seed), streamer)
    if as_json:
        for continuation in continuations:
            typer.echo(json.dumps(asdict(continuation), ensure_ascii=False))
        return
    if not streams:
        texts = [
            printable(c.prompt + "\n" * chat + (_with_heads(c) if show_heads else c.completion))
            for c in continuations
        ]
        typer.echo(f"\n{_RULE}\n".join(texts))
    if show_heads and not generator.head_names:
        typer.echo(
            "--show-heads: one head alone generates, so there are no heads to show", err=True
        )
    for continuation in continuations:
        shares = [token.shares for token in continuation.tokens if token.shares is not None]
        if shares:
            mean = {name: sum(share[name] for share in shares) / len(shares) for name in shares[0]}
            each = ", ".join(f"{name} {percent(share)}" for name, share in mean.items())
            typer.echo(f"shares of the heads in {counted(len(shares), 'token')}: {each}", err=True)
        elif not continuation.tokens:
            typer.echo(
                f"nothing was written after {continuation.prompt!r}: "
                "the model ended the text at once",
                err=True,
            )


def _converse(generator: Generator, sampling: Sampling, *, show_heads: bool) -> None:
    """Answer each typed line until Ctrl-D, token by token, or whole with the heads' names."""
    messages: Messages = []
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        streamer = None if show_heads else TextStreamer("", generator)
        (answer,) = generator.continue_all([messages], sampling, streamer)
        if show_heads:
            typer.echo(printable(_with_heads(answer)))
        messages.append({"role": "assistant", "content": answer.completion})


def _with_heads(continuation: Continuation) -> str:
    """Return a continuation with a head's name wherever another one takes the largest share."""
    said = ""
    speaking = ""
    for token in continuation.tokens:
        shares = token.shares or {"": 1.0}
        head = max(shares, key=shares.__getitem__)
        if token.text and head != speaking:
            said += f"[{head}]"
            speaking = head
        said += token.text
    return said


def write_samples(
    config: RunConfig, num_samples: int, file: Path, prompts: list[str], sampling: Sampling
) -> None:
    """Sample texts from a run's base, and write them as a corpus of JSON objects with a `text`.

    Texts begin with the prompts in turn; an empty prompt gives no beginning. Each batch has its own
    seed. The same base, seed and sizes give the same texts on the same machine.
    """
    if file.suffix != ".jsonl":
        raise ConfigError(
            f"--output {file}: must end in .jsonl, so that it can be read as a source"
        )
    if os.path.lexists(file):
        raise ConfigError(f"--output {file}: already exists; give a new file")
    check_folder("--output", file.parent)
    generator = Generator(with_precision(config).model)
    begun = list(islice(cycle(prompts), num_samples))
    texts: list[str] = []
    with tokens_bar(num_samples * sampling.max_new_tokens, "writing") as bar:
        for first in range(0, num_samples, _AT_ONCE):
            batch = begun[first : first + _AT_ONCE]
            # A CPU's generator takes no larger seed.
            of_batch = (sampling.seed * _SEEDS_APART + first // _AT_ONCE) % 2**32
            drawn = replace(sampling, seed=of_batch)
            written = generator.continue_all(batch, drawn, TokensWritten(bar))
            texts += [one.prompt + one.completion for one in written]
    texts = [text for text in texts if text.strip()]
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
    write_text(file, "".join(lines))
    log(f"written        {file}: {counted(len(texts), 'text')}")
    log(f"a source       {{name: replay, path: {file}, language: ..., weight: 0.1, role: replay}}")
