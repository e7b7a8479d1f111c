"""What `auto` stands for in a run: decided once, when the run is upscaled, and kept wherever it
goes on.
"""

from __future__ import annotations

from scale_cli.config.load import checked, load_config
from scale_cli.config.schema import RunConfig
from scale_cli.processes import computes_in_bfloat16, slow_in_bfloat16
from scale_cli.runs.folder import RunFolder
from scale_cli.storage.atomic import is_as_written


def with_precision(config: RunConfig, *, in_bfloat16: bool | None = None) -> RunConfig:
    """Return a run's config in which no precision is `auto`.

    | key                          | stands for                                                          |
    |------------------------------|---------------------------------------------------------------------|
    | `train.mixed_precision`      | what the run has recorded; at first bf16 on a device that computes  |
    |                              | in bfloat16 (never on a CPU), unless the base is float16; else no   |
    | `model.dtype`                | what the run has recorded; at first bfloat16 on such a device if    |
    |                              | training is in bf16; else float32                                   |
    | `evaluation.mixed_precision` | `train.mixed_precision`                                             |

    Args:
        config: as a user wrote it.
        in_bfloat16: whether the device computes in bfloat16, for a device that is not this
            process's.
    """
    dtype = config.model.dtype
    precision = config.train.mixed_precision
    if "auto" not in (dtype, precision, config.evaluation.mixed_precision):
        return config

    if "auto" in (dtype, precision):
        # What is damaged is found and named when it is opened; the folder before it says the same.
        folders = RunFolder(config.output_dir).newest_first
        kept = next((folder for folder in folders if is_as_written(folder, "scale.yaml")), None)
        if kept is not None:
            recorded = load_config(kept / "scale.yaml")
            precision = recorded.train.mixed_precision if precision == "auto" else precision
            dtype = recorded.model.dtype if dtype == "auto" else dtype
        elif in_bfloat16 is None:
            in_bfloat16 = computes_in_bfloat16()
    if precision == "auto":
        precision = "bf16" if in_bfloat16 and dtype != "float16" else "no"
    if dtype == "auto":
        dtype = "bfloat16" if in_bfloat16 and precision == "bf16" else "float32"

    tree = config.model_dump(mode="json")
    tree["model"]["dtype"] = dtype
    tree["train"]["mixed_precision"] = precision
    if config.evaluation.mixed_precision == "auto":
        tree["evaluation"]["mixed_precision"] = precision
    return checked(RunConfig, tree, str(config.output_dir))


def slower_than_here(given: RunConfig, kept: RunConfig) -> list[str]:
    """Return a warning if `auto` was decided on a CPU, and this process's device would train in
    bfloat16.
    """
    if given.train.mixed_precision != "auto" or kept.train.mixed_precision != "no":
        return []
    if kept.model.dtype == "float16" or not computes_in_bfloat16():
        return []
    return [
        "train.mixed_precision: auto is `no` since `scale upscale` ran on another device; set it to bf16, which is "
        "faster here"
    ]


def slow_while_training(config: RunConfig, device_type: str) -> list[str]:
    """Return warnings of bfloat16 in training and its evaluations, on a CPU without instructions for it."""
    train = config.train
    avoided_by = {
        "train.mixed_precision=no": train.mixed_precision == "bf16",
        "evaluation.mixed_precision=no": train.eval_every_steps is not None
        and config.evaluation.mixed_precision == "bf16",
    }
    return slow_in_bfloat16(device_type, avoided_by)
