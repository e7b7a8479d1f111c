"""Measure the characters per second that a routed model reads and writes in a new script, with and without new tokens.

    OMP_NUM_THREADS=1 python scripts/served_characters.py [CONFIG] [KEY.SUB=VALUE]... [--new-tokens 2048,4096,8192]

CONFIG is configs/petitions.yaml by default. Times are CPU time of one thread, as in `scripts/routed_decode.py`. The
models are plain exports with their router. In each round every model scores the beginning of the held-out text in one
pass, and then reads it token by token, which costs as much as writing it. The order rotates by one place per round, and
ratios are formed within rounds. The models are untrained; the time does not depend on their weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scale_cli.config.load import load_config
from scale_cli.config.schema import RunConfig
from scale_cli.export.dense import dense_model
from scale_cli.export.plain_folder import router_keys
from scale_cli.export.served_folder import routed_name
from scale_cli.model import routed_scale
from scale_cli.model.cache_scale import CACHE
from scale_cli.runs.opened import Run
from scale_cli.upscale.base import load_base
from scale_cli.upscale.building import new_pieces, start_model
from scale_cli.vocabulary.tokenizer import read_texts

CHARACTERS = 300


def served(config: RunConfig) -> tuple[Any, Tensor]:
    """Return the routed export of a config's model before training, and its ids of the held-out text."""
    run = Run(config)
    base_tokenizer, tokenizer = run.base_tokenizer, run.make_tokenizer()
    new = new_pieces(config, base_tokenizer, tokenizer)
    model: Any = start_model(load_base(config.model), config.method, config.seed, new).eval()
    plain = dense_model(model, "float32")
    plain.config.scale_router = router_keys(model)
    routed = getattr(routed_scale, routed_name(type(plain).__name__))(plain.config).eval()
    routed.load_state_dict(plain.state_dict())
    source = next(source for source in config.evaluation.perplexity if source.role == "acquisition")
    text = "\n".join(read_texts([source], config.corpus, 4 * CHARACTERS))[:CHARACTERS]
    return routed, tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids


def timed(model: Any, ids_1T: Tensor) -> tuple[float, float]:
    """Return the seconds for scoring a text in one pass, and for reading it token by token."""
    started = time.process_time()
    model(ids_1T)
    scored = time.process_time()
    cache = None
    for token_1 in ids_1T.unbind(dim=1):
        cache = model(token_1.unsqueeze(0), cache=cache, use_cache=True, logits_to_keep=1)[CACHE]
    return scored - started, time.process_time() - scored


def rounds_of(
    models: dict[str, tuple[Any, Tensor]], count: int
) -> Sequence[dict[str, tuple[float, float]]]:
    """Return the times of each model in every round but the first."""
    rounds = []
    for turn in range(count + 1):
        names = [*models][turn % len(models) :] + [*models][: turn % len(models)]
        rounds.append({name: timed(*models[name]) for name in names})
    return rounds[1:]


@torch.no_grad()
def main() -> None:
    """Print the characters/s of every model, and its speed relative to the one without new tokens."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="CONFIG or KEY.SUB=VALUE")
    parser.add_argument("--new-tokens", default="2048,4096,8192")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    path = next((word for word in asked.words if "=" not in word), "configs/petitions.yaml")
    overrides = [word for word in asked.words if "=" in word]
    vocabularies = {"none": "null"} | {
        number: f"{{new_tokens: {number}, min_count: 2}}" for number in asked.new_tokens.split(",")
    }
    models = {
        name: served(load_config(Path(path), [*overrides, f"method.vocabulary={vocabulary}"]))
        for name, vocabulary in vocabularies.items()
    }
    rounds = rounds_of(models, asked.rounds)
    for part, kind in enumerate(("scored", "written")):
        for name, (_, ids_1T) in models.items():
            ratios = [taken["none"][part] / taken[name][part] for taken in rounds]
            low, middle, high = statistics.quantiles(ratios, n=4)
            per_s = CHARACTERS / statistics.median(taken[name][part] for taken in rounds)
            print(
                f"{name:>6} new tokens, {ids_1T.shape[1]:4} for the text, {kind}: {per_s:8,.0f} characters/s, "
                f"{middle:.2f} [{low:.2f}, {high:.2f}] of none"
            )


if __name__ == "__main__":
    main()
