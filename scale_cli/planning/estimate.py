"""How long a whole run takes, or what is left of it: one estimate, and one sentence, for `init` and `plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scale_cli.config.schema import RunConfig
from scale_cli.config.search import search_size
from scale_cli.export.learned import TOKENS_JUDGED
from scale_cli.planning.beginnings import HeldOut
from scale_cli.planning.device import Device
from scale_cli.planning.step import StepCost
from scale_cli.report import duration, quantity
from scale_cli.runs.folder import RunFolder, step_of

# What is no pass over text, from runs of SmolLM2-135M on a CPU (docs/planning.md).
_FIXED_S = 20.0  # imports, tokenizers, checks, reports and cards
_PARAMETER_S = 8e-8  # to load, start, prove, hash and write each parameter, as often as a run does
_TOKENS_OF_A_SAMPLE = 3_500  # a continuation, one token at a time, in tokens of a pass
# Passes over a token that is compared, for each way to load an export: the trained model's and the
# export's, and two of cached decoding.
_PASSES_OF_A_COMPARISON = 4
_TIMES_IN_FLOAT32 = 2.0  # of bfloat16's; exports are compared in float32, whatever training used


@dataclass(frozen=True)
class Estimate:
    """The seconds of `scale run`, at a device's speed, without what is done already."""

    device: Device
    training_s: float
    evaluation_s: float  # while training, and at the end
    evaluated_tokens: int
    scored_per_s: float  # tokens of text
    start_s: float  # up to the first step, and what else takes the same time for any text
    export_s: float  # of the exports' comparison with the trained model
    done: str  # what is done already; empty if nothing
    omitted: str  # what is not counted; empty if nothing

    @property
    def total_s(self) -> float:
        return self.training_s + self.evaluation_s + self.start_s + self.export_s

    def in_words(self) -> str:
        return (
            f"about {duration(self.total_s)}{self.done}{self.omitted}: {duration(self.training_s)} of training, "
            f"{duration(self.evaluation_s)} of evaluation ({self.evaluated_tokens:,} tokens and samples), "
            f"{duration(self.start_s + self.export_s)} of start and export; by "
            f"{quantity(self.device.flops_per_s, 'FLOP/s')} {self.device.origin}"
        )


def estimate(
    config: RunConfig,
    step: StepCost,
    device: Device,
    texts: Sequence[HeldOut],  # of the evaluations
    num_processes: int = 1,
    *,
    searches: bool = True,  # for `train.lr: auto`; False: the model is known to start with codes
) -> Estimate:
    """Estimate what is left of a run: its FLOPs at the device's speed, and what is no pass over text by its size."""
    train = config.train
    folder = RunFolder(config.output_dir)
    steps_done = _steps_done(folder, train.max_steps)
    is_trained = steps_done == train.max_steps
    is_evaluated = is_trained and folder.evaluation.is_dir()
    exports = [
        name
        for name in config.export.format
        if not (is_trained and folder.export(name, config.export.dtype).is_dir())
    ]
    done = f" left, after step {steps_done:,} of {train.max_steps:,}" if steps_done else ""

    num_parameters = step.num_frozen + step.num_trainable
    searching = 0.0  # in steps
    if train.lr == "auto" and searches and not steps_done:
        size = search_size(
            train,
            sequence_length=config.corpus.sequence_length,
            num_parameters=num_parameters,
            num_processes=num_processes,
        )
        searching = size.work / train.global_batch_size
    pass_s = 2.0 * num_parameters / device.flops_per_s / num_processes
    # A method that does not widen has its base beside it, as a model of its own.
    definition = config.method.definition
    per_token_s = pass_s if definition.widens else 2 * pass_s
    evaluated_tokens, num_samples = count_evaluated(config, texts, steps_done, is_evaluated)

    num_ways = len(exports)
    if "plain" in exports and definition.routes_plainly(config.method.settings):
        num_ways += 1
    num_learned = _num_judged(texts, "acquisition")
    read_by_exports = num_ways * (
        _PASSES_OF_A_COMPARISON * sum(text.num_compared for text in texts) + num_learned
    )
    if exports:
        read_by_exports += 2 * num_learned  # by the base and the run
    if num_ways > len(exports):
        read_by_exports += 2 * _num_judged(texts, "retention")  # by the run and the export
    times = _TIMES_IN_FLOAT32 if train.mixed_precision == "bf16" else 1.0
    step_s = device.step_s(step, train, config.corpus.sequence_length, num_processes)
    return Estimate(
        device=device,
        training_s=(train.max_steps - steps_done + searching) * step_s,
        evaluation_s=per_token_s * (evaluated_tokens + num_samples * _TOKENS_OF_A_SAMPLE),
        evaluated_tokens=evaluated_tokens,
        scored_per_s=1 / per_token_s,
        start_s=0.0 if is_evaluated and not exports else _FIXED_S + _PARAMETER_S * num_parameters,
        export_s=times * pass_s * read_by_exports * num_processes,
        done=done,
        omitted=" without benchmarks" if config.evaluation.benchmarks else "",
    )


def _num_judged(texts: Sequence[HeldOut], role: str) -> int:
    """Return how many tokens of a role's texts exports are judged by."""
    judged = [text.num_tokens for text in texts if text.role == role]
    return sum(min(num_tokens, TOKENS_JUDGED // len(judged)) for num_tokens in judged)


def _steps_done(folder: RunFolder, max_steps: int) -> int:
    """Return from which step a run would go on; a trained run may have lost its checkpoints."""
    none_there = max_steps if folder.final.is_dir() else 0
    return min(step_of(folder.saved[-1]) if folder.saved else none_there, max_steps)


def count_evaluated(
    config: RunConfig, texts: Sequence[HeldOut], steps_done: int = 0, is_evaluated: bool = False
) -> tuple[int, int]:
    """Return how many tokens of text all evaluations read that are left, and how many samples they write."""
    train = config.train
    num_left = 0  # of those during training
    if (every := train.eval_every_steps) is not None and steps_done < train.max_steps:
        num_left = train.max_steps // every - steps_done // every
        num_left += train.max_forgetting is not None and train.max_steps % every > 0

    of_each = config.eval_tokens // max(1, len(config.evaluation.perplexity))
    num_tokens = num_left * sum(min(text.num_in_windows, of_each) for text in texts)
    if not is_evaluated:
        num_tokens += sum(text.num_tokens for text in texts)
    if train.attention == "flex_attention":  # does not generate
        return num_tokens, 0
    return num_tokens, num_left * len({text.language for text in config.evaluation.perplexity})
