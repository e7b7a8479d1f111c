"""A model's tokenizer: where it comes from, what is missing there, and whether it is the one that was recorded."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from scale_cli.config.load import load_config
from scale_cli.config.schema import ModelConfig
from scale_cli.data.tokens import tokenizer_sha256
from scale_cli.errors import BaseModelError, ChangedBaseError
from scale_cli.storage.records import BaseRecord
from scale_cli.upscale.base import REMEDY, one_line, stage_folder
from scale_cli.vocabulary.extension import SENTENCEPIECE
from scale_cli.vocabulary.tokenizer import load_grown

# Any of these is the beginning of a tokenizer; the first alone needs nothing else.
_WHOLE = "tokenizer.json"
_OTHERS = ("vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json")


@dataclass(frozen=True)
class TokenizerPlace:
    """Where a tokenizer lies."""

    key: str  # of the config, that says so
    name: str  # hub id or folder
    revision: str | None  # on the hub
    of_run: bool = False  # whether a run with new tokens has it

    def problem(self) -> str | None:
        """Return what keeps any tokenizer from being loaded from there; None where it is nothing that is known."""
        if self.file(_WHOLE):
            return None
        if self.file(SENTENCEPIECE):
            needed = "it is a SentencePiece model (tokenizer.model), and the package sentencepiece is not installed"
            return None if find_spec("sentencepiece") else needed
        if any(self.file(name) for name in _OTHERS):
            return None
        return "there is none (no tokenizer.json, no tokenizer.model); say in model.tokenizer where it is"

    def file(self, name: str) -> Path | None:
        """Return one of its files; None where it has none of that name."""
        with suppress(OSError, ValueError):  # no such folder or repository
            found = cached_file(self.name, name, revision=self.revision)
            return None if found is None else Path(found)
        return None


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer: the one that the config names, or the base's own."""
    place = tokenizer_place(model)
    try:
        if place.of_run:
            return load_grown(Path(place.name))
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            place.name, revision=place.revision, trust_remote_code=False
        )
    except Exception as error:  # of a damaged folder it may say anything
        reason = place.problem() or one_line(error)
        raise BaseModelError(f"{place.key}: the tokenizer of {place.name} cannot be loaded: {reason}") from None
    return tokenizer


def tokenizer_place(model: ModelConfig) -> TokenizerPlace:
    """Return where a model's tokenizer lies; of a widened base without new tokens, that of what it stands on."""
    while model.tokenizer is None and (folder := stage_folder(model)) is not None:
        config = load_config(folder / "scale.yaml")
        if config.method.vocabulary is not None:
            return TokenizerPlace("model.base", str(folder), None, of_run=True)
        model = config.model
    if model.tokenizer is not None:
        return TokenizerPlace("model.tokenizer", model.tokenizer, None)
    return TokenizerPlace("model.base", model.base, model.revision)


def check_tokenizer_fits(tokenizer: PreTrainedTokenizerBase, model: ModelConfig, vocab_size: int) -> None:
    """Check that a base has an embedding for every id of a tokenizer."""
    if len(tokenizer) > vocab_size:
        place = tokenizer_place(model)
        raise BaseModelError(
            f"{place.key}: the tokenizer of {place.name} has {len(tokenizer):,} ids, "
            f"the base's embedding {vocab_size:,}"
        )


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, record: BaseRecord) -> None:
    """Check that a tokenizer is the one that was recorded; ChangedBaseError where it is another."""
    now = tokenizer_sha256(tokenizer)
    if record.tokenizer_sha256 and now != record.tokenizer_sha256:
        raise ChangedBaseError(
            f"model.base: the tokenizer of {tokenizer.name_or_path} is not the one at `scale upscale` (SHA-256 "
            f"{record.tokenizer_sha256[:12]} -> {now[:12]}); {REMEDY}"
        )
