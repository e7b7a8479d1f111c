"""Text as it is generated: what each token adds, printed as it comes, and which head spoke."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import typer
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from scale_cli.printable import printable

# Of the base head, of the trained one or the first member, and of further members, in turn.
_COLOURS, _PLAIN = ("\x1b[34m", "\x1b[33m", "\x1b[32m", "\x1b[35m", "\x1b[36m", "\x1b[31m"), "\x1b[0m"
_NO_CHARACTER = "\ufffd"  # what bytes that are no character decode to


def has_colours() -> bool:
    """Return whether who reads the text sees colours: there is a terminal, and no NO_COLOR (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


class Speakers:
    """Shows in a text which head spoke: by its colour, or where there is none by its name where it takes over."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._in_colours, self._last = list(map(printable, names)), has_colours(), -1

    def legend(self) -> str:
        """Return how to read the text."""
        shown = [self.shown(name, head) if self._in_colours else f"[{name}]" for head, name in enumerate(self._names)]
        if not shown:
            return "one head speaks alone: there are no heads to show"
        return f"heads: {', '.join(shown)}" + ("" if self._in_colours else ", each where it takes over")

    def shown(self, text: str, head: int) -> str:
        """Return what a head adds to the text before it, safe to print."""
        if not text:
            return ""
        if self._in_colours:
            colour = _COLOURS[head if head < len(_COLOURS) else 1 + (head - 1) % (len(_COLOURS) - 1)]
            return f"{colour}{printable(text)}{_PLAIN}"
        taken_over, self._last = head != self._last, head
        return f"[{self._names[head]}]{printable(text)}" if taken_over else printable(text)


class Decoder:
    """Tells token by token what text each adds: whole characters, and no special tokens.

    A token alone may be decoded without its space, so each is read with those before it, of which the prompt's last is
    enough; what is half a character is held back until it is whole.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, last_of_prompt: int) -> None:
        self._tokenizer = tokenizer
        self._given, self._held = [last_of_prompt], list[int]()

    def added(self, token: int) -> str:
        """Return what has become certain with one more token."""
        self._held.append(token)
        text = self._added_by_held()
        if not text or text.endswith(_NO_CHARACTER):
            return ""
        self._given, self._held = self._held, []
        return text.replace(_NO_CHARACTER, "")

    def rest(self) -> str:
        """Return the whole characters of what was held back."""
        return self._added_by_held().replace(_NO_CHARACTER, "")

    def _added_by_held(self) -> str:
        return self._text([*self._given, *self._held])[len(self._text(self._given)) :]

    def _text(self, ids: list[int]) -> str:
        decoded = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(decoded)


class TextStreamer(BaseStreamer):
    """Prints a prompt, and what every token adds to it as it comes."""

    def __init__(self, prompt: str, tokenizer: PreTrainedTokenizerBase, ends: list[int]) -> None:
        self._prompt, self._tokenizer, self._ends = prompt, tokenizer, ends
        self._decoder: Decoder | None = None

    def put(self, value: Tensor) -> None:
        """Take the prompt's ids (1, T) first, then one token at a time."""
        if self._decoder is None:
            self._decoder = Decoder(self._tokenizer, int(value[0, -1]))
            typer.echo(printable(self._prompt), nl=False)
        elif int(value) not in self._ends:
            self._print(self._decoder.added(int(value)))

    def end(self) -> None:
        """Print what was held back, and end the line."""
        assert self._decoder is not None, "the prompt comes first"
        self._print(self._decoder.rest())
        typer.echo()

    def _print(self, text: str) -> None:
        typer.echo(printable(text), nl=False)


class HeadStreamer(TextStreamer):
    """Prints every token with the head that had the largest share in it."""

    def __init__(
        self,
        prompt: str,
        tokenizer: PreTrainedTokenizerBase,
        ends: list[int],  # tokens that are not printed
        cache: DynamicCache,  # of the generation, where the router leaves the weights that the next token is given
        weights: Callable[[], Tensor],  # returns those (K, B), as logarithms
        names: Sequence[str],  # of the heads
    ) -> None:
        super().__init__(prompt, tokenizer, ends)
        self.cache, self._weights = cache, weights
        self._speakers = Speakers(names)
        self._head = 0

    def put(self, value: Tensor) -> None:
        """Take the prompt's ids (1, T) first, then one token at a time, after the weights that it was given by."""
        if self._decoder is not None and int(value) not in self._ends:
            self._head = int(self._weights()[:, 0].argmax())
        super().put(value)

    def _print(self, text: str) -> None:
        typer.echo(self._speakers.shown(text, self._head), nl=False)
