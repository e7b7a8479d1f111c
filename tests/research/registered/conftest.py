"""The small run that training's own tests have."""

from tests.training.conftest import make_config

__all__ = ["make_config"]
