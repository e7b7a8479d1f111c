"""The small runs and configs that the rooms' own tests have."""

from tests.export.conftest import trained_once, trained_run
from tests.training.conftest import make_config
from tests.vocabulary.conftest import few_characters

__all__ = ["few_characters", "make_config", "trained_once", "trained_run"]
