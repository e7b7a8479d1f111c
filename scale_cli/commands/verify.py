"""The verb `scale verify`: whether a folder of ours is what it was when it was written, offline.

Every file is held to its size and SHA-256 in the manifest; none may have come in, and none that a folder of its kind
has may never have been there. Then, by what is in the folder:
a method's, to its base's hashes and (widened) base logits bit for bit; a ledger, to its sums; `final/`, to the log; an
export, to the trained model's logits; a joined model, to its base.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from scale_cli.commands.export import check_written_export
from scale_cli.commands.join import check_plain_join
from scale_cli.config.load import load_config
from scale_cli.config.schema import ExportFormat, ModelConfig, RunConfig
from scale_cli.data.ledger import Ledger, TokenLedger
from scale_cli.data.tokenise import NUM_BYTES, OFFSETS
from scale_cli.errors import (
    BaseModelError,
    ChangedBaseError,
    PreservationError,
    RunFolderError,
    ScaleError,
    VerificationError,
)
from scale_cli.join.report import JoinReport
from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.processes import placed
from scale_cli.storage.atomic import MANIFEST, described_files, read_json, verify_folder
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.metrics import place_of, read_records
from scale_cli.storage.records import CORPORA, TRAINED, AverageRecord, BaseRecord, ExportRecord, TrainState
from scale_cli.upscale.base import load_written, record_base
from scale_cli.upscale.folder import load_any_base
from scale_cli.upscale.preservation import check_preservation, own_logits, sample_ids
from scale_cli.upscale.run import MethodFolder
from scale_cli.upscale.tokenizer import load_tokenizer


@dataclass
class FolderCheck:
    """What was found in one folder."""

    folder: Path  # which one
    held: list[str] = field(default_factory=list)  # what was checked and found good
    failed: list[str] = field(default_factory=list)  # what was found wrong
    unchecked: list[str] = field(default_factory=list)  # what could not be checked here, and why

    def lines(self) -> list[str]:
        """Return one line, and one more for everything that is wrong or could not be checked."""
        mark = "BAD " if self.failed else "good"
        return [
            f"{mark}  {self.folder}: {', '.join(self.held) or 'nothing could be checked'}",
            *(f"      wrong: {line}" for line in self.failed),
            *(f"      not checked: {line}" for line in self.unchecked),
        ]


@dataclass(frozen=True)
class Verification:
    """What was found in all folders, for the terminal."""

    checks: list[FolderCheck]

    def lines(self) -> list[str]:
        """Return the lines of every folder."""
        return [line for check in self.checks for line in check.lines()]

    def require(self) -> None:
        """Refuse what is not as it was written."""
        bad = [str(check.folder) for check in self.checks if check.failed]
        if bad:
            raise VerificationError(f"not what was written: {', '.join(bad)}")


def verify(path: Path) -> Verification:
    """Check one folder of ours, or every one in the folder of a run."""
    folders = [path] if (path / MANIFEST).is_file() else sorted(_folders_of_ours(path))
    if not folders:
        raise RunFolderError(f"{path}: no folder of ours: nothing in it has a {MANIFEST}")
    base_logits: dict[str, list[Tensor]] = {}
    return Verification([_check(folder, base_logits) for folder in folders])


# What a folder has at least, by its place in a run (`storage/layout.py`); elsewhere a folder may be named anyhow.
_METHOD_FOLDER = (BaseRecord.FILE, "config.json", "method.json", "scale.yaml")
_TRAINED_FOLDER = (*_METHOD_FOLDER, CORPORA, TrainState.FILE, TokenLedger.FILE)
_FILES = {
    r".*/upscaled": _METHOD_FOLDER,
    r"checkpoints/step-\d+": _TRAINED_FOLDER,
    r".*/final": (*_TRAINED_FOLDER, TRAINED),
    r".*/evaluation": ("report.json", "report.md", "report.html", "scale.yaml"),
    rf"export/({'|'.join(get_args(ExportFormat))})(-\w+)?": (
        "README.md",
        "config.json",
        ExportRecord.FILE,
        "scale.yaml",
    ),
    r"tokens/.+-[0-9a-f]{16}": (Ledger.FILE, OFFSETS, NUM_BYTES),
}


def _folders_of_ours(root: Path) -> Iterator[Path]:
    for manifest in root.rglob(MANIFEST):
        if not any(part.startswith(".") for part in manifest.relative_to(root).parts):  # half-written ones
            yield manifest.parent


def _check(folder: Path, base_logits: dict[str, list[Tensor]]) -> FolderCheck:
    check = FolderCheck(folder)
    if not _hold(check, "hashes", lambda: _check_files(folder)):
        return check  # nothing more can be said of what is damaged
    if Ledger.is_in(folder):
        _hold(check, "ledger", lambda: _check_tokens(folder))
    if BaseRecord.is_in(folder) and (folder / "scale.yaml").is_file():
        _hold(check, "base and its preservation", lambda: _check_base(folder, base_logits))
    if TokenLedger.is_in(folder):
        _hold(check, "token ledger", lambda: _check_token_ledger(folder))
    if TrainState.is_in(folder) and folder.name == "final" and not AverageRecord.is_in(folder):
        _hold(check, "log", lambda: _check_log(folder))
    if ExportRecord.is_in(folder):
        _check_export(check)
    if _architecture(folder) == JoinedForCausalLM.__name__:
        _hold(check, "base and its preservation", lambda: _check_joined(folder))
    elif _architecture(folder) is not None and JoinReport.is_in(folder):
        _hold(check, "logits, routed and plain", lambda: check_plain_join(folder))
    return check


def _hold(check: FolderCheck, name: str, prove: Callable[[], None]) -> bool:
    """Run one proof and write down how it ended."""
    try:
        prove()
    except ChangedBaseError as error:
        check.failed.append(f"{name}: {error}")
    except BaseModelError as error:  # not at hand
        check.unchecked.append(f"{name}: {error}")
    except ScaleError as error:
        check.failed.append(f"{name}: {error}")
    else:
        check.held.append(name)
        return True
    return False


def _check_files(folder: Path) -> None:
    verify_folder(folder)
    listed = described_files(folder).keys() | {MANIFEST}
    present = {
        file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_symlink() or not file.is_dir()
    }
    if extra := sorted(present - listed):
        raise VerificationError(f"{folder / extra[0]}: is not among the files that were written")
    if absent := sorted(_demanded(folder) - present):
        raise VerificationError(f"{folder}: was never whole: {absent[0]} is not among its files")
    if present == {MANIFEST}:
        raise VerificationError(f"{folder}: was never whole: there is nothing in it")


def _demanded(folder: Path) -> set[str]:
    report = read_json(folder / "report.json") if (folder / "report.json").is_file() else {}
    if "kind" in report:  # of runs joined or compared: written wherever its user says, as `final` too
        return set()
    place = "/".join(folder.absolute().parts[-2:])
    return {name for pattern, names in _FILES.items() if re.fullmatch(pattern, place) for name in names}


def _check_tokens(folder: Path) -> None:
    ledger = Ledger.load(folder)
    offsets, num_bytes = (np.fromfile(folder / name, dtype=np.int64) for name in (OFFSETS, NUM_BYTES))
    dropped = list(ledger.dropped.values())
    _check_sums(
        folder / Ledger.FILE,
        ("tokens", ledger.num_tokens, int(offsets[-1])),
        ("documents kept", ledger.kept.documents, len(num_bytes)),
        ("documents kept", ledger.kept.documents, int((np.diff(offsets) > 0).sum())),
        ("bytes kept", ledger.kept.num_bytes, int(num_bytes.sum())),
        ("documents read", ledger.read.documents, ledger.kept.documents + sum(d.documents for d in dropped)),
        ("bytes read", ledger.read.num_bytes, ledger.kept.num_bytes + sum(d.num_bytes for d in dropped)),
    )


def _check_token_ledger(folder: Path) -> None:
    state, sources = TrainState.load(folder), TokenLedger.load(folder).sources
    sums = [("targets trained", sum(s.num_trained for s in sources.values()), state.num_tokens + state.skipped_tokens)]
    for name, source in sources.items():
        wanted = source.num_epochs * (source.corpus.targets_an_epoch - source.num_left_out)
        sums.append((f"targets of {name}", wanted, source.num_trained + source.num_held_over))
    _check_sums(folder / TokenLedger.FILE, *sums)


def _check_sums(file: Path, *sums: tuple[str, int, int]) -> None:
    for what, noted, counted in sums:
        if noted != counted:
            raise VerificationError(f"{file}: {what}: {noted:,} and {counted:,} do not agree")


def _check_base(path: Path, base_logits: dict[str, list[Tensor]]) -> None:
    """Hold a method folder to its base, whose own logits are computed for the first folder that has it."""
    folder = MethodFolder.at(path)
    folder.check_base()
    model, base = folder.load(), folder.run.config.model  # holds the base to its hashes
    if folder.method.definition.widens:
        prompts, name = sample_ids(folder.run.base_tokenizer), base.model_dump_json()
        if name not in base_logits:
            base_logits[name] = own_logits(placed(load_any_base(base)), prompts)
        check_preservation(model, prompts, base_logits[name])


def _architecture(folder: Path) -> str | None:
    config = folder / "config.json"
    return next(iter(read_json(config).get("architectures") or []), None) if config.is_file() else None


def _check_joined(folder: Path) -> None:
    report = JoinReport.load(folder)
    model = placed(load_written(JoinedForCausalLM, folder)).eval()
    now = record_base(model.base, ModelConfig(base=report.base)).content_sha256
    if now != report.base_sha256:
        raise VerificationError(f"{folder}: its base is SHA-256 {now[:12]}, joined was {report.base_sha256[:12]}")
    num_old = model.base.config.vocab_size  # it lacks new tokens: others in their place
    prompts = [ids % num_old for ids in sample_ids(load_tokenizer(ModelConfig(base=str(folder))))]
    alone = [model.of_all_tokens(0, logits) for logits in own_logits(model.base, prompts)]
    with torch.no_grad():
        heads = [model.routed_logits(model.final_states(ids, preserved=True))[0] for ids in prompts]
    if not all(torch.equal(*pair) for pair in zip(heads, alone, strict=True)):
        raise PreservationError("the base logits are not preserved")


def _check_log(folder: Path) -> None:
    """Hold the log to `final/`: its steps in order, no more of them between two records than are logged at once."""
    state, config = TrainState.load(folder), load_config(folder / "scale.yaml")
    metrics = RunFolder(folder.parent).metrics
    records = [record for record in read_records(metrics) if not place_of(record)[1]]
    skipped = [record["step"] for record in records if "skipped" in record and record["step"] <= state.step]
    logged = [record for record in records if "skipped" not in record]
    if damaged := [record["step"] for record in logged if not isinstance(record.get("log_every_steps"), int)]:
        raise VerificationError(f"{metrics}: step {damaged[0]}: damaged, its log_every_steps is not there")
    before, every = 0, logged[0]["log_every_steps"] if logged else config.train.log_every_steps
    for record in records:
        step, now_every = record["step"], record.get("log_every_steps", every)
        if step <= before:
            raise VerificationError(f"{metrics}: step {step} is there twice, or out of order")
        if step - before > max(every, now_every):  # a resume may have changed it
            raise VerificationError(f"{metrics}: a step between {before} and {step} is missing")
        before, every = step, now_every
    chosen = config.train.max_forgetting is not None  # among the evaluations: the log goes on after it
    if before != (last := config.train.max_steps if chosen else state.step):
        raise VerificationError(f"{metrics}: step {last} is missing")
    if len(skipped) != state.skipped_steps:
        raise VerificationError(f"{metrics}: {len(skipped)} steps left out, position.json has {state.skipped_steps}")
    for record in logged:
        if record["step"] == state.step and record["num_tokens"] != state.num_tokens:
            raise VerificationError(f"{metrics}: has {record['num_tokens']:,} tokens, not {state.num_tokens:,}")


def _check_export(check: FolderCheck) -> None:
    config = load_config(check.folder / "scale.yaml")
    run = RunFolder(check.folder.parent.parent)
    if not (run.final / MANIFEST).is_file():
        check.unchecked.append("parity: the trained model is not beside it")
        return
    here: RunConfig = config.model_copy(update={"output_dir": run.root})
    _hold(check, "parity", lambda: check_written_export(here, check.folder))
