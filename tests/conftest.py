from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The real models and corpora that lie beside the repository, or wherever SCALE_SHARED_DATA says."""
    beside = Path(__file__).resolve().parents[1] / "../shared/data"
    folder = Path(os.environ.get("SCALE_SHARED_DATA", beside)).resolve()
    if not folder.is_dir():
        message = f"{folder}: not there; set SCALE_SHARED_DATA"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return folder
