"""The verb `scale average`: the weighted mean of what several checkpoints or runs have trained, as a run of its own.

The folder has one part, `final/`, which evaluate, export and generate take as any other run's: what it says of text and
steps is the last member's, whose config it has, and `average.json` names all. LAE (arXiv 2303.10070) averages the last
checkpoints of one run; means of several runs are model soups.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from scale_cli.config.load import dump_config
from scale_cli.config.same_run import BASE_KEYS, differences
from scale_cli.errors import ConfigError, RunFolderError
from scale_cli.storage.atomic import MANIFEST, claimed, file_sha256, new_folder, save_tensors, verify_folder, write_text
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.records import TRAINED, AveragedMember, AverageRecord, TrainState
from scale_cli.training.optimiser import trainable_parameters
from scale_cli.upscale.method import MethodModel, load_trained
from scale_cli.upscale.run import MethodFolder

_CONFIG = "scale.yaml"


@dataclass(frozen=True)
class AverageSummary:
    """What was averaged."""

    folder: Path
    members: tuple[AveragedMember, ...]

    def lines(self) -> list[str]:
        """Return what went in and by how much, and how to go on."""
        named = [f"averaged       {m.folder}, step {m.step:,}, weight {m.weight:.4g}" for m in self.members]
        return [*named, f"written        {self.folder} (scale evaluate {self.folder.parent})"]


def average(given: Sequence[Path], output: Path, weights: Sequence[float] | None) -> AverageSummary:
    """Write the weighted mean of some checkpoints, `final/`s or finished runs to `output/final`."""
    weights = [1.0] * len(given) if weights is None else weights
    if len(given) < 2:
        raise ConfigError("CHECKPOINT: give two or more")
    if len(weights) != len(given) or min(weights) < 0 or not sum(weights):
        raise ConfigError(f"--weights: give {len(given)}, none below 0 and not all 0")
    shares = [weight / sum(weights) for weight in weights]
    run = RunFolder(output)
    run.check()
    if run.final.is_dir():
        raise RunFolderError(f"--output {output}: holds a run already; choose another")
    *others, last = opened = [_open_member(path) for path in given]
    for other in others:
        _check_alike(other, last)
    mean = _mean(last.load_to_train(), [member.path for member in opened], shares)
    members = tuple(
        AveragedMember(str(member.path), file_sha256(member.path / MANIFEST), member.state.step, share)
        for member, share in zip(opened, shares, strict=True)
    )
    with claimed(run.root), new_folder(run.final) as partial:
        for file in last.path.iterdir():
            if file.is_file() and file.suffix != ".safetensors" and file.name not in (MANIFEST, _CONFIG):
                shutil.copyfile(file, partial / file.name)
        save_tensors(partial / TRAINED, mean)
        AverageRecord(members).save(partial)
        write_text(partial / _CONFIG, dump_config(last.run.config.model_copy(update={"output_dir": run.root})))
    return AverageSummary(run.final, members)


def _open_member(path: Path) -> MethodFolder:
    folder = RunFolder(path).final if RunFolder(path).final.is_dir() else path
    if not TrainState.is_in(folder):
        raise RunFolderError(f"{folder}: is neither a checkpoint (checkpoints/step-...), a final/ nor a finished run")
    verify_folder(folder)
    return MethodFolder.at(folder)


def _check_alike(member: MethodFolder, last: MethodFolder) -> None:
    """Refuse a member of another base or another method than the last one's."""
    for what in ("content", "config", "tokenizer"):
        if getattr(member.record, f"{what}_sha256") != getattr(last.record, f"{what}_sha256"):
            raise RunFolderError(f"{member.path}: was trained on another base than {last.path} (its {what} differs)")
    # What was found to upscale is in the folder alone.
    one, other = (of.run.config.model_copy(update={"method": of.method}) for of in (member, last))
    if changed := differences(one, other, ("model", "method"), BASE_KEYS):
        raise RunFolderError(f"{member.path}: was trained by another method than {last.path} ({'; '.join(changed)})")


@torch.no_grad()
def _mean(model: MethodModel, folders: Sequence[Path], shares: Sequence[float]) -> dict[str, Tensor]:
    """Return the mean of what a model trains, summed in float64; one folder at a time is in memory."""
    parameters = trainable_parameters(model)
    sums = {name: torch.zeros_like(parameter, dtype=torch.float64) for name, parameter in parameters.items()}
    for folder, share in zip(folders, shares, strict=True):
        load_trained(model, folder)
        for name, parameter in parameters.items():
            sums[name].add_(parameter, alpha=share)
    return {name: total.to(parameters[name].dtype) for name, total in sums.items()}
