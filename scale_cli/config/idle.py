"""Settings that have no effect in a run."""

from __future__ import annotations

from scale_cli.config.schema import RunConfig


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
    return lines
