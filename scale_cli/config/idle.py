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
    usual = type(train).model_fields["min_lr_ratio"].default
    if train.min_lr_ratio != usual and train.schedule == "constant":
        lines.append("train.min_lr_ratio: has no effect with train.schedule constant")
    if train.warmup_steps > train.max_steps:
        reached = 100 * train.max_steps / train.warmup_steps
        lines.append(
            f"train.warmup_steps {train.warmup_steps:,}: more than train.max_steps "
            f"{train.max_steps:,}, so the rate reaches only {reached:.0f} % of train.lr; lower "
            "train.warmup_steps too"
        )
    if train.eval_max_tokens is not None and train.eval_every_steps is None:
        lines.append("train.eval_max_tokens: has no effect without train.eval_every_steps")
    for source in (*config.corpus.sources, *config.evaluation.perplexity):
        if source.path is not None and source.split != type(source).model_fields["split"].default:
            lines.append(f"{source.name}: split {source.split} is of a dataset, and has no effect")
    return lines + _of_other_methods(config.method)


def _of_other_methods(method: MethodConfig) -> list[str]:
    """Return warnings of sections that are set and belong to other methods."""
    sections = {definition.section for definition in METHODS.values() if definition.section}
    sections |= {"expansion", "collaboration"}
    sections.discard(METHODS[method.variant].section or "")
    if method.definition.widens:
        sections -= {"expansion", "collaboration"}
    return [
        f"method.{name}: has no effect with method.variant {method.variant}"
        for name in sorted(sections)
        if getattr(method, name) != MethodConfig.model_fields[name].default
    ]
