"""From a YAML file and `key.sub=value` overrides to a checked config, with errors that name the field."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails

from scale_cli.config.safe_yaml import dump, parse, read_text
from scale_cli.config.schema import RunConfig
from scale_cli.config.values import Section
from scale_cli.errors import ConfigError

AnyConfig = TypeVar("AnyConfig", bound=Section)
_MAX_ERRORS = 10
_LONGEST_QUOTE, _LONGEST_MESSAGE = 200, 300


def load_config(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read, override and check the config of a run; see `load_checked`."""
    return load_checked(RunConfig, path, overrides)


def load_checked(schema: type[AnyConfig], path: Path, overrides: list[str] | None = None) -> AnyConfig:
    """Read, override and check a config file."""
    tree = parse(read_text(path), str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a config is a mapping of keys to values, this is {_kind(tree)}")
    for override in overrides or []:
        _apply_override(tree, override)
    return checked(schema, tree, str(path), overrides or [])


def checked(schema: type[AnyConfig], tree: dict[str, Any], where: str, overrides: Sequence[str] = ()) -> AnyConfig:
    """Check what a config file, or a section of one, holds."""
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        described = (_describe(schema, detail) for detail in details)
        lines = list(dict.fromkeys(f"{_origin(line, where, overrides)}: {line}" for line in described))
        if len(lines) > _MAX_ERRORS:
            lines[_MAX_ERRORS:] = [f"{where}: and {len(lines) - _MAX_ERRORS:,} errors more"]
        raise ConfigError("\n".join(lines)) from None


def _origin(line: str, where: str, overrides: Sequence[str]) -> str:
    """Return where the value was given that a line, which begins with its key, speaks of."""
    place = line.partition(":")[0]
    for override in reversed(overrides):
        key = override.partition("=")[0]
        if place == key or place.startswith(f"{key}."):
            return f"override {_quoted(override)}"
    return where


def _quoted(text: str) -> str:
    """Return what the user wrote as one line, cut where it is long."""
    return repr(text) if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]!r}..."


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {_quoted(override)}: write it as key.sub=value")
    node: Any = tree
    for position, part in enumerate(parts[:-1]):
        node = _child(node, part, ".".join(parts[: position + 1]), override)
    leaf = parse(value, f"override {_quoted(override)}")
    if isinstance(node, list):
        node[_index(node, parts[-1], override)] = leaf
    else:
        node[parts[-1]] = leaf


def _child(node: Any, part: str, place: str, override: str) -> Any:
    key: Any = _index(node, part, override) if isinstance(node, list) else part
    child = node[key] if isinstance(node, list) else node.get(key)
    if child is None:  # absent, or an empty section in YAML
        child = {}
    elif not isinstance(child, dict | list):
        raise ConfigError(f"override {_quoted(override)}: {place} is {_kind(child)}, it has no keys")
    node[key] = child = copy(child)  # an alias of it elsewhere in the YAML is not overridden
    return child


def _index(node: list[Any], part: str, override: str) -> int:
    indices = {str(index): index for index in range(len(node))}
    if part not in indices:
        raise ConfigError(f"override {_quoted(override)}: {_quoted(part)} is not an index of a list of {len(node)}")
    return indices[part]


def _describe(schema: type[Section], detail: ErrorDetails) -> str:
    unknown_key = detail["type"] == "extra_forbidden"
    *sections, last = detail["loc"] or ("",)
    location = [part for part in sections if not _is_union_branch(part)]
    if unknown_key or not _is_union_branch(last):
        location.append(last)
    place = ".".join(_key(part) for part in location)
    if unknown_key:
        return f"{place}: unknown key{_did_you_mean(schema, location)}"
    if detail["type"] == "missing":
        return f"{place}: required, but not given"
    if detail["type"] == "model_type":
        return f"{place}: a section with keys of its own, not a plain value"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] != "value_error":
        message = message[0].lower() + message[1:]
    message = " ".join(message[:_LONGEST_MESSAGE].split())
    return f"{place}: {message}" if place else message


def _key(part: str | int) -> str:
    text = str(part)
    return text if text.isprintable() and len(text) <= _LONGEST_QUOTE else _quoted(text)


def _is_union_branch(part: str | int) -> bool:
    # Pydantic puts the tried branch of a union into the location; it is no key of the user's.
    return isinstance(part, str) and (part in ("str", "int") or "[" in part)


def _did_you_mean(schema: type[Section], location: list[str | int]) -> str:
    section: type[BaseModel] | None = schema
    for part in location[:-1]:
        if isinstance(part, int) or section is None:
            continue
        section = _section_of(section, part)
    if section is None:
        return ""
    close = difflib.get_close_matches(str(location[-1]), section.model_fields, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else f" (known here: {', '.join(section.model_fields)})"


def _section_of(section: type[BaseModel], key: str) -> type[BaseModel] | None:
    annotation: Any = section.model_fields[key].annotation
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _kind(value: object) -> str:
    names = {
        dict: "a mapping",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return "empty" if value is None else names.get(type(value), "something else")


def dump_config(config: Section) -> str:
    """Return the resolved config as YAML, every default written out."""
    return dump(config.model_dump(mode="json"))


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
