"""The tokenizer of a base: where it lies, and that it is the one that was recorded.

`scale init` needs it without the code of any model, which base.py imports.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from scale_cli.config.schema import ModelConfig
from scale_cli.data.tokens import tokenizer_sha256
from scale_cli.errors import BaseModelError, ChangedBaseError, one_line
from scale_cli.upscale.base_files import REMEDY, BaseRecord
from scale_cli.vocabulary.growing import SENTENCEPIECE
from scale_cli.vocabulary.tokenizer import open_tokenizer


@dataclass(frozen=True)
class TokenizerPlace:
    """Where a tokenizer lies."""

    key: str  # the config key that names it
    name: str  # hub id or folder
    revision: str | None  # on the hub


def tokenizer_place(model: ModelConfig) -> TokenizerPlace:
    """Return where a base's tokenizer lies."""
    if model.tokenizer is not None:
        return TokenizerPlace("model.tokenizer", model.tokenizer, None)
    return TokenizerPlace("model.base", model.base, model.revision)


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer: the one that the config names, or the base's own."""
    place = tokenizer_place(model)
    try:
        return open_tokenizer(place.name, place.revision)
    except BaseModelError:
        raise
    except Exception as error:  # a damaged folder may raise anything
        reason = one_line(error)
        folder = Path(place.name)
        if (folder / SENTENCEPIECE).is_file() and not (folder / "tokenizer.json").is_file():
            reason = (
                f"it has only a SentencePiece model ({SENTENCEPIECE}) and no tokenizer.json; transformers writes one "
                "(AutoTokenizer.from_pretrained, then save_pretrained) where the package sentencepiece is installed"
            )
        raise BaseModelError(
            f"{place.key}: the tokenizer of {place.name} cannot be loaded; set model.tokenizer to a folder or hub id "
            f"that has one: {reason}"
        ) from None


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, record: BaseRecord) -> None:
    now = tokenizer_sha256(tokenizer)
    if record.tokenizer_sha256 and now != record.tokenizer_sha256:
        raise ChangedBaseError(
            f"model.base: the tokenizer of {tokenizer.name_or_path} is not the one that `scale upscale` used (SHA-256 "
            f"{record.tokenizer_sha256[:12]} -> {now[:12]}); {REMEDY}"
        )
