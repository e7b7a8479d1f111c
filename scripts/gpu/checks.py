"""Every verb on the device: `python -m scripts.gpu.checks [--small] [--only PART,...] [--list]`.

Preservation, waits for the device, isolated documents, new tokens, evaluation, and an export's peak. The parts after
`base` need its files; those after `train` need its run. A compiled run comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scripts.gpu.parts import Part, main


def parts_of(output: Path, small: bool) -> Sequence[Part]:
    """Return the parts; runs land in OUTPUT/runs/."""
    sizes = ["--layers", "2", "--hidden", "256", "--vocabulary", "8192"] if small else []
    config = ["-m", "scripts.gpu.verbs", str(output), *(["--small"] if small else [])]
    return [
        Part("base", 120, ["-m", "scripts.random_base", str(output), *sizes]),
        Part("train", 120, [*config, "upscale,train"]),
        Part("evaluate", 60, [*config, "evaluate"]),
        Part("export", 60, [*config, "export"]),
        Part("waits", 60, [*config, "upscale,train", "--run", "waits", "--warn-of-waits"]),
        Part("full", 60, [*config, "upscale,train", "--run", "full", "method.variant=full"]),
        Part(
            "isolated",
            60,
            [*config, "upscale,train", "--run", "isolated", "corpus.isolate_documents=true"],
        ),
        Part("muon", 60, [*config, "upscale,train", "--run", "muon", "train.optimiser=muon"]),
        Part(
            "compiled",
            120,
            [*config, "upscale,train", "--run", "compiled", "train.compile=true"],
        ),
    ]


if __name__ == "__main__":
    main((__doc__ or "").splitlines()[0], parts_of)
