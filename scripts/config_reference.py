"""Write the config's schema to docs/: a JSON Schema, and a page with every key (`make reference`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scale_cli.config.load import json_schema_text

DOCS = Path(__file__).parents[1] / "docs"
_HEAD = """\
# Every key of the config

Made from the code by `make reference`, held to it by a test. [configuration.md](configuration.md): what a config is.
An editor that knows YAML completes and checks keys by [run.schema.json](run.schema.json), which `scale schema` prints,
where a config begins with `# yaml-language-server: $schema=` and the place of that file.

| key | type | default | meaning |
|---|---|---|---|
"""


def files() -> dict[Path, str]:
    """Return the contents of the files in docs/, by path."""
    rows = "".join(f"| {' | '.join(row)} |\n" for row in _rows(json.loads(json_schema_text())))
    return {
        DOCS / "run.schema.json": json_schema_text(),
        DOCS / "configuration-reference.md": _HEAD + rows,
    }


def _rows(schema: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield key, type, default and meaning of every key that is not a section."""

    def resolved(node: dict[str, Any]) -> dict[str, Any]:
        node = node | schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        sections = [
            choice for choice in node.get("anyOf", []) if {"$ref", "properties"} & choice.keys()
        ]
        return node | resolved(sections[0]) if sections else node

    def walk(section: dict[str, Any], prefix: str) -> Iterator[tuple[str, str, str, str]]:
        for key, node in section["properties"].items():
            name, child = f"{prefix}{key}", resolved(node)
            item = resolved(child["items"]) if "items" in child else {}
            if "properties" in child:
                if "anyOf" in node:  # a section that may be null
                    default = "`null`" if node["default"] is None else "as below"
                    yield f"`{name}`", "a section", default, node["description"]
                yield from walk(child, f"{name}.")
                continue
            required = key in section.get("required", [])
            default = (
                "required"
                if required
                else f"`{json.dumps(node['default'])}`"
                if "default" in node
                else "by name"
            )
            yield (
                f"`{name}`",
                _type(child, item),
                default,
                node.get("description", "").replace("|", "\\|"),
            )
            if "properties" in item:
                yield from walk(item, f"{name}[].")

    yield from walk(schema, "")


def _type(node: dict[str, Any], item: dict[str, Any]) -> str:
    if choices := node.get("anyOf") or node.get("oneOf"):
        kinds = [
            _type(choice, choice.get("items", {}))
            for choice in choices
            if choice.get("type") != "null"
        ]
        return ", or ".join(dict.fromkeys(kinds))
    if "const" in node:
        return str(node["const"])
    if "enum" in node:
        return ", ".join(map(str, node["enum"]))
    if node.get("type") == "array":
        return "a list" if "properties" in item else f"a list of: {_type(item, {})}"
    words = {
        "string": "text",
        "integer": "whole number",
        "boolean": "true, false",
        "object": "a mapping",
    }
    return words.get(node["type"], node["type"]) + _range(node)


def _range(node: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {node[key]:,}" for key, sign in signs.items() if key in node]
    return f", {' and '.join(limits)}" if limits else ""


def main() -> None:
    """Write the files."""
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
