"""The tokenizer of joined runs: the base's with the new tokens of every run, each set for its own
script.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from scale_cli.config.schema import RunConfig
from scale_cli.config.vocabulary import Script
from scale_cli.errors import RunFolderError
from scale_cli.vocabulary.added_tokens import extended, new_tokens
from scale_cli.vocabulary.checks import check_union
from scale_cli.vocabulary.tokenizer import load_grown, read_texts, write_grown

_BYTES_COMPARED = 1 << 20  # of every held-out corpus: its ids must be the same as in each run alone


@dataclass(frozen=True)
class RunTokens:
    """The tokens of one run."""

    run: Path  # as it was given
    config: RunConfig
    base_tokenizer: PreTrainedTokenizerBase
    tokenizer: PreTrainedTokenizerBase  # the run's own; the base's if it has no new tokens

    @property
    def script(self) -> Script:
        """The script of the new tokens; empty if there are none."""
        vocabulary = self.config.method.vocabulary
        return Script(()) if vocabulary is None else Script.named(vocabulary.script)


def joined_tokenizer(runs: Sequence[RunTokens], first_id: int) -> PreTrainedTokenizerBase:
    """Return a tokenizer with the tokens of all runs, the first run's first; new ones have ids from
    `first_id` on.

    Every text must be tokenised as by the run that has its script. RunFolderError: two runs have
    different tokens for one script.
    """
    distinct: dict[str, RunTokens] = {}  # by the tokenizer in JSON
    for tokens in runs:
        described = tokens.tokenizer.backend_tokenizer.to_str()
        if not tokens.script.ranges or described in distinct:
            continue
        for other in distinct.values():
            if tokens.script.meets(other.script):
                raise RunFolderError(
                    f"{tokens.run} and {other.run} add different tokens for the same script, so "
                    "they tokenise its text differently; train one of them with "
                    "method.vocabulary.folder set to the final/ of the other"
                )
        distinct[described] = tokens
    if len(distinct) <= 1:
        return next(iter(distinct.values()), runs[0]).tokenizer

    parts = [(tokens.tokenizer.backend_tokenizer, tokens.script) for tokens in distinct.values()]
    united = parts[0][0]
    for backend, _ in parts[1:]:
        united = extended(united, new_tokens(backend, first_id), united.get_vocab_size())
    texts = [
        text
        for run in runs
        for text in read_texts(run.config.evaluation.perplexity, run.config.corpus, _BYTES_COMPARED)
    ]
    check_union(parts, united, first_id, texts)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        write_grown(Path(folder), next(iter(distinct.values())).tokenizer, united)
        return load_grown(Path(folder))
