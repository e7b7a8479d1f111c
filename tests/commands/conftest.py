"""The small runs and configs that the rooms' own tests have."""

from __future__ import annotations

from tests.export.conftest import trained_once, trained_run
from tests.join.conftest import runs
from tests.training.conftest import make_config

__all__ = ["make_config", "runs", "trained_once", "trained_run"]
