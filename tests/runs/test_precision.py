"""What `auto` stands for; that it is kept on other devices is shown in tests/test_pretended_device.py."""

from pathlib import Path

import pytest

from scale_cli.config.load import dump_config
from scale_cli.config.schema import RunConfig
from scale_cli.runs import precision
from scale_cli.runs.folder import RunFolder
from scale_cli.runs.opened import Run
from scale_cli.runs.precision import with_precision
from scale_cli.storage.atomic import new_folder
from tests.small_runs import SMALLEST, load_text


def small_config(folder: Path, *overrides: str) -> RunConfig:
    return load_text(SMALLEST, f"output_dir={folder / 'run'}", *overrides)


def precisions(config: RunConfig) -> tuple[str, str, str]:
    return config.model.dtype, config.train.mixed_precision, config.evaluation.mixed_precision


@pytest.mark.parametrize(
    ("given", "on_cpu", "on_gpu"),
    [
        ([], ("float32", "no", "no"), ("bfloat16", "bf16", "bf16")),
        (["train.mixed_precision=no"], ("float32", "no", "no"), ("float32", "no", "no")),
        (
            ["train.mixed_precision=bf16"],
            ("float32", "bf16", "bf16"),
            ("bfloat16", "bf16", "bf16"),
        ),
        (
            ["train.mixed_precision=fp16"],
            ("float32", "fp16", "fp16"),
            ("float32", "fp16", "fp16"),
        ),
        (["model.dtype=float16"], ("float16", "no", "no"), ("float16", "no", "no")),
        (["model.dtype=bfloat16"], ("bfloat16", "no", "no"), ("bfloat16", "bf16", "bf16")),
        (
            ["evaluation.mixed_precision=no"],
            ("float32", "no", "no"),
            ("bfloat16", "bf16", "no"),
        ),
    ],
)
def test_auto_is_bfloat16_on_a_device_that_has_it_and_float32_elsewhere(
    tmp_path: Path, given: list[str], on_cpu: tuple[str, ...], on_gpu: tuple[str, ...]
) -> None:
    config = small_config(tmp_path, *given)
    assert precisions(with_precision(config, in_bfloat16=False)) == on_cpu
    assert precisions(with_precision(config, in_bfloat16=True)) == on_gpu
    assert precisions(Run(config).config) == on_cpu


def test_a_run_that_was_upscaled_on_a_cpu_is_told_how_to_be_faster_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = small_config(tmp_path)
    kept = with_precision(given, in_bfloat16=False)
    assert precision.slower_than_here(given, kept) == []
    monkeypatch.setattr(precision, "computes_in_bfloat16", lambda: True)
    (warning,) = precision.slower_than_here(given, kept)
    assert "set it to bf16" in warning
    assert precision.slower_than_here(kept, kept) == []


def test_a_float16_base_is_not_told_to_train_in_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = small_config(tmp_path, "model.dtype=float16")
    kept = with_precision(given, in_bfloat16=False)
    monkeypatch.setattr(precision, "computes_in_bfloat16", lambda: True)
    assert precision.slower_than_here(given, kept) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], ("float32", "no", "no")),
        (["train.mixed_precision=bf16"], ("float32", "bf16", "bf16")),
        (["model.dtype=bfloat16"], ("bfloat16", "no", "no")),
    ],
)
def test_what_a_run_has_recorded_stands_for_auto_alone(
    tmp_path: Path, given: list[str], expected: tuple[str, ...]
) -> None:
    recorded = with_precision(small_config(tmp_path), in_bfloat16=False)
    with new_folder(RunFolder(recorded.output_dir).upscaled) as partial:
        (partial / "scale.yaml").write_text(dump_config(recorded))
    assert precisions(with_precision(small_config(tmp_path, *given))) == expected


def test_a_config_without_auto_asks_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_precision(small_config(tmp_path), in_bfloat16=True)
    monkeypatch.setattr(precision, "computes_in_bfloat16", lambda: pytest.fail("asked"))
    assert Run(config).config is config
