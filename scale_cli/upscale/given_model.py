"""A model that others trained, beside its base: a PEFT adapter, or a fine-tuned model.

Nothing proves that it was made from this very base. What can be checked is: class, sizes,
vocabulary, the adapter's tensors, and that both tokenizers give the same ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from scale_cli.config.load import checked
from scale_cli.config.schema import ModelConfig
from scale_cli.errors import BaseModelError, ChangedBaseError, UsageError
from scale_cli.methods.given import ADAPTER_CONFIG, ADAPTER_WEIGHTS, file_of, put_adapter_on
from scale_cli.model.adapter_pair import AdapterPair, without_copies
from scale_cli.model.heads import ModelPair
from scale_cli.model.script_prior import EVEN, PriorByScript
from scale_cli.storage.atomic import load_tensors, misfit, read_json
from scale_cli.upscale.base import check_finite, load_base, load_base_config
from scale_cli.upscale.base_files import BaseRecord, looks_local
from scale_cli.upscale.base_hashes import record_base
from scale_cli.upscale.base_tokenizer import load_tokenizer
from scale_cli.upscale.preservation import SAMPLE_TEXTS
from scale_cli.upscale.router_keys import router_keys_of

_TOKENIZER = "tokenizer_config.json"
_QUOTED = 80  # characters of a text
_SAME = ("model_type", "vocab_size", "hidden_size")


@dataclass(frozen=True)
class GivenModel:
    """A model that does not hold its base, and which base that is."""

    name: str  # a folder or hub id
    base: ModelConfig
    prior: PriorByScript = EVEN
    sha256: str | None = None  # of the base; None: not known


def given_model(source: Path, base: str | None) -> GivenModel | None:
    """Return the model of a folder or hub id, and the base that it names, if no other is given.

    None: neither is one given nor does it name any, or it is a folder of a run.
    """
    if base is None and (BaseRecord.is_in(source) or not source.is_dir()):
        return None
    return beside_its_base(str(source), base)


def beside_its_base(name: str, base: str | None) -> GivenModel | None:
    """Return a model that does not hold its base, and the base that it names, if no other is given.

    None: neither is one given nor does it name any. UsageError: it is an adapter that names none.
    """
    keys = router_keys_of(name, _read(name, "config.json"))
    if keys is None:
        adapter = _read(name, ADAPTER_CONFIG)
        if found := base or adapter.get("base_model_name_or_path"):
            is_on_hub = base is None and not looks_local(str(found))
            revision = adapter.get("revision") if is_on_hub else None
            named_base = {"base": found, "revision": revision}
            return GivenModel(name, checked(ModelConfig, named_base, f"{name}: {ADAPTER_CONFIG}"))
        if adapter:
            raise UsageError(f"--base: {name} names no base; give the one that it was trained from")
        _check_not_several(name)
        return None
    revision = None if base else keys.revision
    held = {"base": base or keys.base, "revision": revision, "dtype": keys.dtype}
    return GivenModel(name, ModelConfig.model_validate(held), keys.by_script, keys.sha256)


def other_base(name: str, base: ModelConfig) -> str:
    """Return a note if an adapter's own file names another base than the one that it is put on."""
    named = _read(name, ADAPTER_CONFIG).get("base_model_name_or_path") or base.base
    if named == base.base:
        return ""
    return (
        f"{ADAPTER_CONFIG} names {named} as its base; nothing proves that {base.base} is the same"
    )


def _read(name: str, file: str) -> dict[str, Any]:
    path = file_of(name, file)
    read = {} if path is None else read_json(path)
    if not isinstance(read, dict):
        raise BaseModelError(f"{name}: {file}: holds no keys")
    return read


