"""Every method at one budget, from one base, on one corpus, with one seed; then the report that compares them.

    python scripts/all_methods.py [CONFIG] [KEY.SUB=VALUE]...

CONFIG is configs/petitions.yaml where none is named. Runs land in output_dir/VARIANT, the comparison in
output_dir/comparison; what is finished is not run again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers.utils import logging

from scale_cli.comparison.run import compare
from scale_cli.config.load import load_config
from scale_cli.pipeline import run_pipeline

# Rates at which each learns in a short run (the paper's are for 60 B tokens); they are not tuned one against another.
LEARNING_RATES = {
    "full": "2e-3",
    "lora": "2e-3",
    "freeze": "2e-3",
    "llama-pro": "2e-3",
    "preserve": "5e-3",
    "adapt": "3e-3",
    "route": "3e-3",
}


def main() -> None:
    """Run all methods and compare them."""
    given = sys.argv[1:]
    path = Path(given.pop(0) if given and "=" not in given[0] else "configs/petitions.yaml")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    root = load_config(path, given).output_dir
    folders = []
    for variant, lr in LEARNING_RATES.items():
        print(f"==== {variant}", flush=True)
        layers = "top:1" if variant == "route" else "null"
        overrides = [f"method.variant={variant}", f"method.collaboration.layers={layers}", f"train.lr={lr}"]
        config = load_config(
            path, [*overrides, *given, f"output_dir={root / variant}", f"corpus.cache_dir={root / 'tokens'}"]
        )
        run_pipeline(config, print)
        folders.append(config.output_dir)
    print("\n".join(compare(folders, root / "comparison").lines()))


if __name__ == "__main__":
    main()
