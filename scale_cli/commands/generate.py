"""The verb `scale generate`: continue prompts, or with --samples let a base write texts for replay."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, groupby, islice
from pathlib import Path

import typer

from scale_cli.config.schema import ModelConfig
from scale_cli.data.documents import Messages
from scale_cli.errors import ConfigError
from scale_cli.generation.generator import Continuation, Generator, Sampling, SpokenToken, TextStreamer
from scale_cli.report.tables import percent
from scale_cli.storage.atomic import write_text
from scale_cli.storage.layout import check_folder
from scale_cli.terminal import printable, progress_bar

_AT_ONCE = 32
_RULE = "-" * 8  # between the texts of several prompts
_SEEDS_APART = 1_000_003
# Of the base head, of the trained one or the first member, and of further members, in turn.
_COLOURS, _PLAIN = ("\x1b[34m", "\x1b[33m", "\x1b[32m", "\x1b[35m", "\x1b[36m", "\x1b[31m"), "\x1b[0m"


def continue_and_print(
    generator: Generator, prompts: list[str], sampling: Sampling, *, as_json: bool, show_heads: bool, chat: bool = False
) -> None:
    """Continue prompts and print them: one alone as it comes; how much each head spoke on standard error.

    In a chat each prompt is the first turn of a conversation.
    """
    if show_heads and not as_json:
        typer.echo(legend(generator.head_names()), err=True)
    asked = [[_turn("user", prompt)] for prompt in prompts] if chat else prompts
    streams = len(prompts) == 1 and not as_json and not show_heads and "num_beams" not in sampling.options
    streamer = TextStreamer("" if chat else prompts[0], generator) if streams else None
    continuations = generator.continue_all(asked, sampling, streamer)
    if as_json:
        for continuation in continuations:
            typer.echo(json.dumps(asdict(continuation), ensure_ascii=False))
        return
    if not streams:
        texts = [
            f"{printable(c.prompt)}{spoken_text(c) if show_heads else printable(c.completion)}" for c in continuations
        ]
        typer.echo(f"\n{_RULE}\n".join(texts))
    shares = [token.shares for c in continuations for token in c.tokens if token.shares is not None]
    if shares:
        mean = {name: sum(share[name] for share in shares) / len(shares) for name in shares[0]}
        each = ", ".join(f"{name} {percent(share)}" for name, share in mean.items())
        typer.echo(f"spoken by {each} of {len(shares):,} tokens", err=True)


def converse(generator: Generator, lines: Iterable[str], sampling: Sampling, *, show_heads: bool) -> None:
    """Answer line after line of one conversation: as the answers come, or with their heads."""
    messages: Messages = []
    if show_heads:
        typer.echo(legend(generator.head_names()), err=True)
    for line in lines:
        messages.append(_turn("user", line))
        streamer = None if show_heads or "num_beams" in sampling.options else TextStreamer("", generator)
        (answer,) = generator.continue_all([messages], sampling, streamer)
        if streamer is None:
            typer.echo(spoken_text(answer) if show_heads else printable(answer.completion))
        messages.append(_turn("assistant", answer.completion))


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _has_colours() -> bool:
    """Return whether who reads the text sees colours: there is a terminal, and no NO_COLOR (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _show_head(text: str, names: Sequence[str], head: int) -> str:
    """Return a text with its head: in the head's colour, or after its name where nothing shows colours."""
    if not _has_colours():
        return f"[{printable(names[head])}]{printable(text)}"
    colour = _COLOURS[head] if head < len(_COLOURS) else _COLOURS[1 + (head - 1) % (len(_COLOURS) - 1)]
    return f"{colour}{printable(text)}{_PLAIN}"


def legend(names: Sequence[str]) -> str:
    """Return how to read a text whose heads are shown."""
    if not names:
        return "one head speaks alone: there are no heads to show"
    if _has_colours():
        return f"heads: {', '.join(_show_head(name, names, head) for head, name in enumerate(names))}"
    return f"heads: {', '.join(f'[{printable(name)}]' for name in names)}, each where it takes over"


def spoken_text(continuation: Continuation) -> str:
    """Return a continuation in which every token shows the head that had the largest share in it."""
    if not continuation.tokens or continuation.tokens[0].shares is None:
        return printable(continuation.completion)
    names = list(continuation.tokens[0].shares)

    def head_of(token: SpokenToken) -> int:
        shares = list((token.shares or {}).values())
        return shares.index(max(shares))

    spoken = groupby((token for token in continuation.tokens if token.text), head_of)
    return "".join(_show_head("".join(token.text for token in tokens), names, head) for head, tokens in spoken)


@dataclass(frozen=True)
class SamplesSummary:
    """What was written, for the terminal."""

    file: Path
    num_texts: int  # without those that ended at once

    def lines(self) -> list[str]:
        """Return aligned lines, and how to train on the file."""
        return [
            f"written        {self.file}: {self.num_texts:,} texts",
            f"a source       {{name: replay, path: {self.file}, language: ..., weight: 0.1, role: replay}}",
        ]


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
    return SamplesSummary(file, len(texts))
