"""Every verb on the device: `python -m scripts.gpu.checks [--small] [--only PART,...] [--list]`.

Preservation, a run that is killed and resumed, evaluation, an export's peak, isolated documents, waits for the device.
The parts after `base` need its files; `evaluate` and `export` need the run of `train`. A compiled run comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scripts.gpu.parts import Part, main

_BUDGET_S = 150


def parts_of(output: Path, small: bool) -> Sequence[Part]:
    """Return the parts; runs land in OUTPUT/runs/."""
    sizes = ["--layers", "2", "--hidden", "256", "--vocabulary", "8192"] if small else []
    config = ["-m", "scripts.gpu.verbs", str(output), *(["--small"] if small else [])]
    resume = ["-m", "scripts.gpu.resume", str(output), *(["--small"] if small else [])]
    return [
        Part("base", 60, ["-m", "scripts.random_base", str(output), *sizes]),
        Part("train", 60, [*config, "upscale,train"]),
        Part("killed", 75, resume),
        Part("evaluate", 30, [*config, "evaluate"]),
        Part("export", 40, [*config, "export"]),
        Part(
            "isolated",
            60,
            [*config, "upscale,train", "--run", "isolated", "corpus.isolate_documents=true"],
        ),
        Part("waits", 40, [*config, "upscale,train", "--run", "waits", "--warn-of-waits"]),
        Part("full", 40, [*config, "upscale,train", "--run", "full", "method.variant=full"]),
        Part("muon", 40, [*config, "upscale,train", "--run", "muon", "train.optimiser=muon"]),
        Part(
            "compiled",
            120,
            [*config, "upscale,train", "--run", "compiled", "train.compile=true"],
        ),
    ]


if __name__ == "__main__":
    main((__doc__ or "").splitlines()[0], parts_of, _BUDGET_S)
