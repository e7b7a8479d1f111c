"""`METHODS` lists every method by its name; no other module asks which method it has."""

from __future__ import annotations

from typing import Any

from scale_cli.methods.adept import Adept
from scale_cli.methods.full import Freeze, Full
from scale_cli.methods.llama_pro import LlamaPro
from scale_cli.methods.lora import Lora
from scale_cli.methods.method import Method
from scale_cli.methods.osf import Osf
from scale_cli.methods.widened import Adapt, Preserve, Route

_ALL = (Preserve(), Adapt(), Route(), Full(), Lora(), Osf(), Freeze(), LlamaPro(), Adept())
METHODS: dict[str, Method[Any]] = {method.name: method for method in _ALL}
