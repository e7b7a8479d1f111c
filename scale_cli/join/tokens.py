"""The tokenizer of a joined model: the base's, and the new tokens of every run, each for a script of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from scale_cli.config.schema import RunConfig
from scale_cli.config.vocabulary import Script
from scale_cli.errors import RunFolderError
from scale_cli.upscale.base import stages_below
from scale_cli.upscale.run import MethodFolder
from scale_cli.upscale.tokenizer import load_tokenizer
from scale_cli.vocabulary.extension import extended, new_tokens
from scale_cli.vocabulary.proofs import check_union
from scale_cli.vocabulary.tokenizer import TOKENIZER_FILES, load_grown, read_texts, write_grown

# Of every held-out corpus: text whose ids have to be those of each run alone.
_BYTES_COMPARED = 1 << 20


@dataclass(frozen=True)
class RunTokens:
    """The tokens of one run."""

    run: Path  # as it was given
    config: RunConfig  # its own
    base_tokenizer: PreTrainedTokenizerBase  # of its plain base
    tokenizer: PreTrainedTokenizerBase  # the run's: the same where it has no new tokens
    script: Script | None = None  # of the new ones

    def has_same_tokens_as(self, other: RunTokens) -> bool:
        """Return whether two runs have the same tokens."""
        one, two = (tokens.tokenizer.backend_tokenizer.to_str() for tokens in (self, other))
        return one == two


def tokens_of(run: Path, final: MethodFolder) -> RunTokens:
    """Return the tokens of a run; of runs upon one another only the lowest can have brought any."""
    config = final.run.config
    *_, bottom = config, *(below for _, below in stages_below(config.model))
    if bottom.method.vocabulary is None:
        return RunTokens(run, config, final.tokenizer, final.tokenizer)
    script = Script.named(bottom.method.vocabulary.script)
    return RunTokens(run, config, load_tokenizer(bottom.model), final.tokenizer, script)


def joined_tokenizer(runs: Sequence[RunTokens], first_id: int) -> PreTrainedTokenizerBase:
    """Return a tokenizer with the tokens of all runs, the first run's first; new ones have ids from `first_id` on.

    Every text must be cut as by the run that has its script, so no two may have other tokens of one.
    """
    distinct: list[RunTokens] = []
    for tokens in runs:
        if tokens.script is None or any(tokens.has_same_tokens_as(other) for other in distinct):
            continue
        for other in distinct:
            if other.script is not None and tokens.script.meets(other.script):
                raise RunFolderError(
                    f"{tokens.run} and {other.run} add different tokens for one script, and cut its text differently; "
                    "train one of them with method.vocabulary.folder: the final/ of the other"
                )
        distinct.append(tokens)
    if len(distinct) <= 1:
        return next(iter(distinct), runs[0]).tokenizer
    united, *others = (tokens.tokenizer.backend_tokenizer for tokens in distinct)
    for backend in others:
        united = extended(united, new_tokens(backend, first_id), united.get_vocab_size())
    parts = [(one.tokenizer.backend_tokenizer, one.script) for one in distinct if one.script is not None]
    texts = [
        text
        for tokens in runs
        for text in read_texts(tokens.config.evaluation.perplexity, tokens.config.corpus, _BYTES_COMPARED)
    ]
    check_union(parts, united, first_id, texts, seed=0)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        write_grown(Path(folder), distinct[0].tokenizer)
        united.save(str(Path(folder) / TOKENIZER_FILES[0]))
        return load_grown(Path(folder))
