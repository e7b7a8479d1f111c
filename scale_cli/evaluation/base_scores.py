"""What a base gives each token of a text: computed once, and kept beside the tokenised text.

Beside a tokenised corpus NAME, the folder NAME.base-KEY holds log_probs.bin: float32 nats of every
token that can be scored, one document after another, NaN where nobody has asked yet. KEY hashes
what decides them: the base's content, and how it is run. Every run on that base reads them, and
its evaluations while it trains too.

Only a base that is a model of its own is kept. A widened model computes its base anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scale_cli.config.schema import RunConfig
from scale_cli.data.encoding import Integers
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.errors import ScaleError, StorageError
from scale_cli.processes import device, is_main
from scale_cli.storage.atomic import json_sha256, new_folder, verify_folder, writing
from scale_cli.upscale.base_files import BaseRecord

_FILE = "log_probs.bin"
_FORMAT_VERSION = 2  # 1 had the least float32 in place of minus infinity


@dataclass
class BaseScores:
    """A base's log-probabilities of the tokens of a corpus, as far as they are known."""

    folder: Path
    lengths_N: Integers  # tokens of each document that can be scored
    _grown: bool = field(default=False, init=False)

    @classmethod
    def of(
        cls,
        corpus: TokenisedCorpus,
        lengths_N: Integers,
        base: BaseRecord,
        config: RunConfig,
        context: int,
    ) -> BaseScores:
        """Open what is kept of a corpus, for passes of a context in a config's precision."""
        decided_by = {
            "base": [base.content_sha256, base.config_sha256],
            "dtype": config.model.dtype,
            "quantisation": config.model.quantisation,
            "mixed_precision": config.evaluation.mixed_precision,
            "device": device().type,
            "context": context,
            "format": _FORMAT_VERSION,
        }
        name = f"{corpus.name}.base-{json_sha256(decided_by)[:16]}"
        return cls(corpus.folder.with_name(name), lengths_N)

    @cached_property
    def _of_documents(self) -> tuple[Tensor, ...]:
        """Views of `_log_probs`, one for each document."""
        return torch.from_numpy(self._log_probs).split(self.lengths_N.tolist())

    @cached_property
    def _log_probs(self) -> npt.NDArray[np.float32]:
        """All tokens', (tokens,); what is damaged or cannot be read counts as not known."""
        num_tokens = int(self.lengths_N.sum())
        try:
            verify_folder(self.folder)
            kept = np.fromfile(self.folder / _FILE, np.float32)
        except (StorageError, OSError):
            return np.full(num_tokens, np.nan, np.float32)
        assert len(kept) == num_tokens, "the name hashes the text"
        return kept

    def of_document(self, document: int, length: int) -> Tensor:
        """Return what is known of the first `length` tokens of a document; NaN: not known."""
        return self._of_documents[document][:length]

    def keep(self, document: int, log_probs_T: Tensor) -> None:
        """Remember a document's first tokens; one that is not finite is minus infinity, not NaN."""
        infinite = {"nan": -torch.inf, "neginf": -torch.inf, "posinf": torch.inf}
        known = log_probs_T.float().nan_to_num(**infinite)
        self.of_document(document, len(known)).copy_(known)
        self._grown = True

    def save(self) -> None:
        """Write what has been learnt since; without room or a right to write, it is only not kept."""
        if not self._grown or not is_main():
            return
        try:
            with new_folder(self.folder) as partial, writing(partial):
                self._log_probs.tofile(partial / _FILE)
        except ScaleError:  # another run may be writing the same
            return
        self._grown = False
