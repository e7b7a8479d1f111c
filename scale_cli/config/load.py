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
from scale_cli.errors import ConfigError
from scale_cli.values import Section

AnyConfig = TypeVar("AnyConfig", bound=Section)
_ANY = object()
# Keys that were: the value with which runs are as they were without it, so that it is passed over, and what to do else.
_REMOVED: dict[str, tuple[object, str]] = {
    "evaluation.benchmarks.prompt": (
        "{{query}}",
        "write it as doc_to_text in the task's .yaml, and give that as path",
    ),
    "evaluation.benchmarks.delimiter": (
        " ",
        "write it as target_delimiter in the task's .yaml, and give that as path",
    ),
    "method.elo": (_ANY, ""),
    "method.vocabulary.init": (
        "subword",
        "new rows start as the mean of the old tokens that they are made of; leave it out",
    ),
}
_MAX_ERRORS = 10
_LONGEST_QUOTE, _LONGEST_MESSAGE = 200, 300
_MOST_MEANT, _MOST_LISTED = 3, 12  # keys of the same name elsewhere; and keys of a section that one line lists
# What other trainers call a key of ours.
_SYNONYMS = {
    "model.base": "base_model model_id model_name model_name_or_path model_path name name_or_path pretrained",
    "model.dtype": "torch_dtype",
    "method.variant": "method_name type",
    "corpus.sequence_length": "block_size context_length max_length max_seq_len max_seq_length seq_len seq_length",
    "corpus.sources": "data data_files dataset train_data train_file train_files",
    "corpus.sources[].path": "file files glob paths",
    "train.max_steps": "epochs iterations max_iters num_epochs num_steps num_train_epochs steps",
    "train.global_batch_size": "batch_size train_batch_size",
    "train.micro_batch_size": "gradient_accumulation_steps per_device_batch_size per_device_train_batch_size",
    "train.lr": "learning_rate max_lr peak_lr",
    "train.schedule": "lr_scheduler lr_scheduler_type scheduler",
    "train.warmup_steps": "num_warmup_steps warmup warmup_ratio",
    "train.optimiser": "optim optimizer",
    "train.mixed_precision": "amp bf16 fp16 precision",
    "train.max_grad_norm": "clip_grad_norm grad_clip gradient_clip_val gradient_clipping",
    "train.activation_checkpointing": "gradient_checkpointing",
    "train.attention": "attn_implementation flash_attention",
    "train.log_every_steps": "log_every log_interval logging_steps",
    "train.save_every_steps": "checkpoint_every save_every save_steps",
    "train.keep_checkpoints": "save_total_limit",
    "train.eval_every_steps": "eval_every eval_interval eval_steps",
    "train.trackers": "logger mlflow report_to tensorboard tracker wandb",
    "evaluation.perplexity": "eval_data eval_file held_out heldout validation validation_data validation_file",
    "output_dir": "out out_dir output output_folder save_dir",
}
_KEY_OF = {synonym: key for key, synonyms in _SYNONYMS.items() for synonym in synonyms.split()}
_DEVICE = (
    "no key: a GPU is taken where there is one; CUDA_VISIBLE_DEVICES says which, ACCELERATE_USE_CPU=1 none, "
    "`accelerate launch` several"
)
_NO_KEYS = {
    **dict.fromkeys(("cuda", "device", "device_map", "devices", "gpu", "gpus", "num_gpus"), _DEVICE),
    **dict.fromkeys(("resume", "resume_from_checkpoint"), "no key: `scale run` again goes on, and train --resume auto"),
}


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
    drop_removed(tree)
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        described = (_describe(schema, detail) for detail in details)
        lines = list(dict.fromkeys(f"{_origin(line, where, overrides)}: {line}" for line in described))
        if len(lines) > _MAX_ERRORS:
            lines[_MAX_ERRORS:] = [f"{where}: and {len(lines) - _MAX_ERRORS:,} errors more"]
        raise ConfigError("\n".join(lines)) from None


def drop_removed(tree: dict[str, Any]) -> None:
    """Drop from a config's tree, in place, the removed keys that say nothing there."""
    for key, (idle, _) in _REMOVED.items():
        _pass_over(tree, key.split("."), idle)


def _pass_over(node: Any, parts: Sequence[str], idle: object) -> None:
    """Drop a removed key where it says nothing."""
    if isinstance(node, list):
        for child in node:
            _pass_over(child, parts, idle)
    elif isinstance(node, dict) and parts[0] in node:
        if parts[1:]:
            _pass_over(node[parts[0]], parts[1:], idle)
        elif idle in (_ANY, node[parts[0]]):
            del node[parts[0]]


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
    removed = _REMOVED.get(".".join(str(part) for part in location if isinstance(part, str)))
    if unknown_key and removed is not None:
        return f"{place}: this key was removed; {removed[1]}"
    if unknown_key:
        return f"{place}: unknown key{_did_you_mean(schema, location)}"
    if detail["type"] == "missing":
        return f"{place}: required, but not given"
    if detail["type"] == "model_type":
        meant = {"model": "base", "method": "variant", "corpus": "sources", "train": "max_steps"}.get(place)
        example = f" (did you mean {place}.{meant}?)" if meant else ""
        return f"{place}: a section with keys of its own, not a plain value{example}"
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
    """Return what was meant by an unknown key: here by another name, elsewhere in the config, or nowhere."""
    section: type[BaseModel] | None = schema
    for part in location[:-1]:
        if not isinstance(part, int) and section is not None:
            section = _section_of(section, part)
    name, known = str(location[-1]), list(section.model_fields) if section is not None else []
    if name in _NO_KEYS:
        return f" ({_NO_KEYS[name]})"
    keys = _all_keys(schema)
    here = ".".join("[]" if isinstance(part, int) else part for part in location[:-1]).replace(".[]", "[]")
    meant = [_KEY_OF[name]] if _KEY_OF.get(name) in keys else [key for key in keys if key.rpartition(".")[2] == name]
    if not 1 <= len(meant) <= _MOST_MEANT:
        meant = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if meant:
        at_top = ", at the top" if here and meant[0] in schema.model_fields and meant[0] not in known else ""
        return f" (did you mean {' or '.join(str(key).removeprefix(f'{here}.') for key in meant)}{at_top}?)"
    if section is None:
        return ""
    listed = ", ".join(known) if len(known) <= _MOST_LISTED else "the page of keys, or `scale schema`, has them all"
    return f" (known here: {listed})"


def _all_keys(section: type[BaseModel], place: str = "") -> list[str]:
    """Return every key of a section and of those in it, sections' own names left out."""
    keys = []
    for name, field in section.model_fields.items():
        inner = _section_of(section, name)
        is_list = inner is not None and "list" in str(field.annotation)
        keys += [f"{place}{name}"] if inner is None or is_list else []
        keys += [] if inner is None else _all_keys(inner, f"{place}{name}{'[]' if is_list else ''}.")
    return keys


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


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the config.

    It knows every key, type, range and default. Which keys go together only `scale` itself knows.
    """
    return {"$schema": _Untitled.schema_dialect, **RunConfig.model_json_schema(schema_generator=_Untitled)}


def json_schema_text() -> str:
    """Return it as a file holds it."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
