"""Load a config from a YAML file and `key.sub=value` overrides, and check it; errors name the
field.

The YAML may hold plain data only: safe tags, no aliases, no key twice, limited size and depth.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails

from scale_cli.config.paths import with_absolute_paths
from scale_cli.config.schema import RunConfig
from scale_cli.errors import ConfigError, one_line
from scale_cli.values import Section, counted

AnyConfig = TypeVar("AnyConfig", bound=Section)
# If a plain value stands where a section should, the user most likely meant this key of the
# section.
_MEANT_BY_SECTION = {
    "model": "base",
    "method": "variant",
    "corpus": "sources",
    "train": "max_steps",
}
_MAX_ERRORS = 10
_LONGEST_QUOTE = 200
_LONGEST_MESSAGE = 300
_MOST_MEANT = 3  # more keys of the same name elsewhere are ambiguous
# Limits of the YAML.
_MAX_BYTES = 1 << 18
_MAX_DEPTH = 40
_GROUPED = re.compile(r"\d+|\d{1,3}([ ,._']\d{3})+")  # 1,000
_ODD_NUMBER = re.compile(r"[_:]|^[-+]?0[0-9bx]")  # YAML 1.1: 1_000, 1:30, 010, 0b1, 0x1
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
# Names that other trainers give to our keys.
_SYNONYMS = Path(__file__).with_name("synonyms.yaml")
_DEVICE = (
    "no key is needed: a GPU is used if there is one; choose it with CUDA_VISIBLE_DEVICES, use the CPU with "
    "ACCELERATE_USE_CPU=1, or several GPUs with `accelerate launch`"
)
_NO_KEYS = {
    **dict.fromkeys(
        ("cuda", "device", "device_map", "devices", "gpu", "gpus", "num_gpus"), _DEVICE
    ),
    **dict.fromkeys(
        ("resume", "resume_from_checkpoint"),
        "no key: to resume, start `scale run` again, or `scale train --resume auto`",
    ),
    **dict.fromkeys(
        ("eval_benchmarks_every_steps", "eval_max_items"),
        "no key any more: `scale evaluate CHECKPOINT` measures benchmarks of a checkpoint",
    ),
}


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, override and check the config of a run."""
    return load_checked(RunConfig, path, overrides)


def load_checked(schema: type[AnyConfig], path: Path, overrides: Sequence[str] = ()) -> AnyConfig:
    tree = parse(read_text(path), str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a config must be a mapping of keys to values")
    return checked_tree(schema, tree, path.parent, str(path), overrides)


def checked_tree(
    schema: type[AnyConfig], tree: Any, beside: Path, where: str, overrides: Sequence[str]
) -> AnyConfig:
    """Override and check a config's plain data; its paths are also looked for `beside` a file."""
    for override in overrides:
        _apply_override(tree, override)
    return checked(schema, with_absolute_paths(tree, beside), where, overrides)


def checked(
    schema: type[AnyConfig], tree: dict[str, Any], where: str, overrides: Sequence[str] = ()
) -> AnyConfig:
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        details = error.errors(include_url=False)
    # A misspelt key is also missing under its right name: its hint comes first.
    details.sort(key=lambda detail: detail["type"] != "extra_forbidden")
    described = (_describe(schema, detail, where, overrides) for detail in details)
    lines = list(dict.fromkeys(described))
    if len(lines) > _MAX_ERRORS:
        lines[_MAX_ERRORS:] = [f"{where}: and {counted(len(lines) - _MAX_ERRORS, 'more error')}"]
    raise ConfigError("\n".join(lines))


def _quoted(text: str) -> str:
    """Return the user's text quoted on one line, cut if it is long."""
    return repr(text) if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]!r}..."


def _apply_override(tree: dict[str, Any], override: str) -> None:
    where = f"override {_quoted(override)}"
    key, equals, value = override.partition("=")
    *above, last = key.split(".")
    if not equals or not all([*above, last]):
        raise ConfigError(f"{where}: write it as key.sub=value")
    node: Any = tree
    for part in above:
        place = _place(node, part, where)
        child = node.get(place) if isinstance(node, dict) else node[place]
        node[place] = {} if child is None else child  # absent, or an empty section in YAML
        node = node[place]
    try:
        node[_place(node, last, where)] = parse(value, where)
    except ConfigError as error:
        raise ConfigError(_with_quotes(str(error), override)) from None


def _with_quotes(line: str, override: str) -> str:
    """Return an error's line; where it asks for quotes, with those that a shell leaves in place."""
    key, _, value = override.partition("=")
    return f"{line}: '{key}=\"{value}\"'" if "in quotes" in line else line


