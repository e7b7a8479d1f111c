"""What an export's config.json says of the base that it does not hold: `scale_router`, checked.

Servers read it before torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from scale_cli.config.load import checked
from scale_cli.config.schema import Dtype
from scale_cli.errors import BaseModelError, ConfigError
from scale_cli.methods.stream_kinds import ROUTER, STREAM_KINDS
from scale_cli.model.script_prior import PriorByScript
from scale_cli.values import Section

_KINDS = [kind.name for kind in STREAM_KINDS.values() if not kind.holds_base]

Share = Annotated[float, Field(gt=0.0, lt=1.0)]


class RouterKeys(Section):
    """Which base a model is routed with, and how."""

    kind: str
    base: str = Field(min_length=1)
    revision: str | None = None
    dtype: Dtype = "float32"
    sha256: str | None = None  # None: not known
    prior: Share
    script_prior: Share | None = None
    script: list[list[int]] = Field(default=[])

    @property
    def by_script(self) -> PriorByScript:
        return PriorByScript(self.prior, self.script_prior, self.script)


def router_keys_of(name: str, config: Mapping[str, Any]) -> RouterKeys | None:
    """Return what a model's config.json says; None if it says nothing, or the model holds its base.

    BaseModelError: the kind is unknown, or another key is missing or wrong.
    """
    router = config.get(ROUTER)
    if router is None or (isinstance(router, dict) and "stream_sizes" in router):
        return None
    where = f"{name}: config.json: {ROUTER}"
    kind = router.get("kind") if isinstance(router, dict) else router
    if kind not in _KINDS:
        raise BaseModelError(f"{where}.kind is {kind!r}; known are {' and '.join(_KINDS)}")
    try:
        return checked(RouterKeys, dict(router), where)
    except ConfigError as error:
        raise BaseModelError(str(error)) from None
