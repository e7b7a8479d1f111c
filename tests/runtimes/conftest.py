from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def llama_cpp() -> Path:
    """llama.cpp's source, for its converter: `make runtimes` unpacks that of llama-cpp-python."""
    folder = Path(os.environ.get("LLAMA_CPP", ""))
    assert (folder / "convert_hf_to_gguf.py").is_file(), (
        "LLAMA_CPP: not llama.cpp's source; run `make runtimes`"
    )
    return folder


@pytest.fixture(scope="session")
def transformers_4() -> Path:
    """The Python of an environment with transformers 4.57: `make runtimes` makes one."""
    python = Path(os.environ.get("TRANSFORMERS_4", ""))
    assert python.is_file(), "TRANSFORMERS_4: no Python; run `make runtimes`"
    return python