def _place(node: Any, part: str, where: str) -> Any:
    """Return one part of an override's key as the key of a mapping or the index of a list."""
    if isinstance(node, dict):
        return part
    if not isinstance(node, list) or part not in map(str, range(len(node))):
        raise ConfigError(f"{where}: {_quoted(part)} is not a key or index of the value before it")
    return int(part)


def _describe(
    schema: type[Section], detail: ErrorDetails, where: str, overrides: Sequence[str]
) -> str:
    """Return one line: the file or override that gave a value, its key, and what is wrong with it."""
    # Pydantic puts the union branch that it tried into the location; the user did not write it.
    kind = detail["type"]
    last = len(detail["loc"]) - 1
    location = [
        str(part)
        for index, part in enumerate(detail["loc"])
        if (kind == "extra_forbidden" and index == last)
        or not (part in ("str", "int", "float") or "[" in str(part))
    ]
    place = ".".join(
        key if key.isprintable() and len(key) <= _LONGEST_QUOTE else _quoted(key)
        for key in location
    )
    message = " ".join(detail["msg"].removeprefix("Value error, ")[:_LONGEST_MESSAGE].split())
    if kind == "extra_forbidden":
        message = f"unknown key{_did_you_mean(schema, location)}"
    elif kind == "missing":
        message = "required, but not given"
    elif kind == "model_type":
        message = "a section with keys of its own, not a plain value"
        if place in _MEANT_BY_SECTION:
            message += f" (did you mean {place}.{_MEANT_BY_SECTION[place]}?)"
    elif kind != "value_error":
        message = message[0].lower() + message[1:] + _meant_by(kind, detail["input"])
    line = f"{place}: {message}" if place else message
    named = line.partition(":")[0]  # a message without a place begins with a key
    for override in overrides:
        key = override.partition("=")[0]
        if f"{named}.".startswith(f"{key}."):
            where = f"override {_quoted(override)}"
            line = _with_quotes(line, override)
    return f"{where}: {line}"


def _meant_by(kind: str, given: object) -> str:
    """Return a hint what to write in place of a text or number of another type, or ""."""
    is_number = kind in ("int_type", "float_type")
    if isinstance(given, bool) and (is_number or kind == "string_type"):
        told = "; YAML reads a bare yes, no, on, off, true or false as a truth value"
        return told if is_number else f"{told}, so write it in quotes"
    if kind == "string_type" and isinstance(given, int | float):
        return "; write it in quotes"
    if is_number and isinstance(given, str) and (found := _GROUPED.fullmatch(given)):
        return f"; write {re.sub(r'[^0-9]', '', found[0]).lstrip('0') or '0'}"
    if kind == "int_type" and isinstance(given, float) and given.is_integer():
        return f"; write {given:.0f}"
    return ""


def _did_you_mean(schema: type[Section], location: Sequence[str]) -> str:
    """Return a hint for an unknown key: a key elsewhere in the config, a similar key of this
    section, or "".
    """
    *above, name = location
    if name in _NO_KEYS:
        return f" ({_NO_KEYS[name]})"
    here = re.sub(r"\.\d+", "[]", ".".join(above))
    keys = [*_all_keys(schema)]
    synonyms = parse(read_text(_SYNONYMS), str(_SYNONYMS))
    meant = [key for key in keys if name in synonyms.get(key, "").split()] or [
        key for key in keys if key.rpartition(".")[2] == name
    ]
    if not 1 <= len(meant) <= _MOST_MEANT:
        prefix = f"{here}." if here else ""
        known = {
            key.removeprefix(prefix): key
            for key in keys
            if key.startswith(prefix) and "." not in key.removeprefix(prefix)
        }
        meant = [known[close] for close in difflib.get_close_matches(name, known, n=1, cutoff=0.5)]
    if not meant:
        return ""
    at_top = ", at the top" if here and "." not in meant[0] else ""
    return f" (did you mean {' or '.join(key.removeprefix(f'{here}.') for key in meant)}{at_top}?)"


