"""How long training waits for its checkpoints."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from transformers import AutoTokenizer

from scale_cli.config.training import TrainConfig
from scripts.from_scratch import write_base
from tests.torture.tiny_run import Runs
from tests.torture.verbs import run_verb
from tests.widening import tiny_llama

Record = Callable[[str, object], None]
_SAVED_EVERY = 10
_DEFAULT_CADENCE = TrainConfig(max_steps=1).save_every_steps


def larger(runs: Runs) -> tuple[str, ...]:
    """Return what makes a run one of a bfloat16 base of 28 M parameters, 8 sequences of 256 tokens a step."""
    base = tiny_llama(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    write_base(runs.root / "larger", base.bfloat16(), AutoTokenizer.from_pretrained(runs.inputs / "base"))
    words = random.Random(0)
    documents = [" ".join(str(words.randrange(40)) for _ in range(300)) for _ in range(300)]
    (runs.root / "longer.txt").write_text("\n\n".join(documents), encoding="utf-8")
    return (
        f"model.base={runs.root / 'larger'}",
        "model.dtype=bfloat16",
        "train.mixed_precision=bf16",
        "corpus.sequence_length=256",
        *(f"corpus.sources.{index}.path={runs.root / 'longer.txt'}" for index in (0, 1)),
        "train.global_batch_size=8",
        "train.micro_batch_size=8",
    )


def test_training_waits_for_checkpoints_less_than_a_fiftieth_of_its_time(
    runs: Runs, in_full: bool, record_property: Record
) -> None:
    """At the default cadence; measured at a fiftieth of it, so that a shorter run shows it, the wait at the end too."""
    num_steps = 40 if in_full else 20
    settings = (
        *(larger(runs) if in_full else ()),
        f"train.max_steps={num_steps}",
        f"train.save_every_steps={_SAVED_EVERY}",
        "train.eval_every_steps=null",
    )
    for verb in ("upscale", "train"):
        ended = run_verb(verb, str(runs.config("timed")), *settings)
        assert ended.exit_code == 0, ended.printed
    final = runs.folder("timed").final
    cost, position = (json.loads((final / name).read_text(encoding="utf-8")) for name in ("cost.json", "position.json"))
    stall_s, step_s = cost["saving_s"] / (num_steps // _SAVED_EVERY), position["elapsed_s"] / num_steps
    share = stall_s / (_DEFAULT_CADENCE * step_s)
    assert share < 0.02
    trained = f"{cost['trainable_parameters']:,} of {cost['total_parameters']:,} parameters train"
    told = f"{1000 * stall_s:.1f} ms a checkpoint, {1000 * step_s:.0f} ms a step, {trained}"
    record_property("share of the time that training waits for checkpoints", f"{100 * share:.4f} % ({told})")
