"""A plain model as a folder that loads wherever its base loads.

transformers 5 writes config.json and the tokenizer in its own format. Version 4, which many servers
still pin, does not know `rope_parameters`: it goes on with unscaled positions, and does not find
the tokenizer's class. So the base's own config.json is used, with other sizes and both spellings,
and its small files are copied byte for byte. One thing may change in the tokenizer: it puts the
boundary that began a training document before a prompt.

Keys in config.json, and three code files beside it (`model/routed_scale.py`), let the folder be
served routed. A loader that does not know the keys, or does not trust the code, loads the plain
model. A model cannot be routed if an expansion writes into x (W12), since the base's head reads an
x that no expansion has written into.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils.hub import cached_files

from scale_cli.config.schema import ModelConfig, RunConfig
from scale_cli.data.encoding import DocumentMarkers, prompt_ids
from scale_cli.errors import BaseModelError, ExportParityError, one_line
from scale_cli.evaluation.around_generate import ends_of
from scale_cli.export.dense import WIDENED_KEY
from scale_cli.export.served_folder import holds_base, routed_name
from scale_cli.methods.stream_kinds import ROUTER
from scale_cli.model import cache_scale, routed_scale, routing
from scale_cli.model.family_scale import PER_LAYER_KEYS
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.model.two_streams import Router
from scale_cli.model.vocabulary_scale import pieces_of
from scale_cli.runs.method_folder import router_of
from scale_cli.storage.atomic import read_json, write_json, write_text
from scale_cli.upscale.base import load_base_config
from scale_cli.upscale.base_files import BaseRecord
from scale_cli.upscale.base_tokenizer import TokenizerPlace, tokenizer_place
from scale_cli.upscale.building import MethodModel
from scale_cli.upscale.preservation import SAMPLE_TEXTS
from scale_cli.vocabulary.tokenizer import open_tokenizer

# The second is for `transformers serve`, which looks for such a class first, and otherwise takes
# the plain one.
_ASKED_FOR = ("AutoModelForCausalLM", "AutoModelForDecision")
_CODE = tuple(Path(str(module.__file__)) for module in (routed_scale, routing, cache_scale))

_OF_ADAPTER = _CODE[0].with_name("routed_adapter_scale.py")


def router_keys(model: MethodModel) -> dict[str, Any] | None:
    """Return the value of `scale_router` in a plain export's config.json; None if the model cannot
    be routed.

    Returns:
        `stream_sizes`: channels of x and of u in the hidden row;
        `prior` of the base head;
        `script_prior` and `script`, if the config has both, as in ScaleConfig;
        `new_tokens`, if the base lacks some (`PieceShares`): the `first` of the pieces of each, and
        those that are the script's `own`.
    """
    if not isinstance(model, ScaleForCausalLM):
        return None
    config = model.config
    if not config.routes or config.router_rule != "posterior" or model.expansion.writes:
        return None
    sizes = [model.base.config.hidden_size, model.expansion.lm_head.in_features]
    keys = {"stream_sizes": sizes, **Router.of_widened(config).prior.of_router()}
    if first := [pieces[0] for pieces in pieces_of(config.new_tokens)]:
        keys["new_tokens"] = {"first": first, "own": config.own_pieces}
    return keys


def can_name_base(config: RunConfig) -> bool:
    """Return whether an export that does not hold its base is routed with it, without its run.

    A run alone knows how a base reads new tokens, and how it was held.
    """
    is_whole = config.method.vocabulary is None and config.model.quantisation is None
    return config.method.served == "posterior" and is_whole


def name_base(folder: Path, config: RunConfig, record: BaseRecord) -> None:
    """Write into the config.json of a model that does not hold its base which base it is routed
    with, and how: `scale_router` with `kind`, `base`, `revision`, `dtype`, `sha256` and `prior`.
    """
    streams = config.method.definition.streams
    keys = {
        "kind": streams.name,
        "base": record.name,
        "revision": record.revision,
        "dtype": record.dtype,
        "sha256": record.content_sha256,
        **router_of(config).prior.of_router(),
    }
    path = folder / _CONFIG
    written = read_json(path) | {ROUTER: keys}
    if streams.adapter_library:  # transformers loads an adapter by its own code otherwise
        for source in (_OF_ADAPTER, *map(Path, get_relative_import_files(_OF_ADAPTER))):
            shutil.copyfile(source, folder / source.name)
        written["auto_map"] = {_ASKED_FOR[0]: f"{_OF_ADAPTER.stem}.ScaleRoutedAdapter"}
    write_text(path, json.dumps(written, indent=2, ensure_ascii=False) + "\n")


def routed_class(folder: Path) -> Any:
    """Return the class that serves a plain export routed; None if that needs its base, or more."""
    config = read_json(folder / "config.json")
    (architecture,) = config.get("architectures") or [""]
    return getattr(routed_scale, routed_name(architecture), None) if holds_base(config) else None


_CONFIG = "config.json"
_WHOLE = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_TOKENIZER = (
    _WHOLE,
    _SETTINGS,
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
# Tokenizer settings with which transformers replaces the tokenizer's own template.
_SETTINGS_OF_A_FRAME = ("add_bos_token", "add_eos_token")
_MORE_TEMPLATES = "additional_chat_templates"
_GENERATION = "generation_config.json"
# Configuration keys that methods change.
_CHANGED = (
    WIDENED_KEY,
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    *PER_LAYER_KEYS,
    "rms_norm_eps",
    "tie_word_embeddings",
    "vocab_size",
)
# Keys that are written anew, or that a base may have of its own: code, and a router if it is an
# export of ours.
_LEFT_OUT = (
    "auto_map",
    ROUTER,
    "dtype",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "torch_dtype",
)


def write_plain(
    plain: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    base: ModelConfig,
    folder: Path,
    router: dict[str, Any] | None = None,  # `router_keys`
    grown_in: Path | None = None,  # the run's folder with the tokenizer, if that is not the base's
) -> None:
    """Write a plain model with its base's configuration, generation settings and tokenizer."""
    plain.save_pretrained(folder)
    config, *others = _files_at("model.base", base.base, base.revision, (_CONFIG, _GENERATION))
    written = _configuration(
        json.loads(config.read_text(encoding="utf-8")), plain, load_base_config(base)
    )
    if router is not None:
        for source in _CODE:
            shutil.copyfile(source, folder / source.name)
        written |= {ROUTER: router}
        written["auto_map"] = dict.fromkeys(
            _ASKED_FOR, f"{_CODE[0].stem}.{routed_name(type(plain).__name__)}"
        )
    write_text(folder / _CONFIG, json.dumps(written, indent=2, ensure_ascii=False) + "\n")
    for file in others:
        shutil.copyfile(file, folder / file.name)
    name_ends(folder, tokenizer)
    grown = TokenizerPlace("output_dir", str(grown_in), None)
    copy_tokenizer(tokenizer, tokenizer_place(base) if grown_in is None else grown, folder)


