"""How the base, the trained head alone and the routed model continue the same prompts, as a picture.

    python -m scripts.three_answers BASE EXPORT --prompt TEXT [--prompt TEXT ...] --output FILE.svg

BASE is the pretrained model's folder, EXPORT a plain export of a run that routes (`scale export`). The first two models
are loaded as transformers loads any model; the third is the same export with its router.
"""

from __future__ import annotations

import argparse
import html
import textwrap
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from scale_cli.data.encoding import prompt_ids
from scale_cli.export.plain_folder import routed_class
from scale_cli.storage.atomic import write_text
from scale_cli.terminal import printable
from scale_cli.upscale.base import load_written

MODELS = ("base", "trained", "routed")
_COLOURS = {"base": "#6b7280", "trained": "#b45309", "routed": "#0063a8"}
_WORDS = {
    "base": "the base, before",
    "trained": "trained, without the router",
    "routed": "trained, with the router",
}
_NUM_TOKENS = 80
_LONGEST_REPEAT = 5  # tokens; small models go round in circles
_COLUMNS = 34  # of a card, in letters; a Hangul syllable counts as two
_LINES_SHOWN = 6
_LINE_PX = 20
_CARD_PX = 280
_GAP_PX = 20


@dataclass(frozen=True)
class Answers:
    """One prompt and what each model says after it."""

    prompt: str
    by_model: dict[str, str]  # keyed by MODELS


def three_answers(base: Path, export: Path, prompts: list[str]) -> list[Answers]:
    """Return the likeliest continuations of every prompt by the base, the trained head and the router."""
    tokenizer = AutoTokenizer.from_pretrained(export)
    models = {
        "base": AutoModelForCausalLM.from_pretrained(base),
        "trained": AutoModelForCausalLM.from_pretrained(export),
        "routed": load_written(routed_class(export), export),
    }
    return [
        Answers(
            prompt,
            {name: continuation(model.eval(), tokenizer, prompt) for name, model in models.items()},
        )
        for prompt in prompts
    ]


def continuation(model: Any, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """Return what a model says after a prompt, on one line, taking the likeliest token each time.

    No six tokens in a row are said twice.
    """
    ids = torch.tensor([prompt_ids(tokenizer, prompt)])
    said = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=_NUM_TOKENS,
        do_sample=False,
        no_repeat_ngram_size=_LONGEST_REPEAT + 1,
        pad_token_id=tokenizer.eos_token_id,
    )[0]
    before = tokenizer.decode(ids[0], skip_special_tokens=True)
    whole = tokenizer.decode(said, skip_special_tokens=True)  # a character may begin in the prompt
    said_text = str(whole)[len(before) :].rstrip("\ufffd")  # half a character at the end
    return " ".join(printable(said_text).split())


def wrap(text: str) -> list[str]:
    """Return a text in lines of a card's width; the last ends in an ellipsis where text is left out."""
    wide = "".join(f"{letter}\0" if _is_wide(letter) else letter for letter in text)
    lines = [line.replace("\0", "") for line in textwrap.wrap(wide, _COLUMNS)]
    if len(lines) > _LINES_SHOWN:
        lines = [*lines[: _LINES_SHOWN - 1], lines[_LINES_SHOWN - 1] + "…"]
    return lines


def _is_wide(letter: str) -> bool:
    return unicodedata.east_asian_width(letter) in "WF"


def draw(answers: list[Answers]) -> str:
    """Return an SVG with a row for each prompt and a card for each model."""
    width = len(MODELS) * (_CARD_PX + _GAP_PX) + _GAP_PX
    card_height = (_LINES_SHOWN + 2) * _LINE_PX
    row_height = card_height + 3 * _LINE_PX
    height = len(answers) * row_height + _GAP_PX
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, \'Noto Sans CJK KR\', sans-serif" role="img" '
        'aria-label="The same prompts continued by the base, the trained head and the router">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for row, answer in enumerate(answers):
        top = _GAP_PX + row * row_height
        parts.append(_line(_GAP_PX, top + _LINE_PX, f"“{answer.prompt}”", 17, "#111827", "bold"))
        for column, model in enumerate(MODELS):
            left = _GAP_PX + column * (_CARD_PX + _GAP_PX)
            card_top = top + 2 * _LINE_PX
            parts.append(
                f'<rect x="{left}" y="{card_top}" width="{_CARD_PX}" height="{card_height}" rx="8" '
                f'fill="#f9fafb" stroke="{_COLOURS[model]}" stroke-width="2"/>'
            )
            parts.append(
                _line(left + 14, card_top + 24, _WORDS[model], 13, _COLOURS[model], "bold")
            )
            for number, line in enumerate(wrap(answer.by_model[model])):
                y = card_top + 48 + number * _LINE_PX
                parts.append(_line(left + 14, y, line, 15, "#111827", "normal"))
    return "\n".join([*parts, "</svg>\n"])


def _line(x: float, y: float, text: str, size: int, colour: str, weight: str) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" font-weight="{weight}">'
        f"{html.escape(text)}</text>"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base", type=Path)
    parser.add_argument("export", type=Path)
    parser.add_argument("--prompt", action="append", required=True, dest="prompts")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()

    answers = three_answers(given.base, given.export, given.prompts)
    for answer in answers:
        print(answer.prompt)
        for model, said in answer.by_model.items():
            print(f"  {model:8} {said}")
    write_text(given.output, draw(answers))
    print(f"written {given.output}")


if __name__ == "__main__":
    main()
