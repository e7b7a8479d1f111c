"""Every method at one budget, from one base, on one corpus, with one seed; then the report that compares them.

    python scripts/all_methods.py [CONFIG] [KEY.SUB=VALUE]...

CONFIG is configs/petitions.yaml where none is named. Runs land in output_dir/VARIANT, the comparison in
output_dir/comparison; what is finished is not run again.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scale_cli.config.load import load_config

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


def scale(*words: str) -> None:
    """Run one verb in a process of its own, so that each run's peak memory is its own; stop where it fails."""
    finished = subprocess.run([sys.executable, "-m", "scale_cli", *words], check=False)
    if finished.returncode:
        sys.exit(finished.returncode)


def main() -> None:
    """Run all methods and compare them."""
    given = sys.argv[1:]
    path = given.pop(0) if given and "=" not in given[0] else "configs/petitions.yaml"
    root = load_config(Path(path), given).output_dir
    for variant, lr in LEARNING_RATES.items():
        print(f"==== {variant}", flush=True)
        # The top layer collaborates in Route, so that it differs from Preserve served with a router.
        layers = "top:1" if variant == "route" else "null"
        method = [f"method.variant={variant}", f"method.collaboration.layers={layers}", f"train.lr={lr}"]
        folders = [f"output_dir={root / variant}", f"corpus.cache_dir={root / 'tokens'}"]
        scale("run", path, *method, *given, *folders)
    scale("compare", *(str(root / variant) for variant in LEARNING_RATES), "--output", str(root / "comparison"))


if __name__ == "__main__":
    main()
