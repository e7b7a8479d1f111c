"""Text as it is generated: what each token adds, printed as it comes, in the colour of the head that spoke."""

from __future__ import annotations

from collections.abc import Callable

import typer
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase, TextStreamer
from transformers.generation.streamers import BaseStreamer

from scale_cli.printable import printable

# Of the base head, of the trained one or the first member, and of further members, in turn.
_COLOURS, _PLAIN = ("\x1b[34m", "\x1b[33m", "\x1b[32m", "\x1b[35m", "\x1b[36m", "\x1b[31m"), "\x1b[0m"


def painted(text: str, head: int) -> str:
    """Return a text in a head's colour, safe to print."""
    return f"{_colour(head)}{printable(text)}{_PLAIN}" if text else ""


def _colour(head: int) -> str:
    return _COLOURS[head if head < len(_COLOURS) else 1 + (head - 1) % (len(_COLOURS) - 1)]


class Decoder:
    """Tells token by token what text each adds.

    A token alone may be decoded without its space, or be half a character, which is held back until it is whole: what a
    token adds to the text before it, of which the prompt's last token is enough, is what it says.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, last_of_prompt: int) -> None:
        self._tokenizer, self._ids = tokenizer, [last_of_prompt]
        self._num_given = len(self._text())

    def added(self, token: int) -> str:
        """Return what has become certain with one more token."""
        self._ids.append(token)
        return self._rest_of(self._text().rstrip("\ufffd"))

    def rest(self) -> str:
        """Return what was held back."""
        return self._rest_of(self._text())

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._ids))

    def _rest_of(self, text: str) -> str:
        added = text[self._num_given :]
        self._num_given += len(added)
        return added


class PrintableStreamer(TextStreamer):
    """Prints the text as it comes, but none of the control characters that a model may say."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print what has become certain."""
        super().on_finalized_text(printable(text), stream_end)


class HeadStreamer(BaseStreamer):
    """Prints a prompt, and every token as it comes in the colour of the head that had the largest share in it.

    Args:
        prompt: as text.
        tokenizer: decodes.
        ends: tokens that are not printed.
        cache: of the generation, where the router leaves the weights that the next token is given.
        weights: returns those (K, B), as logarithms.
    """

    def __init__(
        self,
        prompt: str,
        tokenizer: PreTrainedTokenizerBase,
        ends: list[int],
        cache: DynamicCache,
        weights: Callable[[], Tensor],
    ) -> None:
        self.cache, self._weights = cache, weights
        self._prompt, self._tokenizer, self._ends = prompt, tokenizer, ends
        self._decoder: Decoder | None = None
        self._head = 0

    def put(self, value: Tensor) -> None:
        """Take the prompt's ids (1, T) first, then one token at a time."""
        if self._decoder is None:
            self._decoder = Decoder(self._tokenizer, int(value[0, -1]))
            typer.echo(printable(self._prompt), nl=False)
        elif int(value) not in self._ends:
            self._head = int(self._weights()[:, 0].argmax())
            self._print(self._decoder.added(int(value)))

    def end(self) -> None:
        """Print what was held back, and end the line."""
        assert self._decoder is not None, "the prompt comes first"
        self._print(self._decoder.rest())
        typer.echo()

    def _print(self, text: str) -> None:
        typer.echo(painted(text, self._head), nl=False)  # without colours where nobody looks
