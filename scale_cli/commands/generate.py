"""The verb `scale generate`: continue prompts, or with --samples let a base write texts for replay."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import typer

from scale_cli.config.schema import ModelConfig
from scale_cli.data.conversations import Messages
from scale_cli.errors import ConfigError
from scale_cli.generation.generator import Continuation, Generator, Sampling, parsed_options
from scale_cli.generation.streaming import Speakers
from scale_cli.printable import printable
from scale_cli.progress import progress_bar
from scale_cli.report.numbers import percent
from scale_cli.storage.atomic import write_text
from scale_cli.storage.layout import check_folder

_AT_ONCE = 32
_RULE = "-" * 8  # between the texts of several prompts
_SEEDS_APART = 1_000_003


@dataclass(frozen=True)
class SamplesSummary:
    """What was written, for the terminal."""

    file: Path
    num_samples: int
    num_texts: int

    def lines(self) -> list[str]:
        """Return aligned lines, and how to train on the file."""
        empty = self.num_samples - self.num_texts
        left_out = f"; {empty:,} that ended at once are left out" if empty else ""
        return [
            f"written        {self.file}: {self.num_texts:,} texts{left_out}",
            f"a source       {{name: replay, path: {self.file}, language: ..., weight: 0.1, role: replay}}",
        ]


def sampling(
    max_new_tokens: int, temperature: float | None, usual: float, top_p: float, seed: int, options: list[str] | None
) -> Sampling:
    """Return how tokens are chosen, by what the command line gave; at the usual temperature if it gave none."""
    further = parsed_options(options or [])
    return Sampling(max_new_tokens, usual if temperature is None else temperature, top_p, seed, further)


def continue_and_print(
    generator: Generator, prompts: list[str], sampling: Sampling, *, as_json: bool, show_heads: bool, chat: bool = False
) -> None:
    """Continue prompts and print them: one alone as it comes, what was measured of them on standard error.

    In a chat each prompt is the first turn of a conversation.
    """
    if show_heads and not as_json:
        typer.echo(Speakers(generator.head_names()).legend(), err=True)
    streams = len(prompts) == 1 and not as_json and "num_beams" not in sampling.options
    asked = [[_said_by("user", prompt)] for prompt in prompts] if chat else prompts
    streamer = generator.streamer("" if chat else prompts[0], show_heads=show_heads) if streams else None
    continuations = generator.continue_all(asked, sampling, streamer)
    if streamer is None:
        for line in output_lines(continuations, as_json=as_json, show_heads=show_heads):
            typer.echo(line)  # coloured, where that was asked for
    if not as_json:
        for line in summary(continuations):
            typer.echo(line, err=True)


def converse(generator: Generator, lines: Iterable[str], sampling: Sampling, *, show_heads: bool) -> None:
    """Answer line after line of one conversation, as the answers come."""
    messages: Messages = []
    if show_heads:
        typer.echo(Speakers(generator.head_names()).legend(), err=True)
    for line in lines:
        messages.append(_said_by("user", line))
        streamer = generator.streamer("", show_heads=show_heads)
        (answer,) = generator.continue_all([messages], sampling, streamer)
        if streamer is None:
            typer.echo(_with_heads(answer))
        messages.append(_said_by("assistant", answer.completion))


def _said_by(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def write_samples(
    base: ModelConfig, num_samples: int, file: Path, sampling: Sampling, prompts: list[str]
) -> SamplesSummary:
    """Let a base, widened already or not, write texts, and write them as a corpus: one object with its `text` a line.

    Texts begin with the prompts in turn; an empty one leaves it to the base. Every batch has a seed of its own, and the
    same base, seed and sizes give the same texts on the same machine.
    """
    if file.suffix != ".jsonl":
        raise ConfigError(f"--output {file}: is read as a source only if it is named .jsonl")
    if os.path.lexists(file):
        raise ConfigError(f"--output {file}: is there already; give a new file")
    check_folder("--output", file.parent)
    generator = Generator(base)
    rows = islice(cycle(prompts), num_samples)
    texts: list[str] = []
    with progress_bar(total=num_samples, desc="writing", unit=" texts") as bar:
        for number, batch in enumerate(iter(lambda: list(islice(rows, _AT_ONCE)), [])):
            seed = (sampling.seed * _SEEDS_APART + number) % 2**32  # a CPU's generator takes no more of it
            drawn = generator.continue_all(batch, replace(sampling, seed=seed))
            texts += [text for written in drawn if (text := written.prompt + written.completion).strip()]
            bar.update(len(batch))
    write_text(file, "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))
    return SamplesSummary(file, num_samples, len(texts))


def output_lines(continuations: list[Continuation], *, as_json: bool, show_heads: bool) -> list[str]:
    """Return what goes to standard output, one object a line or one text a prompt, with a rule between texts."""
    if as_json:
        return [json.dumps(asdict(continuation), ensure_ascii=False) for continuation in continuations]
    texts = [f"{printable(c.prompt)}{_with_heads(c) if show_heads else printable(c.completion)}" for c in continuations]
    return [line for text in texts for line in (_RULE, text)][1:]


def summary(continuations: list[Continuation]) -> list[str]:
    """Return how many tokens each head gave."""
    shares = [token.shares for c in continuations for token in c.tokens if token.shares is not None]
    if not shares:
        return []
    mean = {name: sum(share[name] for share in shares) / len(shares) for name in shares[0]}
    if len(mean) == 2:
        return [f"base head spoke {percent(mean['base'])} of {len(shares):,} tokens"]
    each = ", ".join(f"{name} {percent(share)}" for name, share in mean.items())
    return [f"spoken by {each} of {len(shares):,} tokens"]


def _with_heads(continuation: Continuation) -> str:
    """Return a continuation with every token shown to be of the head that had the largest share in it."""
    first = continuation.tokens[0].shares if continuation.tokens else None
    if first is None:
        return printable(continuation.completion)
    speakers, names = Speakers(list(first)), list(first)
    return "".join(
        speakers.shown(token.text, names.index(max(token.shares, key=token.shares.__getitem__)))
        for token in continuation.tokens
        if token.shares is not None
    )
