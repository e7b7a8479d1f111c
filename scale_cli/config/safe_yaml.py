"""YAML as plain data and nothing else: safe tags only, of bounded size, every key once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NoReturn

import yaml

from scale_cli.errors import ConfigError, one_line

_MAX_BYTES = 1 << 18
# An alias counts as often as it is used: ten lines can stand for a billion values.
_MAX_VALUES = 20_000
_MAX_DEPTH = 40
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


class _Yaml12FloatLoader(yaml.CSafeLoader):
    """Safe YAML, read by libyaml, in which `1e-4` is a number: PyYAML, faithful to YAML 1.1, reads it as a string."""


class _Yaml12FloatDumper(yaml.CSafeDumper):
    """Safe YAML that quotes a string which that loader would read as a number (a git revision such as 1e10)."""


for _half in (_Yaml12FloatLoader, _Yaml12FloatDumper):
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
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({error})") from None


def parse(text: str, where: str) -> Any:
    """Return what a YAML text says, as plain data."""
    try:
        depth = 0
        for event in yaml.parse(text, Loader=_Yaml12FloatLoader):  # composing is a recursion without a limit
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                _refuse(event, where, f"nested more than {_MAX_DEPTH} deep")
        if (node := yaml.compose(text, Loader=_Yaml12FloatLoader)) is None:
            return None
        _check(node, where)
        return _Yaml12FloatLoader("").construct_document(node)
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{where}:{mark.line + 1}" if mark else where
        raise ConfigError(f"{place}: not valid YAML ({error.problem})") from None
    except Exception as error:  # PyYAML lets through what int(), a regex or a dict says of a scalar
        raise ConfigError(f"{where}: not valid YAML ({one_line(error)})") from None


def _refuse(at: yaml.Event | yaml.Node, where: str, why: str) -> NoReturn:
    assert at.start_mark is not None, "libyaml marks everything"
    raise ConfigError(f"{where}:{at.start_mark.line + 1}: {why}")


def _check(root: yaml.Node, where: str) -> None:
    """Walk what is about to become data, aliases as often as they are used, up to the limits."""
    num_values, left = 0, [(root, 0)]
    while left:
        node, depth = left.pop()
        num_values += 1
        if num_values > _MAX_VALUES:
            raise ConfigError(f"{where}: more than {_MAX_VALUES:,} values, aliases counted as often as they are used")
        if depth > _MAX_DEPTH:
            _refuse(node, where, f"nested more than {_MAX_DEPTH} deep")
        if isinstance(node, yaml.MappingNode):
            seen: set[tuple[str, str]] = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    _refuse(key, where, "a key is text, not a list or a mapping")
                if (key.tag, key.value) in seen:
                    _refuse(key, where, f"the key {key.value[:40]!r} is there twice")
                seen.add((key.tag, key.value))
            left += [(child, depth + 1) for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            left += [(child, depth + 1) for child in node.value]
        elif _NO_TEXT.search(node.value):
            _refuse(node, where, "a NUL or half a character, which no text can hold")


def dump_line(tree: dict[str, Any]) -> str:
    """Return a mapping of plain values in one line."""
    return dump(tree, default_flow_style=True, width=-1).rstrip("\n")  # a width without an end


def dump(tree: Any, **style: Any) -> str:
    """Return plain data as YAML that `parse` reads as the same."""
    dumped: str = yaml.dump(tree, Dumper=_Yaml12FloatDumper, sort_keys=False, allow_unicode=True, **style)
    return dumped