def load_given(given: GivenModel) -> ModelPair:
    """Load a base and what was trained from it; an adapter runs on the base's own weights.

    ChangedBaseError: the base is not the recorded one.
    """
    name = given.name
    base = given.base
    with named("--base"):
        untouched = load_base(base)
    if given.sha256 and record_base(untouched, base).content_sha256 != given.sha256:
        raise ChangedBaseError(
            f"{name}: {base.base} is not the base that it was trained from, which has SHA-256 "
            f"{given.sha256[:12]}; name that with --base"
        )
    if file_of(name, ADAPTER_CONFIG) is not None:
        return AdapterPair(untouched, _put_adapter_on(without_copies(untouched), name))
    _check_not_several(name)
    with named(name):
        trained = load_base(ModelConfig(base=name, dtype=base.dtype))
    check_finite(trained.named_parameters(), name)
    for key in _SAME:
        of_base, of_trained = (getattr(each.config, key) for each in (untouched, trained))
        if of_base != of_trained:
            raise BaseModelError(
                f"{name}: its {key} is {of_trained}, but that of {base.base} is {of_base}; "
                "give the base that it was trained from"
            )
    return ModelPair(untouched, trained.requires_grad_(True))


def _check_not_several(name: str) -> None:
    """Raise BaseModelError if a folder is no model, and has folders of adapters that others made."""
    within = [file.parent for file in sorted(Path(name).glob(f"*/{ADAPTER_CONFIG}"))]
    if several := ", ".join(str(folder) for folder in within if not BaseRecord.is_in(folder)):
        raise BaseModelError(f"{name}: contains adapters, but is none; give one of them: {several}")


def has_tokenizer(name: str) -> bool:
    """Return whether a given model comes with a tokenizer, which can be held against its base's."""
    return file_of(name, _TOKENIZER) is not None


def tokenizer_of_given(
    name: str, base: ModelConfig, texts: Iterable[str] = ()
) -> PreTrainedTokenizerBase:
    """Return a given model's own tokenizer, else its base's; they must give the same ids for our
    sample texts, and for these.
    """
    with named("--base"):
        load_base_config(base)  # its error tells of a base that is not there
        of_base = load_tokenizer(base)
    if not has_tokenizer(name):
        return of_base
    own = load_tokenizer(ModelConfig(base=name))
    for text in (*SAMPLE_TEXTS, *texts):
        ids = (each(text, add_special_tokens=False).input_ids for each in (own, of_base))
        for both in zip_longest(*ids):
            if both[0] == both[1]:
                continue
            here, there = (
                "nothing" if index is None else f"{each.convert_ids_to_tokens(index)!r} ({index})"
                for each, index in zip((own, of_base), both, strict=True)
            )
            raise BaseModelError(
                f"{name}: its tokenizer is not that of {base.base}: in {text[:_QUOTED]!r} it has "
                f"{here} where the base has {there}"
            )
    return own


@contextmanager
def named(flag: str) -> Iterator[None]:
    """Name a flag in errors, where a run's config would be named."""
    try:
        yield
    except BaseModelError as error:
        raise BaseModelError(f"{flag}: {str(error).removeprefix('model.base: ')}") from None


def _put_adapter_on(base: PreTrainedModel, name: str) -> Any:
    """Return a base with a PEFT adapter, whose tensors are all read; no weight of the base changes."""
    weights = file_of(name, ADAPTER_WEIGHTS)
    if weights is None:
        raise BaseModelError(
            f"{name}: has no {ADAPTER_WEIGHTS}; other files of weights are not read"
        )
    own = base.state_dict()
    model = put_adapter_on(base, weights.parent, name)
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    # False: the base's embedding is no part of it, and the hub is not asked whether that has grown.
    wanted = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = load_tensors(weights)
    check_finite(tensors.items(), name)
    for key in sorted(
        tensors.keys() - wanted.keys()
    ):  # PEFT may save the base's embedding and head too
        within = key.removeprefix("base_model.model.").replace(".base_layer.", ".")
        of_base = own.get(within.replace(".modules_to_save.", "."))
        if of_base is not None and len(of_base) != len(tensors[key]):
            raise BaseModelError(
                f"{name}: its vocabulary was resized: {key} has {len(tensors[key]):,} rows, but the "
                f"base's has {len(of_base):,}"
            )
        if of_base is not None and torch.equal(of_base.to(tensors[key].dtype), tensors[key]):
            del tensors[key]
    if problem := misfit(tensors, wanted):
        raise BaseModelError(f"{name}: is not an adapter of this base: {problem}")
    set_peft_model_state_dict(model, tensors)
    return model.eval()
