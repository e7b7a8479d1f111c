"""`METHODS` lists every method by its name; no other module asks which method it has."""

from __future__ import annotations

import sys
from typing import Any

from scale_cli.methods.freeze import Freeze
from scale_cli.methods.full import Full
from scale_cli.methods.given import Given
from scale_cli.methods.llama_pro import LlamaPro
from scale_cli.methods.lora import Lora
from scale_cli.methods.method import Method
from scale_cli.methods.recipes import RECIPES, Recipe
from scale_cli.methods.widened import Adapt, Preserve, Route

_ALL = (Preserve(), Adapt(), Route(), Full(), Lora(), Freeze(), LlamaPro(), Given())
METHODS: dict[str, Method[Any]] = {method.name: method for method in _ALL}


def register(*added: Method[Any] | type[Recipe]) -> None:
    """Add methods and recipes from outside the package; a config then has their names and keys.

    A recipe goes around those that are there already. The schema of the config reads the tables
    once, when it is imported, so a launcher calls this first: see `scripts/research/`.

    Raises:
        RuntimeError: the schema has been imported, or the name is taken.
    """
    if "scale_cli.config.training" in sys.modules:
        raise RuntimeError(
            "scale_cli.methods.register: call it before scale_cli.config is imported"
        )
    for new in added:
        if isinstance(new, Method):
            if new.name in METHODS:
                raise RuntimeError(f"scale_cli.methods.register: there is a method {new.name}")
            METHODS[new.name] = new
        else:
            if new.key in [recipe.key for recipe in RECIPES]:
                raise RuntimeError(f"scale_cli.methods.register: there is a recipe {new.key}")
            RECIPES.insert(0, new)
