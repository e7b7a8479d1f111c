"""The estimate of a run counts the held-out tokens that its evaluations read."""

from pathlib import Path
from typing import Any

import pytest

from scale_cli.data.corpora import open_sources
from scale_cli.evaluation.scoring import beginnings, scored_lengths
from scale_cli.planning.beginnings import held_out_texts, tokenizer_at_hand
from scale_cli.planning.estimate import count_evaluated
from scale_cli.runs.opened import Run
from tests.small_runs import held_out, small_run


@pytest.mark.parametrize(
    "keys",
    [{}, {"max_documents": 7}, {"skip_documents": 20}, {"skip_documents": 3, "max_documents": 400}],
)
@pytest.mark.parametrize("max_tokens", [None, 300])
def test_evaluations_are_counted_as_they_read(
    keys: dict[str, Any], max_tokens: int | None, shared_data: Path, tmp_path: Path
) -> None:
    train: dict[str, Any] = {"max_steps": 10, "eval_every_steps": 3, "eval_max_tokens": max_tokens}
    text = shared_data / "ko-petitions/valid.txt.xz"
    config = small_run(
        tmp_path,
        shared_data / "ckpt-eltec/hf",
        train=train,
        corpus={"sequence_length": 128},
        evaluation={"perplexity": [held_out("a", text, **keys), held_out("b", text)]},
    )
    (length, num_texts) = (128, 2)
    corpora = open_sources(config, config.evaluation.perplexity, Run(config).tokenizer)
    of_each = config.eval_tokens // num_texts
    read = sum(int(scored_lengths(corpus).sum()) for corpus in corpora)
    read += 3 * sum(int(beginnings(corpus, length, of_each).sum()) for corpus in corpora)
    texts = held_out_texts(config, tokenizer_at_hand(config.model))
    assert count_evaluated(config, texts) == pytest.approx(read, rel=0.1)
