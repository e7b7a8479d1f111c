"""Pages and cards from templates, in which a value is text: markup in a name of a run or a file stays text."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

# What Markdown, or the HTML in it, reads as more than text. A bracket alone is none of it, nor a line within a word:
# [+0.1, +0.2] and kobest_copa stay.
_SPECIAL = re.compile(r"([\\`*{}<>#|]|!(?=\[)|\](?=[(\[:])|(?<![^\W_])_|_(?![^\W_]))")


def page(template: str, **values: object) -> str:
    """Return a page of HTML."""
    return _environment(True).get_template(template).render(values)


def markdown(template: str, **values: object) -> str:
    """Return a page of Markdown."""
    return _environment(False).get_template(template).render(values)


def plain(value: Any) -> Markup:
    """Return a value as Markdown that shows it as it is; Markdown that was made here (Markup) is left alone."""
    return value if isinstance(value, Markup) else Markup(_SPECIAL.sub(r"\\\1", str(value)))


def code(text: str) -> Markup:
    """Return a text as code in Markdown."""
    return Markup(f"`{re.sub('[`|]', '', text)}`")


@cache
def _environment(html: bool) -> Environment:
    return Environment(
        loader=PackageLoader("scale_cli", "report/templates"),
        autoescape=html,
        finalize=None if html else plain,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
