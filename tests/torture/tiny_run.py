"""A run of a second: a random Llama, 12 steps of 4 micro-batches, several epochs, evaluations, a checkpoint every 3."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from scale_cli.commands.verify import verify
from scale_cli.config.load import dump_config
from scale_cli.config.schema import RunConfig
from scale_cli.storage.atomic import MANIFEST, verify_folder
from scale_cli.storage.layout import RunFolder
from scale_cli.upscale.base import tensor_sha256
from scripts.from_scratch import train_tokenizer, write_base
from tests.torture.verbs import Verb, run_verb, start_group
from tests.widening import tiny_llama

# What two identical runs may differ in.
CLOCK = (
    "elapsed_s",
    "tokens_per_s",
    "data_wait_s",
    "peak_memory_bytes",
    "stepping_s",
    "evaluating_s",
    "saving_s",
)
MAX_STEPS, SAVED_STEPS = 12, (3, 6, 9, 12)
MIDWAY = 6


def write_base_and_texts(root: Path, **sizes: Any) -> None:
    """Write a base model, two corpora to train on and one held out."""
    words = random.Random(0)
    for name, num_documents in (("one", 14), ("two", 9), ("held-out", 6)):
        documents = [
            " ".join(str(words.randrange(40)) for _ in range(words.randrange(3, 20))) for _ in range(num_documents)
        ]
        (root / f"{name}.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    tokenizer = train_tokenizer([(root / "one.txt").read_text(encoding="utf-8")], 280)
    write_base(root / "base", tiny_llama(vocab_size=len(tokenizer), **sizes), tokenizer)


def write_config_of_two_steps(root: Path, output: str, sources: list[Any], held_out: list[Any]) -> Path:
    """Write that base, those corpora, and the config of a run that trains all of the base on them."""
    write_base_and_texts(root)
    tree = {
        "output_dir": root / output,
        "model": {"base": str(root / "base")},
        "method": {"variant": "full"},
        "corpus": {"sequence_length": 16, "sources": sources},
        "train": {"max_steps": 2, "global_batch_size": 4},
        "evaluation": {"bootstrap_resamples": 100, "perplexity": held_out},
    }
    path = root / "config.yaml"
    path.write_text(dump_config(RunConfig.model_validate(tree)), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Runs:
    """Runs of one config, each in a folder of its own below `root`.

    Args:
        root: of the runs.
        inputs: where the base, the corpora and what `scale upscale` made of them are.
        overrides: of the config.
    """

    root: Path
    inputs: Path
    overrides: tuple[str, ...] = ()

    def folder(self, name: str) -> RunFolder:
        return RunFolder(self.root / name)

    def config(self, name: str) -> Path:
        path = self.root / f"{name}.yaml"
        source = {"language": "ko"}
        config = RunConfig.model_validate(
            {
                "output_dir": self.root / name,
                "model": {"base": str(self.inputs / "base")},
                "method": {"variant": "route", "collaboration": {"layers": "top:1"}},
                "corpus": {
                    "sequence_length": 16,
                    "sources": [
                        {"name": "one", "path": str(self.inputs / "one.txt"), **source},
                        {"name": "two", "path": str(self.inputs / "two.txt"), "weight": 0.5, **source},
                    ],
                },
                "train": {
                    "max_steps": MAX_STEPS,
                    "global_batch_size": 4,
                    "micro_batch_size": 1,
                    "lr": 3e-3,
                    "warmup_steps": 3,
                    "log_every_steps": 1,
                    "save_every_steps": 3,
                    "keep_checkpoints": 2,
                    "eval_every_steps": 4,
                },
                "evaluation": {
                    "bootstrap_resamples": 100,
                    "perplexity": [
                        {"name": "held", "path": str(self.inputs / "held-out.txt"), "role": "acquisition", **source},
                        {"name": "kept", "path": str(self.inputs / "one.txt"), "role": "retention", **source},
                    ],
                },
                "export": {"format": "llama"},
            }
        )
        path.write_text(dump_config(config), encoding="utf-8")
        return path

    def arguments(self, verb: str, name: str) -> list[str]:
        resume = ["--resume", "auto"] if verb == "train" else []
        return [verb, str(self.config(name)), *self.overrides, *resume]

    def start(self, name: str, **options: Any) -> Verb:
        return Verb(*self.arguments("train", name), **options)

    def start_two(self, name: str) -> list[Verb]:
        return start_group(*self.arguments("train", name), num_processes=2)

    def finish(self, name: str) -> None:
        """Run to the end, undisturbed."""
        ended = run_verb(*self.arguments("train", name))
        assert ended.exit_code == 0, ended.printed

    def upscaled(self, name: str) -> RunFolder:
        """Return a run of which only `scale upscale` is done."""
        shutil.copytree(self.inputs / "upscaled-once", self.root / name)
        return self.folder(name)

    def midway(self, whole: str, name: str) -> RunFolder:
        """Return a copy of a whole run as it was when it had just saved its middle checkpoint, but for the log."""
        shutil.copytree(self.root / whole, self.root / name)
        run = self.folder(name)
        shutil.rmtree(run.final)
        for folder in run.checkpoints.iterdir():
            if int(folder.name.removeprefix("step-")) > MIDWAY:
                shutil.rmtree(folder)
        return run


def outcome(run: RunFolder) -> dict[str, Any]:
    """Return all that has to be the same in two runs, whatever happened to them on the way."""
    records = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    last = run.checkpoint(MAX_STEPS)
    position = json.loads((run.final / "position.json").read_text(encoding="utf-8"))
    return {
        "metrics": [{key: value for key, value in record.items() if key not in CLOCK} for record in records],
        "position": {key: value for key, value in position.items() if key not in CLOCK},
        "weights": _hash(run.final / "trained.safetensors"),
        "moments": _hashes_of_state(last),
        "ledger": _hash(run.final / "token_ledger.json"),
        "corpora": _hash(run.final / "corpora.json"),
    }


def _hashes_of_state(checkpoint: Path) -> dict[str, dict[str, str]]:
    """Return the hash of every tensor; in what order a file holds them is no matter."""
    return {file.name: _hashes_of_tensors(file) for file in sorted(checkpoint.rglob("*.safetensors"))}


def _hashes_of_tensors(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    return {name: tensor_sha256(tensor) for name, tensor in tensors.items()}


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def assert_same(run: RunFolder, whole: RunFolder) -> None:
    """Check that a run ended as another did, that all its folders are whole, and that nothing else is there."""
    assert outcome(run) == outcome(whole)
    for manifest in run.root.rglob(MANIFEST):
        verify_folder(manifest.parent)
    verify(run.final).require()
    rubbish = [path for path in run.root.rglob(".*") if not path.name.endswith(".progress.json")]
    assert not rubbish, rubbish
