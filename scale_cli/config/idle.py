"""Settings that have no effect in a run."""

from __future__ import annotations

from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.methods import METHODS


def idle_settings(config: RunConfig) -> list[str]:
    """Return a warning for every setting that has no effect in this run, or is never reached."""
    train = config.train
    lines = []
    if train.decay_steps is not None and train.schedule != "wsd":
        lines.append(
            f"train.decay_steps: has no effect with train.schedule {train.schedule}, only with wsd"
        )
    if train.warmup_steps > train.max_steps:
        reached = 100 * train.max_steps / train.warmup_steps
        lines.append(
            f"train.warmup_steps {train.warmup_steps:,}: more than train.max_steps "
            f"{train.max_steps:,}, so the rate reaches only {reached:.0f} % of train.lr; lower "
            "train.warmup_steps too"
        )
    if train.eval_max_tokens is not None and train.eval_every_steps is None:
        lines.append("train.eval_max_tokens: has no effect without train.eval_every_steps")
    method = config.method
    acting = {METHODS[method.variant].section}
    if method.definition.widens:
        acting |= {"expansion", "collaboration"}
    for name in {"expansion", "collaboration", *(of.section for of in METHODS.values())} - acting - {None}:
        if getattr(method, name) != MethodConfig.model_fields[name].default:
            lines.append(f"method.{name}: has no effect with method.variant {method.variant}")
    for source in (*config.corpus.sources, *config.evaluation.perplexity):
        if source.path is not None and source.split != type(source).model_fields["split"].default:
            lines.append(f"corpus {source.name}: split {source.split} has no effect; it is for a dataset")
    return lines
