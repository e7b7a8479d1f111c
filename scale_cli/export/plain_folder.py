"""A plain model as a folder that everything loads that loads its base.

transformers 5 writes config.json and the tokenizer in a spelling of its own: version 4, which much that serves models
still pins, does not know `rope_parameters`, goes on with unscaled positions, and does not find the tokenizer's class.
Here the base's own config.json is taken, with other sizes and both spellings, and its small files byte for byte. One
thing may change in the tokenizer: whoever tokenises a prompt gets the boundary that stood before it in training.

Keys of its config.json, and two files of code beside it (`model/routed_scale.py`), let it be served routed. Who does
not know them, or does not trust the code, loads the plain model. It cannot be routed where an expansion writes into x
(W12): the base's head reads the x that nobody has written into.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_files

from scale_cli.config.schema import ModelConfig
from scale_cli.data.encoding import DocumentMarkers, prompt_ids
from scale_cli.errors import BaseModelError, ExportParityError, RunFolderError, UsageError, one_line
from scale_cli.model import routed_scale, routing
from scale_cli.model.modeling_scale import WidenedModel
from scale_cli.storage.atomic import read_json, write_json, write_text
from scale_cli.upscale.base import load_base_config, root_model
from scale_cli.upscale.method import MethodModel
from scale_cli.upscale.preservation import SAMPLE_TEXTS
from scale_cli.upscale.run import TokenizerPlace, tokenizer_place

KEY = "scale_router"
# The second is for `transformers serve`, which asks for a class of that kind first, and else takes the plain one.
_ASKED_FOR = ("AutoModelForCausalLM", "AutoModelForDecision")
_CODE = (Path(str(routed_scale.__file__)), Path(str(routing.__file__)))


def router_keys(model: MethodModel) -> dict[str, Any] | None:
    """Return what `scale_router` is in the config.json of a model's plain export; None where it cannot be routed.

    Returns:
        `stream_sizes`: channels of the hidden row by stream, the base head's first (of a stack, all that its base head
        reads); `parents`: of every other head, the head that its logits are added to; `prior` of the base head, the
        rest being shared evenly by the others; `switch_rate`; `new_tokens`, where the base has not all (`PieceShares`):
        of each the `first` of its pieces, those that are the scripts' `own`, and which are `known` by every head.
    """
    if not isinstance(model, WidenedModel):
        return None
    lowest = model.routed_heads[0]
    routed = model.branches[lowest:]
    routes = model.config.routes and model.config.router_rule == "posterior"
    if not routes or any(branch.writes for branch in routed):
        return None
    added = [branch.expansion.lm_head.in_features for branch in model.branches]
    sizes = [model.root.config.hidden_size + sum(added[:lowest]), *added[lowest:]]
    parents = [branch.parent - lowest for branch in routed]
    keys = {
        "stream_sizes": sizes,
        "parents": parents,
        "prior": model.config.router_prior,
        "switch_rate": model.config.router_switch_rate,
    }
    if first := [pieces[0] for pieces in model.config.pieces()]:
        known = [(0, 0), (0, len(first))] if len(sizes) == 2 else model.config.known_by_heads()
        keys["new_tokens"] = {"first": first, "own": model.config.own_pieces, "known": known}
    return keys


def routed_class(folder: Path) -> Any:
    """Return the class that serves a plain export routed; None where the folder is not one that can be."""
    config = read_json(folder / "config.json")
    (architecture,) = config.get("architectures") or [""]
    return getattr(routed_scale, routed_name(architecture), None) if KEY in config else None


def routed_name(architecture: str) -> str:
    """Return what the routed class of a plain one is called, in transformers and in vLLM."""
    return f"ScaleRouted{architecture}"


_CONFIG = "config.json"
_WHOLE, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
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
# Of a tokenizer's settings: transformers puts them in the place of the template that the tokenizer has.
_SETTINGS_OF_A_FRAME = ("add_bos_token", "add_eos_token")
_MORE_TEMPLATES = "additional_chat_templates"
_GENERATION = "generation_config.json"
# What the methods change of a configuration.
_CHANGED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "layer_types",
    "mlp_only_layers",
    "decoder_sparse_step",
    "rms_norm_eps",
    "tie_word_embeddings",
    "vocab_size",
)
# What is written anew, and what a base may have of its own: code, and, as an export of ours, a router.
_LEFT_OUT = ("auto_map", KEY, "dtype", "rope_parameters", "rope_scaling", "rope_theta", "torch_dtype")


def write_plain(
    plain: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    base: ModelConfig,  # of a widened base it is the plain model at its bottom that counts
    folder: Path,
    router: dict[str, Any] | None = None,  # `router_keys`
    grown_in: Path | None = None,  # the folder of the run that has the tokenizer, where it is not the base's
) -> None:
    """Write a plain model, and beside it what its base has: configuration, generation settings, tokenizer."""
    plain.save_pretrained(folder)
    root = root_model(base)
    config, *others = _files_at("model.base", root.base, root.revision, (_CONFIG, _GENERATION))
    if config.name != _CONFIG:
        raise BaseModelError(f"model.base: {root.base}: {_CONFIG} is not at hand")
    written = _configuration(json.loads(config.read_text(encoding="utf-8")), plain, load_base_config(base))
    if router is not None:
        for source in _CODE:
            shutil.copyfile(source, folder / source.name)
        written |= {KEY: router}
        written["auto_map"] = dict.fromkeys(_ASKED_FOR, f"{_CODE[0].stem}.{routed_name(type(plain).__name__)}")
    write_text(folder / _CONFIG, json.dumps(written, indent=2, ensure_ascii=False) + "\n")
    for file in others:
        shutil.copyfile(file, folder / file.name)
    place = tokenizer_place(base) if grown_in is None else TokenizerPlace("output_dir", str(grown_in), None)
    copy_tokenizer(tokenizer, place, folder)


def find_plain_export(path: Path) -> Path:
    """Return the folder of a plain export: the one that was given, or the only one of a run."""
    if (path / "config.json").is_file():
        return path
    found = [folder for folder in sorted(path.glob("export/llama*")) if (folder / "config.json").is_file()]
    if len(found) > 1:
        raise UsageError(f"{path}: has several exports; say which: {', '.join(map(str, found))}")
    if not found:
        raise RunFolderError(f"{path}: holds no plain export: write one with `scale export`, export.format=llama")
    return found[0]


def copy_tokenizer(tokenizer: PreTrainedTokenizerBase, place: TokenizerPlace, folder: Path) -> None:
    """Copy a tokenizer's files to where a config.json of the base's family is, and let them frame prompts."""
    files = _files_at(place.key, place.name, place.revision, _TOKENIZER)
    for file in files:
        shutil.copyfile(file, folder / file.name)
    for template in files[0].parent.glob(f"{_MORE_TEMPLATES}/*.jinja"):
        (folder / _MORE_TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(template, folder / _MORE_TEMPLATES / template.name)
    frame_prompts(folder, tokenizer)


def frame_prompts(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let the tokenizer's files in a folder begin a prompt as training began a document; the files may do so already.

    A chat template writes its own beginning: what it has rendered is tokenised without special tokens everywhere.
    """
    boundary = DocumentMarkers.of(tokenizer).context
    if boundary is not None and not _is_framed(folder, tokenizer):
        token = str(tokenizer.convert_ids_to_tokens(boundary))
        if not (folder / _WHOLE).is_file():
            tokenizer.backend_tokenizer.save(str(folder / _WHOLE))
        written = read_json(folder / _WHOLE)
        written["post_processor"] = _framing(written["post_processor"], token, boundary)
        write_text(folder / _WHOLE, json.dumps(written, indent=2, ensure_ascii=False) + "\n")
        settings = read_json(folder / _SETTINGS) if (folder / _SETTINGS).is_file() else {}
        settings = {name: value for name, value in settings.items() if name not in _SETTINGS_OF_A_FRAME}
        write_json(folder / _SETTINGS, settings)
        if not _is_framed(folder, tokenizer):  # some families' classes keep steps of their own
            marks = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
            write_json(folder / _SETTINGS, {**settings, **marks, "tokenizer_class": "PreTrainedTokenizerFast"})
    if not _is_framed(folder, tokenizer):
        raise ExportParityError(
            f"the tokenizer's files of {tokenizer.name_or_path} give other ids elsewhere; nothing was written"
        )


