"""The config's JSON Schema, by which editors complete a config and check it while it is written."""

from __future__ import annotations

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from scale_cli.config.values import Section


class _Untitled(GenerateJsonSchema):
    """Without titles, which would say every key's name again."""

    def field_title_should_be_set(self, _schema: Any) -> bool:
        return False


def json_schema(config: type[Section]) -> dict[str, Any]:
    """Return the JSON Schema of a kind of config.

    It knows every key, type, range and default. Which keys go together only `scale` itself knows.
    """
    return {"$schema": _Untitled.schema_dialect, **config.model_json_schema(schema_generator=_Untitled)}


def json_schema_text(config: type[Section]) -> str:
    """Return it as a file holds it."""
    return json.dumps(json_schema(config), indent=2, ensure_ascii=False) + "\n"
