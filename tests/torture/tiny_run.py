"""A run of a second: a random Llama, 12 steps of 4 micro-batches, several epochs, evaluations, a checkpoint every 3."""

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open
from torch import Tensor

from scale_cli.commands.verify import verify
from scale_cli.runs.folder import RunFolder
from scale_cli.storage.atomic import MANIFEST, file_sha256, read_json, verify_folder
from scale_cli.upscale.base_hashes import tensor_sha256
from scripts.from_scratch import train_tokenizer, write_base
from tests.small_runs import write_config
from tests.torture.faults import Fault
from tests.torture.verbs import Ended, Hook, Verb, run_verb, start_group
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


CONFIG = """
method: {variant: route, collaboration: {layers: 'top:1'}}
corpus:
  sources:
    - {name: one, language: ko, path: ROOT/one.txt}
    - {name: two, language: ko, path: ROOT/two.txt, weight: 0.5}
train:
  max_steps: 12
  global_batch_size: 4
  micro_batch_size: 1
  lr: 0.003
  warmup_steps: 3
  log_every_steps: 1
  save_every_steps: 3
  keep_checkpoints: 2
  eval_every_steps: 4
evaluation:
  bootstrap_resamples: 100
  perplexity:
    - {name: held, language: ko, path: ROOT/held-out.txt, role: acquisition}
    - {name: kept, language: ko, path: ROOT/one.txt, role: retention}
export: {format: plain}
"""


def write_base_and_texts(root: Path, **sizes: Any) -> None:
    """Write a base model, two corpora to train on and one held out."""
    words = random.Random(0)
    for name, num_documents in (("one", 14), ("two", 9), ("held-out", 6)):
        documents = [
            " ".join(str(words.randrange(40)) for _ in range(words.randrange(3, 20)))
            for _ in range(num_documents)
        ]
        (root / f"{name}.txt").write_text("\n\n".join(documents) + "\n")
    tokenizer = train_tokenizer([(root / "one.txt").read_text()], 280)
    write_base(root / "base", tiny_llama(vocab_size=len(tokenizer), **sizes), tokenizer)


@dataclass(frozen=True)
class Runs:
    """Runs of one config, each in a folder of its own beside the base and the corpora."""

    root: Path
    overrides: tuple[str, ...] = ()  # of the config

    def folder(self, name: str) -> RunFolder:
        return RunFolder(self.root / name)

    def config(self, name: str) -> Path:
        return write_config(
            self.root,
            self.root / "base",
            name,
            output_dir=str(self.root / name),
            **yaml.safe_load(CONFIG.replace("ROOT", str(self.root))),
        )

    def arguments(self, verb: str, name: str) -> list[str]:
        resume = ["--resume", "auto"] if verb == "train" else []
        return [verb, str(self.config(name)), *self.overrides, *resume]

    def start(self, name: str) -> Verb:
        return Verb(*self.arguments("train", name))

    def start_two(self, name: str) -> list[Verb]:
        return start_group(*self.arguments("train", name), num_processes=2)

    def do(self, verb: str, name: str, hook: Hook | None = None) -> Ended:
        """Run a verb that has to end well."""
        ended = run_verb(*self.arguments(verb, name), hook=hook)
        assert ended.exit_code == 0, ended.printed
        return ended

    def finish_as(self, whole: str, name: str) -> None:
        """Train to the end, undisturbed, and compare with another run."""
        self.do("train", name)
        assert_same(self.folder(name), self.folder(whole))

    def copy(self, name: str, copied: str) -> RunFolder:
        """Return a copy of a run, in place of what is there."""
        shutil.rmtree(self.root / copied, ignore_errors=True)
        shutil.copytree(self.root / name, self.root / copied)
        return self.folder(copied)

    def upscaled(self, name: str) -> RunFolder:
        """Return a run of which only `scale upscale` is done."""
        return self.copy("upscaled-once", name)

    def midway(self, name: str) -> RunFolder:
        """Return a run as it was when it had just saved its middle checkpoint, but for the log."""
        run = self.copy("kept", name)
        shutil.rmtree(run.final)
        for step in SAVED_STEPS:
            if step > MIDWAY:
                shutil.rmtree(run.checkpoint(step))
        return run


def outcome(run: RunFolder) -> dict[str, Any]:
    """Return all that has to be the same in two runs, whatever happened to them on the way."""
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    position = read_json(run.final / "position.json")
    names = ("trained.safetensors", "token_ledger.json", "corpora.json")
    last = sorted(run.checkpoint(MAX_STEPS).rglob("*.safetensors"))
    return {
        "metrics": [
            {key: value for key, value in record.items() if key not in CLOCK} for record in records
        ],
        "position": {key: value for key, value in position.items() if key not in CLOCK},
        "final": {name: file_sha256(run.final / name) for name in names},
        # In what order a file holds its tensors is no matter.
        "moments": {
            file.name: {name: tensor_sha256(t) for name, t in _tensors(file)} for file in last
        },
    }


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 (not a dict)


def assert_same(run: RunFolder, whole: RunFolder) -> None:
    """Check that a run ended as another did, that all its folders are whole, and that nothing else is there."""
    assert outcome(run) == outcome(whole)
    for manifest in run.root.rglob(MANIFEST):
        verify_folder(manifest.parent)
    verify(run.final)
    rubbish = [path for path in run.root.rglob(".*") if not path.name.endswith(".progress.json")]
    assert not rubbish, rubbish


# A verb that is disturbed, and comes to the same in the end.


WRITTEN_BY = {"prepare": "tokens", "evaluate": "evaluation", "export": "export"}


def beginning(runs: Runs, verb: str) -> RunFolder:
    """Return a run in which a verb is the next one."""
    if verb == "train":
        return runs.midway("failing")
    if verb == "prepare":
        run = runs.upscaled("failing")
        shutil.rmtree(run.tokens)  # which upscale fills
        return run
    return runs.copy("whole", "failing")


def hashes(folder: Path) -> dict[str, str]:
    """Return what has to be the same in two results: all but the config, which names its folder, its hash, and
    the pages of a report, which say how long it took.

    How far a tokenisation had come may stay written down after its end, where the end was disturbed.
    """
    return {
        file.relative_to(folder).as_posix(): file_sha256(file)
        for file in sorted(folder.rglob("*"))
        if file.is_file()
        and file.name not in (MANIFEST, "scale.yaml", "report.md", "report.html")
        and file.suffixes != [".progress", ".json"]
    }


def undisturbed(runs: Runs, verb: str) -> list[str]:
    """Let a verb do in `undisturbed` what it does when nothing is wrong; return its kinds of calls on the disk."""
    run, counted = beginning(runs, verb), runs.root / "calls.jsonl"
    runs.do(verb, "failing", Fault(run.root, 0, counted=counted))
    runs.copy("failing", "undisturbed")
    return [json.loads(line)[0] for line in counted.read_text().splitlines()]


def assert_as_undisturbed(runs: Runs, verb: str) -> None:
    """Compare what a verb has left with what it leaves undisturbed."""
    if verb == "train":
        assert_same(runs.folder("failing"), runs.folder("whole"))
        return
    failing, expected = (runs.root / run / WRITTEN_BY[verb] for run in ("failing", "undisturbed"))
    assert hashes(failing) == hashes(expected) != {}
    verify(failing)
