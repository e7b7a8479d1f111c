"""How long a whole run takes: one estimate, and one sentence, for `init`, `plan` and `run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scale_cli.config.schema import RunConfig
from scale_cli.planning.beginnings import HeldOut
from scale_cli.planning.device import Device, update_flops
from scale_cli.planning.memory import step_of
from scale_cli.planning.sizes import BaseSizes
from scale_cli.planning.step import Step
from scale_cli.report import duration, quantity

# What is no pass over text, from runs of SmolLM2-135M on a CPU (docs/planning.md).
_FIXED_S = 20.0  # imports, tokenizers, checks, reports and cards
_PARAMETER_S = 8e-8  # to load, start, prove, hash and write each parameter, as often as a run does
_TOKENS_OF_A_SAMPLE = 3_500  # a continuation, one token at a time, in tokens of a pass
# Passes over a token that is compared, for each way to load an export: in a higher precision, by
# the model's own rounding, with and without the cache.
_PASSES_OF_A_COMPARISON = 10


@dataclass(frozen=True)
class Estimate:
    """The seconds of `scale run`, at a device's speed."""

    device: Device
    flops_per_s: float  # of training, update included
    training_s: float
    evaluation_s: float  # while training, and at the end
    evaluated_tokens: int
    scored_per_s: float  # tokens of text
    start_s: float  # up to the first step, and what else takes the same time for any text
    export_s: float  # of the export's comparison with the trained model
    omitted: str  # what is not counted; empty if nothing

    @property
    def total_s(self) -> float:
        return self.training_s + self.evaluation_s + self.start_s + self.export_s

    def in_words(self) -> str:
        return (
            f"about {duration(self.total_s)}{self.omitted}: {duration(self.training_s)} of training, "
            f"{duration(self.evaluation_s)} of evaluation ({self.evaluated_tokens:,} tokens and samples), "
            f"{duration(self.start_s + self.export_s)} of start and export; by {quantity(self.flops_per_s, 'FLOP/s')} "
            f"{self.device.origin}"
        )


def estimate(
    config: RunConfig,
    sizes: BaseSizes,
    device: Device,
    texts: Sequence[HeldOut],  # of the evaluations
    *,
    num_processes: int = 1,
    num_new: int = 0,
) -> Estimate:
    """Estimate a run: its FLOPs at the device's speed, and what is no pass over text by its size.

    Raises:
        ConfigError: the method has no closed form, or asks for what the base does not have.
    """
    step = step_of(config, sizes, device.type, num_new)
    length = config.corpus.sequence_length
    training_s, flops_per_s = time_of_training(config, step, device, num_processes)
    definition = config.method.definition
    num_parameters = step.num_frozen + step.num_trainable
    flop_s = device.token_s(step, length) / step.flops(length) / num_processes
    pass_s = 2.0 * flop_s * num_parameters
    # A method that does not widen has its base beside it, as a model of its own.
    per_token_s = pass_s if definition.widens else 2 * pass_s
    evaluated_tokens = count_evaluated(config, texts)
    num_samples = 0
    if config.train.attention != "flex_attention":
        languages = {source.language for source in config.evaluation.perplexity}
        num_samples = len(languages) * _num_evaluations(config)
    num_ways = len(config.export.format)
    if "llama" in config.export.format and definition.routes_plainly(config.method.settings):
        num_ways += 1
    compared = num_ways * sum(text.num_compared for text in texts)
    return Estimate(
        device=device,
        flops_per_s=flops_per_s,
        training_s=training_s,
        evaluation_s=per_token_s * (evaluated_tokens + num_samples * _TOKENS_OF_A_SAMPLE),
        evaluated_tokens=evaluated_tokens,
        scored_per_s=1 / per_token_s,
        start_s=_FIXED_S + _PARAMETER_S * num_parameters,
        export_s=_PASSES_OF_A_COMPARISON * pass_s * compared * num_processes,
        omitted=" without benchmarks" if config.evaluation.benchmarks else "",
    )


def time_of_training(
    config: RunConfig, step: Step, device: Device, num_processes: int = 1
) -> tuple[float, float]:
    """Return the seconds of all steps, and the FLOP/s that each of the processes sustains in them."""
    train = config.train
    length = config.corpus.sequence_length
    step_s = device.step_s(step, train, length, num_processes)
    flops = step.flops(length) * train.global_batch_size * length / num_processes
    return train.max_steps * step_s, (flops + update_flops(step, train)) / step_s


def count_evaluated(config: RunConfig, texts: Sequence[HeldOut]) -> int:
    """Return how many tokens of text all evaluations of a run read."""
    of_each = config.eval_tokens // max(1, len(config.evaluation.perplexity))
    on_the_way = sum(min(text.num_in_windows, of_each) for text in texts)
    return _num_evaluations(config) * on_the_way + sum(text.num_tokens for text in texts)


def _num_evaluations(config: RunConfig) -> int:
    """Return how often text is measured on during training."""
    train = config.train
    if train.eval_every_steps is None:
        return 0
    number, steps_after = divmod(train.max_steps, train.eval_every_steps)
    return number + (train.max_forgetting is not None and steps_after > 0)
