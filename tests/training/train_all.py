"""What several processes run in the tests: train some configs, one after another, so that they start only once."""

from __future__ import annotations

import sys
from pathlib import Path

from scale_cli.config.load import load_config
from scale_cli.processes import leave
from scale_cli.training.run import train

if __name__ == "__main__":
    for path in sys.argv[1:]:
        train(load_config(Path(path)), "auto", print)
    leave()