def _is_framed(folder: Path, trained: PreTrainedTokenizerBase) -> bool:
    """Return whether a folder's tokenizer turns prompts into what stood in training: the boundary, then the text."""
    served = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return all(served(text).input_ids == prompt_ids(trained, text) for text in SAMPLE_TEXTS)


def _framing(written: dict[str, Any] | None, token: str, boundary: int) -> dict[str, Any]:
    """Return the post-processor of a tokenizer.json that sets a token before a text; offsets stay as they were."""
    before, first, second = (
        {"SpecialToken": {"id": token, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 1}},
    )
    template = {
        "type": "TemplateProcessing",
        "single": [before, first],
        "pair": [before, first, second],
        "special_tokens": {token: {"id": token, "ids": [boundary], "tokens": [token]}},
    }
    steps = [] if written is None else written.get("processors", [written])
    return {"type": "Sequence", "processors": [*(step for step in steps if step["type"] == "ByteLevel"), template]}


def _files_at(key: str, name: str, revision: str | None, names: Sequence[str]) -> list[Path]:
    """Return those of some files that there are, in order: in a folder, on the hub, or in the hub's cache."""
    try:
        found = cached_files(name, list(names), revision=revision, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise BaseModelError(f"{key}: the files of {name} are not at hand: {one_line(error)}") from None
    if not found:
        raise BaseModelError(f"{key}: {name}: {names[0]} is not at hand")
    return [Path(file) for file in found]


def _configuration(written: dict[str, Any], plain: PreTrainedModel, base: Any) -> dict[str, Any]:
    """Return what a base's config.json tells, changed to what a plain model is."""
    dtype = str(plain.dtype).removeprefix("torch.")
    now = {name: getattr(plain.config, name, None) for name in _CHANGED}
    return {
        **{name: value for name, value in written.items() if name not in _LEFT_OUT},
        **{name: value for name, value in now.items() if value != getattr(base, name, None)},
        **_rope(plain.config.rope_parameters),
        # As the base spells it, where it does: transformers 4 takes no other keys of Phi's.
        **({"rope_scaling": written["rope_scaling"]} if written.get("rope_scaling") else {}),
        "architectures": [type(plain).__name__],
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return RoPE as transformers 4 spells it, and as 5 does; some families have one for each kind of layer."""
    of_all = parameters.get("full_attention", parameters)
    local = parameters.get("sliding_attention")
    scaling = {name: value for name, value in of_all.items() if name != "rope_theta"}
    return {
        "rope_theta": of_all["rope_theta"],
        "rope_scaling": None if of_all["rope_type"] == "default" else scaling,
        **({} if local is None else {"rope_local_base_freq": local["rope_theta"]}),
        "rope_parameters": parameters,
    }
