"""A run's new tokens: the text that they are learned on, their tokenizer in the run's folders, and
the proof.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import CorpusSource, TextSource
from scale_cli.config.vocabulary import Script
from scale_cli.runs.folder import RunFolder
from scale_cli.vocabulary.checks import check_grown_tokenizer
from scale_cli.vocabulary.tokenizer import TOKENIZER_FILES, read_texts

# Per source that new tokens are learned on: text that must survive encoding and decoding.
_BYTES_RETURNED = 1 << 22


def learned_on(config: RunConfig) -> list[CorpusSource]:
    """Return the sources that new tokens are learned on."""
    assert config.method.vocabulary is not None
    named = config.method.vocabulary.sources
    if not named:
        return config.corpus.new
    return [source for source in config.corpus.sources if source.name in named]


def copy_grown_tokenizer(config: RunConfig, folder: Path) -> None:
    if config.method.vocabulary is not None:
        for name in TOKENIZER_FILES:
            if (file := RunFolder(config.output_dir).upscaled / name).is_file():
                shutil.copyfile(file, folder / name)


def prove_vocabulary(
    config: RunConfig, base: PreTrainedTokenizerBase, grown: PreTrainedTokenizerBase
) -> int:
    """Return how many texts were compared; PreservationError if new tokens change other text."""
    assert config.method.vocabulary is not None
    kept: list[TextSource] = [
        source for source in config.evaluation.perplexity if source.role == "retention"
    ]
    return check_grown_tokenizer(
        base.backend_tokenizer,
        grown.backend_tokenizer,
        Script.named(config.method.vocabulary.script),
        read_texts([*kept, *config.corpus.replay], config.corpus),
        list(read_texts(learned_on(config), config.corpus, _BYTES_RETURNED)),
    )
