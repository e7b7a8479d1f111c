"""The commands of docs/serving.md, run on a small local base and corpus in the place of the hub's."""

import os
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import yaml

from tests.torture.verbs import run_verb

PAGE = Path(__file__).resolve().parents[1] / "docs" / "serving.md"
CONFIG = "configs/llama-3.2-1b-korean.yaml"
_SHELL = frozenset("$|&;<>`*~\\")  # what only a shell understands


_SMALL = """
corpus:
  sequence_length: 64
  sources:
    - name: petitions
      path: &korean SHARED/ko-petitions/valid.txt.xz
      language: ko
      weight: 0.9
      max_documents: 8
    - name: stories
      path: &english SHARED/en-tinystories/tinystories_val.txt
      language: en
      weight: 0.1
      role: replay
      skip_documents: 4
      max_documents: 8
train:
  max_steps: 6
  global_batch_size: 4
  micro_batch_size: 2
  warmup_steps: 2
  eval_every_steps: 3
evaluation:
  perplexity:
    - {name: stories, path: *english, language: en, role: retention, max_documents: 4}
    - {name: held-out, path: *korean, language: ko, role: acquisition, max_documents: 4}
  benchmarks: []
"""


def commands(section: str) -> list[str]:
    """Return the blocks of one section, in its order."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    assert blocks, section
    return blocks


def write_small_config(folder: Path, shared_data: Path) -> None:
    """Write the page's config as it is shipped, but for the base, the corpora and the sizes of the run."""
    config = yaml.safe_load((PAGE.parents[1] / CONFIG).read_text())
    config["model"]["base"] = str(shared_data / "ckpt-stories260K" / "hf")
    text = _SMALL.replace("SHARED", str(shared_data))
    for section, keys in yaml.safe_load(text).items():
        config[section] |= keys
    path = folder / CONFIG
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(config, allow_unicode=True))


def run(command: str, folder: Path, **environment: str) -> str:
    """Run one block as a reader would, and return what it printed.

    Where every line is a verb, each is a fork of a process that has imported everything, which saves their seconds.
    """
    lines = command.splitlines()
    if all(line.startswith("scale ") and not _SHELL & {*line} for line in lines):
        done = [run_verb(*shlex.split(line)[1:], hook=partial(os.chdir, folder)) for line in lines]
        assert all(ended.exit_code == 0 for ended in done), f"{command}\n{done}"
        return "".join(ended.printed for ended in done)
    scripts = str(Path(sys.executable).parent)
    given = {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        **environment,
    }
    ran = subprocess.run(
        ["bash", "-euc", command],
        cwd=folder,
        env=given,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout
