from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def in_full(pytestconfig: pytest.Config) -> bool:
    """Whether this is `make torture`, and not the shortened form in the normal tests."""
    return bool(pytestconfig.getoption("--torture"))
