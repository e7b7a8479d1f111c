"""Help, and what is wrong with a config, are told at once: nothing heavy is imported for them."""

import json
import subprocess
import sys

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


def test_a_step_imports_nothing_that_it_does_not_use() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STEPS], capture_output=True, text=True, timeout=120, check=True
    )
    after = {step: set(names) for step, names in json.loads(done.stdout).items()}
    unused = {
        "help": HEAVY,
        "a bad config": HEAVY,
        "compare": {"torch", "transformers", "matplotlib", "scipy.stats"},
    }
    for step, absent in unused.items():
        assert {"typer", "scale_cli.cli"} <= after[step]
        assert not after[step] & absent, step