def name_ends(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a folder's generation settings name all tokens that end a text here, for other
    servers.
    """
    settings = read_json(folder / _GENERATION)
    named = settings.get("eos_token_id")
    ends = ends_of(named, tokenizer)
    if not {*ends} <= {*(named if isinstance(named, list) else [named])}:
        write_json(folder / _GENERATION, settings | {"eos_token_id": ends})


def copy_tokenizer(tokenizer: PreTrainedTokenizerBase, place: TokenizerPlace, folder: Path) -> None:
    """Copy a tokenizer's files into a folder with a config.json of the base's family, and let them
    frame prompts.
    """
    files = _files_at(place.key, place.name, place.revision, _TOKENIZER)
    for file in files:
        shutil.copyfile(file, folder / file.name)
    for template in files[0].parent.glob(f"{_MORE_TEMPLATES}/*.jinja"):
        (folder / _MORE_TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(template, folder / _MORE_TEMPLATES / template.name)
    frame_prompts(folder, tokenizer)


def frame_prompts(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make a folder's tokenizer begin a prompt as training began a document, unless it already
    does.

    A chat template writes its own beginning; its text is tokenised without special tokens
    everywhere.
    """
    boundary = DocumentMarkers.of(tokenizer).context
    if boundary is not None and not _is_framed(folder, tokenizer):
        token = str(tokenizer.convert_ids_to_tokens(boundary))
        if not (folder / _WHOLE).is_file():
            tokenizer.backend_tokenizer.save(str(folder / _WHOLE))
        written = read_json(folder / _WHOLE)
        written["post_processor"] = _framing(written["post_processor"], token, boundary)
        write_json(folder / _WHOLE, written)
        settings = read_json(folder / _SETTINGS) if (folder / _SETTINGS).is_file() else {}
        for name in _SETTINGS_OF_A_FRAME:
            settings.pop(name, None)
        write_json(folder / _SETTINGS, settings)
        if not _is_framed(folder, tokenizer):  # the classes of some families keep their own steps
            marks = tokenizer.special_tokens_map.items()
            settings |= {name: str(mark) for name, mark in marks if isinstance(mark, str)}
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
            write_json(folder / _SETTINGS, settings)
    if not _is_framed(folder, tokenizer):
        raise ExportParityError(
            f"the tokenizer files of {tokenizer.name_or_path} give other ids when they are loaded from the export; "
            "nothing was written"
        )


def _is_framed(folder: Path, trained: PreTrainedTokenizerBase) -> bool:
    """Return whether a folder's tokenizer encodes prompts as training did: the boundary, then the
    text.
    """
    served = open_tokenizer(folder)
    return all(served(text).input_ids == prompt_ids(trained, text) for text in SAMPLE_TEXTS)


def _framing(written: dict[str, Any] | None, token: str, boundary: int) -> dict[str, Any]:
    """Return a post-processor for tokenizer.json that puts a token before a text and keeps offsets
    unchanged.
    """
    before = {"SpecialToken": {"id": token, "type_id": 0}}
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    template = {
        "type": "TemplateProcessing",
        "single": [before, first],
        "pair": [before, first, second],
        "special_tokens": {token: {"id": token, "ids": [boundary], "tokens": [token]}},
    }
    steps = [] if written is None else written.get("processors", [written])
    return {
        "type": "Sequence",
        "processors": [*(step for step in steps if step["type"] == "ByteLevel"), template],
    }


def _files_at(key: str, name: str, revision: str | None, names: Sequence[str]) -> list[Path]:
    """Return the paths of the files that exist, in order: in a folder, on the hub, or in the hub's
    cache.
    """
    try:
        found = cached_files(
            name, list(names), revision=revision, _raise_exceptions_for_missing_entries=False
        )
    except OSError as error:
        raise BaseModelError(
            f"{key}: the files of {name} cannot be found: {one_line(error)}"
        ) from None
    if not found:
        raise BaseModelError(f"{key}: {name}: {names[0]} cannot be found")
    return [Path(file) for file in found]


def _configuration(written: dict[str, Any], plain: PreTrainedModel, base: Any) -> dict[str, Any]:
    """Return a base's config.json, changed to describe a plain model.

    RoPE's settings are in the spellings of transformers 4 and 5; some families have them per kind
    of layer.
    """
    dtype = str(plain.dtype).removeprefix("torch.")
    now = {name: getattr(plain.config, name, None) for name in _CHANGED}
    rope = plain.config.rope_parameters
    of_all = rope.get("full_attention", rope)
    scaling = {name: value for name, value in of_all.items() if name != "rope_theta"}
    local = rope.get("sliding_attention")
    return {
        **{name: value for name, value in written.items() if name not in _LEFT_OUT},
        **{name: value for name, value in now.items() if value != getattr(base, name, None)},
        "rope_theta": of_all["rope_theta"],
        "rope_scaling": None if of_all["rope_type"] == "default" else scaling,
        **({} if local is None else {"rope_local_base_freq": local["rope_theta"]}),
        "rope_parameters": rope,
        "architectures": [type(plain).__name__],
        "torch_dtype": dtype,
        "dtype": dtype,
    }
