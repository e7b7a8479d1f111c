"""Help, and what is wrong with a config, are told at once: nothing heavy is imported for them."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from transformers import LlamaConfig

from tests.small_runs import write_config

HEAVY = {
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "huggingface_hub",
    "numpy",
    "pyarrow",
    "scipy",
}
STEPS = """
import contextlib, io, json, sys
from scale_cli.cli import app
from scale_cli.errors import ConfigError

after = {}
verbs = [command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands]
with contextlib.redirect_stdout(io.StringIO()):
    for arguments in ([], *([verb] for verb in verbs)):
        app([*arguments, "--help"], standalone_mode=False)
    after["help"] = sorted(sys.modules)
    for verb in ("plan", "upscale", "prepare", "train", "evaluate", "export", "run"):
        with contextlib.suppress(ConfigError):
            app([verb, "/absent.yaml"], standalone_mode=False)
            raise AssertionError(f"{verb} takes a config that is not there")
    after["a bad config"] = sorted(sys.modules)
    import scale_cli.commands.compare
    after["compare"] = sorted(sys.modules)
json.dump(after, sys.stdout)
"""


def run_python(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=120, cwd=folder
    )


INTERRUPTED = """
import os, signal, sys
from scale_cli.__main__ import main

class Interrupts:
    def find_spec(self, name, *_):
        if name == "scale_cli.cli":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
main()
"""


def test_ctrl_c_while_the_command_line_is_imported_leaves_no_traceback() -> None:
    done = run_python("-c", INTERRUPTED)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


# What is missing, by verb, and what is told before torch is imported.
MISSING = [
    ("plan", ["model.base=/absent"], "not a folder with a config.json"),
    ("upscale", ["model.base=/absent"], "not a folder with a config.json"),
    ("upscale", [], "model.safetensors"),
    ("prepare", ["corpus.sources.0.path=/absent.txt"], "no file matches /absent.txt"),
    ("train", [], "run `scale upscale` first"),
    ("evaluate", [], "run `scale train` first"),
    ("export", [], "run `scale train` first"),
    ("run", ["model.base=/absent"], "not a folder with a config.json"),
    ("run", [], "model.safetensors"),
    ("run", ["train.lrr=1"], "unknown key"),
    (
        "run",
        ["evaluation.benchmarks=[arc_eesy]"],
        "lm-eval has no task 'arc_eesy' (did you mean arc_easy?)",
    ),
]
INIT = "init new.yaml --corpus {} --language ko --retention b --base {}"
ALONE = [
    ("generate /absent", "no such folder"),
    ("serve /absent", "no such folder"),
    ("verify /absent", "no such folder"),
    ("compare /absent --output /tmp/x", "no such folder"),
    (INIT.format("a", "/absent"), "not a folder"),
    (INIT.format("a", "base"), "model.safetensors"),
    (INIT.format("/a.txt", "whole"), "no file matches /a.txt"),
    ("init new.yaml --base whole --corpus news.txt", "--language: not given"),
]
REFUSALS = """
import json, sys
from scale_cli.cli import app
from scale_cli.errors import ScaleError

sys.stdin = None
told = []
for arguments in json.loads(sys.argv[1]):
    try:
        app(arguments, standalone_mode=False)
        told.append(["accepted", []])
    except ScaleError as error:
        told.append([str(error), [name for name in ("torch", "transformers") if name in sys.modules]])
json.dump(told, sys.stdout)
"""


def test_every_verb_refuses_what_is_missing_before_torch_is_imported(tmp_path: Path) -> None:
    config = write_config(tmp_path, tmp_path / "base")
    for folder in ("base", "whole"):
        LlamaConfig().save_pretrained(tmp_path / folder)
    save_file({"a": np.zeros(1)}, tmp_path / "whole" / "model.safetensors")
    asked = [([verb, str(config), *more], told) for verb, more, told in MISSING]
    asked += [(line.split(), told) for line, told in ALONE]
    words = json.dumps([arguments for arguments, _ in asked])
    done = run_python("-c", REFUSALS, words, folder=tmp_path)
    for (arguments, told), (error, heavy) in zip(asked, json.loads(done.stdout), strict=True):
        assert told in error, arguments
        assert not heavy, arguments


def test_a_step_imports_nothing_that_it_does_not_use() -> None:
    """Each in turn, in one process: what one step has imported, the next one finds."""
    told = json.loads(run_python("-c", STEPS).stdout)
    after = {step: set(names) for step, names in told.items()}
    unused = {
        "help": HEAVY,
        "a bad config": HEAVY,
        "compare": {"torch", "transformers", "matplotlib", "scipy.stats"},
    }
    for step, absent in unused.items():
        assert {"typer", "scale_cli.cli"} <= after[step]
        assert not after[step] & absent, step


def test_libraries_are_imported_without_full_garbage_collections_and_stay_out_of_later_ones() -> (
    None
):
    counting = """
import gc
from scale_cli.console import import_libraries

def full_collections():
    return gc.get_stats()[2]["collections"]

before = full_collections()
import_libraries()
frozen = gc.get_freeze_count()
import_libraries()
more = gc.get_freeze_count() - frozen  # what is freed leaves
print(full_collections() - before, frozen > 100_000, -1_000 < more <= 0, gc.isenabled())
"""
    assert run_python("-c", counting).stdout.split() == ["0", "True", "True", "True"]
