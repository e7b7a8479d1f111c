"""Wheels that a borrowed machine lacks: `python -m scripts.gpu.wheels FOLDER [--python 3.12]`.

Such a machine has torch and no network. FOLDER gets the rest of what `scale` needs, at the versions
installed here. On the machine, in the checkout:

    python3 -m pip install --no-index --no-deps --target /tmp/site FOLDER/*.whl
    PYTHONPATH=$PWD:/tmp/site python3 -m scripts.gpu.speed
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Collection, Iterator
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_PACKAGE = "scale-cli"
_EXTRAS = ("lora",)
# Large, and on every machine that is made for torch; of other versions than ours they do as well.
_ON_THE_MACHINE = ("torch", "numpy", "pandas", "pyarrow", "scipy", "safetensors", "setuptools")
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def main() -> None:
    """Download the wheels."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="the machine's version of Python")
    parser.add_argument(
        "--has", default=",".join(_ON_THE_MACHINE), help="comma-separated packages that are there"
    )
    given = parser.parse_args()

    names = needed([_PACKAGE], _EXTRAS, has=given.has.split(",")) - {_PACKAGE}
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={given.python}"]
    command += [f"--platform={platform}" for platform in _PLATFORMS]
    command += ["--dest", str(given.folder)]
    command += [f"{name}=={version(name)}" for name in sorted(names)]
    subprocess.run(command, check=True)

    size = sum(file.stat().st_size for file in given.folder.glob("*.whl"))
    print(f"{len(names)} wheels, {size / 1e6:.1f} MB: {given.folder}")


def needed(packages: Collection[str], extras: Collection[str], has: Collection[str]) -> set[str]:
    """Return the installed packages that some packages need, and these, without what is there.

    Args:
        packages: what to start with.
        extras: of these packages, not of what they need.
        has: packages that are there; what only they need is left out.
    """
    there = {canonicalize_name(name) for name in has}
    found: set[str] = set()
    waiting: list[str] = [canonicalize_name(name) for name in packages]
    while waiting:
        name = waiting.pop()
        if name in found or name in there:
            continue
        try:
            waiting += _requirements(name, extras if name in packages else ())
        except PackageNotFoundError:  # for another system or Python than this one
            continue
        found.add(name)
    return found


def _requirements(name: str, extras: Collection[str]) -> Iterator[str]:
    for line in distribution(name).requires or ():
        requirement = Requirement(line)
        asked = [{"extra": extra} for extra in ("", *extras)]
        if requirement.marker is None or any(map(requirement.marker.evaluate, asked)):
            yield canonicalize_name(requirement.name)


if __name__ == "__main__":
    main()
