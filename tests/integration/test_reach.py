"""`make reach`, at a shape that takes a minute."""

import re
import subprocess
import sys
from pathlib import Path

import torch

from scale_cli.export.parity import TOLERANCES


def test_every_verb_is_taken_through_a_kill_and_its_export_loads_in_both_ways(
    tmp_path: Path,
) -> None:
    shape = ["--layers=2", "--hidden=256", "--vocabulary=8192", "--steps=20"]
    command = [sys.executable, "-m", "scripts.reach", str(tmp_path / "reach"), *shape]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=1800, check=False
    )  # a CPU may lack bfloat16
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "resuming" in ended.stdout
    assert ended.stdout.index("\nLlamaForCausalLM") < ended.stdout.index(
        "\nScaleRoutedLlamaForCausalLM"
    )
    rows = re.findall(r"^\| ([a-z ,\d]+?) \| +(\d+) \|", ended.stdout, re.MULTILINE)
    assert [name for name, _ in rows][:4] == [
        "plan",
        "upscale",
        "train, killed after step 1",
        "train, resumed",
    ]
    for way in ("plainly", "routed"):
        found = re.search(rf"the export, {way}: (\S+) nats from the trained model's", ended.stdout)
        assert found is not None and float(found[1]) <= TOLERANCES[torch.bfloat16].nats
