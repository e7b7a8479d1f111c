"""The small runs and configs that the rooms' own tests have."""

from tests.export.conftest import trained_once, trained_run
from tests.training.conftest import make_config

__all__ = ["make_config", "trained_once", "trained_run"]
