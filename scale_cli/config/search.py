"""How much `train.lr: auto` reads to find a rate (training/rate_search.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scale_cli.config.training import TrainConfig

# Of a run's work, what the search may take; of a small model's, whose run takes seconds, these FLOPs.
_SHARE = 0.05
_SMALL_FLOPS = 2.0e12
_FLOPS_PER_PARAMETER = 6.0  # of training on a token
# A sequence is read once for the first update's gradient, and as many others once for each of some ten
# rates. To read is a third of full fine-tuning's work, and half of LoRA's, which asks for few gradients.
_READING = 0.5
_NUM_RATES = 10
MOST_BRANCHES = 4
_UPDATES_OF_A_BRANCH = 4
# By the updates of a branch, the fewest sequences of each. A gradient of fewer than four is mostly noise where
# a base knows the text, and branches of smaller batches than the run's find lower rates (docs/results/rates.md).
_FEWEST = 4
_LEAST_SEQUENCES = {_UPDATES_OF_A_BRANCH: 8, 0: _FEWEST}


@dataclass(frozen=True)
class SearchSize:
    """How much is read for an update, and how long branches are."""

    num_sequences: int  # that give an update's gradient; as many others judge
    num_updates: int  # of each branch; 0: no branches

    @property
    def work(self) -> float:
        """The most that the search takes, in sequences that are trained on."""
        line = 1 + _NUM_RATES * _READING
        branches = MOST_BRANCHES * (self.num_updates + _READING) if self.num_updates else 0.0
        return self.num_sequences * (line + branches)


def search_size(
    train: TrainConfig, *, sequence_length: int, num_parameters: int, num_processes: int = 1
) -> SearchSize:
    """Return what the search of a run reads; branches only where eight sequences an update, or the run's own batch,
    are affordable.

    Args:
        train: of the run.
        sequence_length: tokens of a sequence.
        num_parameters: of the model that trains, frozen ones included.
        num_processes: each reads as many sequences.
    """
    of_run = _SHARE * train.max_steps * train.global_batch_size
    of_small = _SMALL_FLOPS / (_FLOPS_PER_PARAMETER * num_parameters * sequence_length)
    batch = max(_FEWEST, train.global_batch_size)
    for num_updates, fewest in _LEAST_SEQUENCES.items():
        least = math.ceil(min(batch, fewest) / num_processes)
        of_one = SearchSize(num_processes, num_updates).work
        in_each = int(max(of_run, of_small) / of_one)
        if in_each >= least:
            break
    most = math.ceil(batch / num_processes)
    return SearchSize(num_processes * min(most, max(least, in_each)), num_updates)
