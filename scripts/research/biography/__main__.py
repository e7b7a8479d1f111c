"""The paper's controlled benchmark: teach synthetic people to every method, task by task; plot what each forgets.

python -m scripts.research.biography scripts/research/biography/configs/small.yaml [KEY.SUB=VALUE ...]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import scripts.research.registered  # noqa: F401  before the config is imported
from scale_cli.config.load import load_checked
from scale_cli.console import ended_in_one_message, quieten_libraries
from scale_cli.processes import refuse_several
from scale_cli.runs.folder import RunFolder
from scale_cli.terminal import log
from scripts.research.biography.config import BiographyConfig
from scripts.research.biography.run import run_biography


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        "python -m scripts.research.biography", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("config", type=Path, metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="KEY.SUB=VALUE")
    given = parser.parse_args()
    with ended_in_one_message():
        refuse_several(parser.prog)
        config = load_checked(BiographyConfig, given.config, given.overrides)
        RunFolder(config.output_dir).check()
        quieten_libraries()
        run_biography(config, log)


if __name__ == "__main__":
    main()
