"""Answers of a vLLM engine: no test, run by the Python of `make serving`'s environment.

    python ask.py QUESTIONS.json ANSWERS.json

The questions are jobs, an engine each: its folder and options, and rounds of prompts with how to sample. Of every
prompt of a round come its tokens and those of all its continuations, the log-probabilities that were asked for, and the
counters of the engine after the round.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.sampling_params import StructuredOutputsParams

COUNTERS = ("vllm:num_preemptions", "vllm:prefix_cache_hits")


def answers_of(job: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, and ask it one round after another."""
    try:
        engine = LLM(job["folder"], disable_log_stats=False, **job["engine"])
    except Exception as error:  # what a refused engine says
        return {"refused": str(error)}
    rounds = [answers_of_round(engine, asked) for asked in job["rounds"]]
    del engine
    gc.collect()
    cleanup_dist_env_and_memory()
    return {"rounds": rounds}


def answers_of_round(engine: LLM, asked: dict[str, Any]) -> dict[str, Any]:
    """Ask all prompts of a round together."""
    sampling = dict(asked["sampling"])
    if "choice" in sampling:
        sampling["structured_outputs"] = StructuredOutputsParams(choice=sampling.pop("choice"))
    prompts = [of if isinstance(of, str) else {"prompt_token_ids": of} for of in asked["prompts"]]
    outputs = engine.generate(prompts, SamplingParams(**sampling), use_tqdm=False)
    return {
        "prompts": [list(output.prompt_token_ids) for output in outputs],
        "tokens": [[list(one.token_ids) for one in output.outputs] for output in outputs],
        "text": [[one.text for one in output.outputs] for output in outputs],
        "log_probs": [
            [_of_tokens(one.logprobs, one.token_ids) for one in output.outputs]
            for output in outputs
        ],
        "prompt_log_probs": [
            _of_tokens(output.prompt_logprobs, output.prompt_token_ids) for output in outputs
        ],
        "counters": {
            metric.name: metric.value for metric in engine.get_metrics() if metric.name in COUNTERS
        },
    }


def _of_tokens(log_probs: Any, tokens: Any) -> list[float | None]:
    if log_probs is None:
        return []
    return [
        None if at is None else at[token].logprob
        for at, token in zip(log_probs, tokens, strict=True)
    ]


def main() -> None:
    """Read the questions, write the answers; what each job has answered is there before the next."""
    questions, answers = map(Path, sys.argv[1:])
    found = {}
    for name, job in json.loads(questions.read_text()).items():
        found[name] = answers_of(job)
        answers.write_text(json.dumps(found))
        print(f"{name}: answered after {time.process_time():.0f} s of processor time", flush=True)


if __name__ == "__main__":
    main()