def _all_keys(section: type[BaseModel], place: str = "") -> Iterator[str]:
    """Yield every key of a section and its subsections, written as `corpus.sources[].name`."""
    for name, field in section.model_fields.items():
        yield f"{place}{name}"
        annotation: Any = field.annotation
        for kind in (annotation, *getattr(annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _all_keys(
                    kind, f"{place}{name}{'[]' if 'list' in str(annotation) else ''}."
                )


def dump_config(config: Section) -> str:
    """Return the resolved config as YAML, every default written out."""
    return dump(config.model_dump(mode="json"))


class _Untitled(GenerateJsonSchema):
    """Leave out titles, which only repeat the keys' names."""

    def field_title_should_be_set(self, _schema: Any) -> bool:
        return False


def json_schema_text() -> str:
    """Return the JSON Schema of the config.

    It has every key, type, range and default. Only `scale` itself checks which keys go together.
    """
    schema = RunConfig.model_json_schema(schema_generator=_Untitled)
    written = {"$schema": _Untitled.schema_dialect, **schema}
    return json.dumps(written, indent=2, ensure_ascii=False) + "\n"


def _is_thousands(entry: tuple[yaml.Node, yaml.Node]) -> bool:
    """Return whether an entry is the end of a number such as 1,000 within braces."""
    key, value = entry
    return re.fullmatch(r"\d{3}", str(key.value)) is not None and value.value == ""


class _Loader(yaml.CSafeLoader):
    """Load safe YAML: a repeated key is an error, and so is a number in another form than plain
    digits. `1e-4` is a number, and a date is text (in PyYAML and YAML 1.1 it is the other way round).
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        before = ""
        for at, (key, value) in enumerate(node.value):
            if before.isdecimal() and _is_thousands(node.value[at]):
                groups = [
                    before,
                    *(one.value for one, _ in takewhile(_is_thousands, node.value[at:])),
                ]
                # 0,001 is what some languages write for 0.001.
                meant = (f"{before}." if int(before) == 0 else before) + "".join(groups[1:])
                raise yaml.MarkedYAMLError(
                    problem=f"a comma begins the next entry: write {meant}, not {','.join(groups)}",
                    problem_mark=key.start_mark,
                )
            before = str(value.value)
            if str(key.value) in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value[:40]!r} occurs twice", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Return a number; YAML 1.1 has octal, sexagesimal and other forms, which nobody means."""
        is_float = node.tag.endswith(":float")
        number = self.construct_yaml_float(node) if is_float else self.construct_yaml_int(node)
        if _ODD_NUMBER.search(node.value):
            raise yaml.MarkedYAMLError(
                problem=f"{node.value[:40]} is read as {number}; write a number in plain digits, "
                "a text in quotes",
                problem_mark=node.start_mark,
            )
        return number


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if not tag.endswith(":timestamp")]
    for first, forms in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}
for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)


class _Dumper(yaml.CSafeDumper):
    """Write safe YAML: quote a string that `_Loader` would read as a number (such as the git
    revision 1e10).
    """


for _half in (_Loader, _Dumper):
    _half.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def read_text(path: Path) -> str:
    """Read a config from a file or a pipe, as UTF-8 text."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)  # bounded: it may be an endless device
        if len(content) > _MAX_BYTES:
            raise ConfigError(f"{path}: more than {_MAX_BYTES:,} bytes, too many for a config")
        return content.decode()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({error})") from None


def parse(text: str, where: str) -> Any:
    """Return the plain data in a YAML text."""
    try:
        _check(text)
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{where}:{mark.line + 1}" if mark else where
        # Of a pattern of files, and of what a tag or anchor begins like.
        quotes = "; write it in quotes" if text[:1] in ("*", "&", "!") else ""
        raise ConfigError(f"{place}: not valid YAML ({error.problem}){quotes}") from None
    except Exception as error:  # PyYAML passes on errors of int(), a regex or a dict
        raise ConfigError(f"{where}: not valid YAML ({one_line(error)})") from None


def _check(text: str) -> None:
    """Refuse deep nesting (PyYAML recurses without a limit), aliases (they can grow exponentially)
    and non-text.
    """
    depth = 0
    problem = None
    event: Any
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > _MAX_DEPTH:
            problem = f"nested more than {_MAX_DEPTH} deep"
        elif isinstance(event, yaml.AliasEvent):
            problem = f"an alias, *{event.anchor}: write out the value that it stands for"
        elif isinstance(event, yaml.ScalarEvent) and _NO_TEXT.search(event.value):
            problem = "a NUL or half a surrogate pair, which no text can contain"
        if problem is not None:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def dump(tree: Any, **style: Any) -> str:
    """Return plain data as YAML; `parse` reads it back unchanged."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **style)


def dump_line(tree: dict[str, Any]) -> str:
    """Return a mapping of plain values as one line of YAML."""
    return dump(tree, default_flow_style=True, width=-1).rstrip("\n")  # -1: unlimited
