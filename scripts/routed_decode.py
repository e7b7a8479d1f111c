"""Measure the cost of routing in transformers: of an expansion, one folder served plainly and with its router, and the
two streams; of LoRA, the base alone, the base on every row twice, the adapter on it, and both routed.

    OMP_NUM_THREADS=1 python scripts/routed_decode.py [--shape small|wide] [--rounds 8] [--tokens 16]
    OMP_NUM_THREADS=1 python scripts/routed_decode.py --kind adapter [--base FOLDER]

Times are CPU time of one thread, as in `scripts/benchmark/`. In each round every model reads one prompt and continues
it. The order rotates by one place per round, and ratios are formed within rounds. Weights are random; the time does not
depend on them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from scale_cli.config.schema import MethodConfig
from scale_cli.export.dense import dense_model
from scale_cli.export.plain_folder import router_keys
from scale_cli.export.served_folder import routed_name
from scale_cli.methods.widened import RouterConfig
from scale_cli.model import routed_scale
from scale_cli.model.adapter_pair import AdapterPair, without_copies
from scale_cli.model.cache_scale import CACHE
from scale_cli.model.two_streams import Router, TwoStreams
from scale_cli.upscale.building import start_model

# Of the base: hidden, MLP, layers, heads, key/value heads, vocabulary.
SHAPES = {"small": (320, 896, 8, 8, 8, 8192), "wide": (1024, 2816, 8, 16, 8, 32000)}
PROMPT_TOKENS = 128


def random_base(shape: str) -> Any:
    """Return a random Llama of a shape."""
    hidden, mlp, layers, heads, key_value_heads, vocabulary = SHAPES[shape]
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=mlp,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads,
            vocab_size=vocabulary,
        )
    )


def expansion(base: Any) -> dict[str, Any]:
    """Return three models of one random widening: plain, routed, and with two streams."""
    model: Any = start_model(
        base.requires_grad_(False), MethodConfig(variant="route"), seed=0
    ).eval()
    plain = dense_model(model, "float32")
    plain.config.scale_router = router_keys(model)
    routed = getattr(routed_scale, routed_name(type(plain).__name__))(plain.config).eval()
    routed.load_state_dict(plain.state_dict())
    return {"plain": plain, "routed": routed, "two streams": model}


def adapter(base: Any) -> dict[str, Any]:
    """Return the base alone, with a random LoRA, and both routed."""
    trained: Any = start_model(without_copies(base), MethodConfig(variant="lora"), seed=0).eval()
    pair = AdapterPair(base.eval(), trained)
    routed = TwoStreams(pair, Router.of_settings(RouterConfig()))
    return {
        "plain": base,
        "plain, rows twice": on_twice_the_rows(base),
        "LoRA alone": trained,
        "LoRA, routed": routed,
    }


def on_twice_the_rows(base: Any) -> Any:
    """Return a base that passes every row twice: the least that both streams cost in one pass."""

    def run(ids_BT: torch.Tensor, **given: Any) -> Any:
        out = base(torch.cat([ids_BT, ids_BT]), **given)
        out.logits = out.logits[: len(ids_BT)]
        return out

    return run


KINDS = {"expansion": expansion, "adapter": adapter}


def timed(model: Any, ids_BT: torch.Tensor, num_tokens: int) -> tuple[float, float]:
    """Return the seconds for reading a prompt, and for one token after it."""
    started = time.process_time()
    out = model(ids_BT, use_cache=True, logits_to_keep=1)
    read = time.process_time()
    for _ in range(num_tokens):
        token_B1 = out.logits[:, -1:].argmax(-1)
        out = model(token_B1, cache=out[CACHE], use_cache=True, logits_to_keep=1)
    return read - started, (time.process_time() - read) / num_tokens


@torch.no_grad()
def main() -> None:
    """Print the tokens/s of every model, and its speed relative to the plain one's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--kind", choices=KINDS, default="expansion")
    parser.add_argument("--base", help="a folder; by default a random Llama of the shape")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    base: Any = random_base(asked.shape)
    if asked.base is not None:
        base = AutoModelForCausalLM.from_pretrained(asked.base, dtype=torch.float32)
    models = KINDS[asked.kind](base)
    for batch in asked.batches:
        ids_BT = torch.randint(0, base.config.vocab_size, (batch, PROMPT_TOKENS))
        rounds: list[dict[str, tuple[float, float]]] = []
        for turn in range(asked.rounds + 1):
            names = [*models][turn % len(models) :] + [*models][: turn % len(models)]
            rounds.append({name: timed(models[name], ids_BT, asked.tokens) for name in names})
        for part, kind in enumerate(("prompt", "decode")):
            for name in models:
                ratios = [taken["plain"][part] / taken[name][part] for taken in rounds[1:]]
                low, middle, high = statistics.quantiles(ratios, n=4)
                per_s = (
                    batch
                    * (PROMPT_TOKENS if kind == "prompt" else 1)
                    / min(taken[name][part] for taken in rounds)
                )
                print(
                    f"{asked.base or asked.shape}, batch {batch}, {kind}: {name:<17} {per_s:10,.0f} tokens/s, "
                    f"{middle:.2f} [{low:.2f}, {high:.2f}] of plain"
                )


if __name__ == "__main__":
    main()
