"""YAML as plain data and nothing else: safe tags only, of bounded size, every key once, no aliases."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from scale_cli.errors import ConfigError, one_line

_MAX_BYTES = 1 << 18
_MAX_DEPTH = 40
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


class _Loader(yaml.CSafeLoader):
    """Safe YAML in which a key stands once and `1e-4` is a number (to PyYAML, faithful to YAML 1.1, it is a string)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value[:40]!r} is there twice", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class _Dumper(yaml.CSafeDumper):
    """Safe YAML that quotes a string which that loader would read as a number (a git revision such as 1e10)."""


for _half in (_Loader, _Dumper):
    _half.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


def read_text(path: Path) -> str:
    """Read a config file, or the pipe it comes through."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)  # no more: it may be a device without an end
        if len(content) > _MAX_BYTES:
            raise ConfigError(f"{path}: more than {_MAX_BYTES:,} bytes, too many for a config")
        return content.decode()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({error})") from None


def parse(text: str, where: str) -> Any:
    """Return what a YAML text says, as plain data."""
    try:
        _check(text)
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{where}:{mark.line + 1}" if mark else where
        raise ConfigError(f"{place}: not valid YAML ({error.problem})") from None
    except Exception as error:  # PyYAML lets through what int(), a regex or a dict says of a scalar
        raise ConfigError(f"{where}: not valid YAML ({one_line(error)})") from None


def _check(text: str) -> None:
    """Refuse what would be endless: composing recurses without a limit, and aliases of aliases grow exponentially."""
    depth, problem = 0, None
    event: Any
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            problem = f"nested more than {_MAX_DEPTH} deep"
        elif isinstance(event, yaml.AliasEvent):
            problem = f"an alias, *{event.anchor}: write out what it stands for"
        elif isinstance(event, yaml.ScalarEvent) and _NO_TEXT.search(event.value):
            problem = "a NUL or half a character, which no text can hold"
        if problem is not None:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def dump(tree: Any, **style: Any) -> str:
    """Return plain data as YAML that `parse` reads as the same."""
    dumped: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **style)
    return dumped


def dump_line(tree: dict[str, Any]) -> str:
    """Return a mapping of plain values in one line."""
    return dump(tree, default_flow_style=True, width=-1).rstrip("\n")  # a width without an end
