"""A run and its folders. Every verb starts here, so that all verbs check the same things, and read
each only once.

A method folder holds a model that a method trains, at one moment (`runs/method_folder.py`):

| opened by          | what                                 | checked against the folder's records            |
|--------------------|--------------------------------------|-------------------------------------------------|
| `Run.open_start`   | `upscaled/`, to be trained           | files, tokenizer and config                     |
| `Run.open_final`   | `final/`, to be measured or exported | the same; also `Run.check` of the held-out text |
| `Run.open_trained` | a checkpoint, to be measured         | as `final/`                                     |
| `open_folder`      | any method folder, wherever it lies  | files and tokenizer                             |

What is opened is a `MethodFolder`. Its `load...` functions put the model onto its base.

The base's tensors are compared with their recorded hashes only when the model is loaded.
`Run.check` finds every error that can be known before a verb writes anything. It loads no weights
and reads little text, so it is fast.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from scale_cli.config.load import load_config
from scale_cli.config.schema import (
    ACCEPTABLE,
    BASE_KEYS,
    LOCATION_KEYS,
    TRAIN_SECTIONS,
    UPSCALE_SECTIONS,
    MethodConfig,
    RunConfig,
    differences,
)
from scale_cli.config.sources import TextSource
from scale_cli.data.corpora import cache_of, check_same_text, check_sample
from scale_cli.data.encoding import DocumentMarkers
from scale_cli.data.files import check_source
from scale_cli.errors import BaseModelError, ConfigError, RunFolderError
from scale_cli.methods.given import ADAPTER_WEIGHTS
from scale_cli.model.adapter_pair import without_copies
from scale_cli.model.heads import Streams, beside_new_tokens
from scale_cli.processes import Share, move_to_device, share_of_machine
from scale_cli.runs.early import check_sizes
from scale_cli.runs.folder import TRAINED, RunFolder, check_folder
from scale_cli.runs.method_folder import load_peft, load_trained, read_method, set_router
from scale_cli.runs.new_tokens import learned_on
from scale_cli.runs.precision import with_precision
from scale_cli.storage.atomic import is_whole, read_json, verify_folder
from scale_cli.storage.shards import has_shards
from scale_cli.upscale.base import base_without_weights, load_base_config, load_hashed_base
from scale_cli.upscale.base_files import BaseRecord, check_weight_files
from scale_cli.upscale.base_hashes import check_same_base
from scale_cli.upscale.base_tokenizer import check_tokenizer, load_tokenizer
from scale_cli.upscale.building import MethodModel, NewPieces, build_model, grow_plainly
from scale_cli.upscale.quantised_base import dequantise
from scale_cli.vocabulary.tokenizer import GrownVocabulary, check_ids, load_grown


@dataclass(frozen=True)
class Run:
    """A run, given by its config; everything that the config names is read at first use."""

    given: RunConfig

    @cached_property
    def config(self) -> RunConfig:
        """The config, with the precisions that `auto` stands for in this run."""
        return with_precision(self.given)

    @cached_property
    def folder(self) -> RunFolder:
        return RunFolder(self.config.output_dir)

    @cached_property
    def base_config(self) -> Any:
        return load_base_config(self.config.model)

    @cached_property
    def base_tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.config.model)

    @cached_property
    def grown_vocabulary(self) -> GrownVocabulary | None:
        """The tokens that the run adds to the base's; None if it adds none."""
        vocabulary = self.config.method.vocabulary
        if vocabulary is None:
            return None
        sources = learned_on(self.config)
        cache = cache_of(self.config, self.base_tokenizer)
        return GrownVocabulary(self.base_config.vocab_size, vocabulary, sources, cache)

    def make_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer for a run that is about to be upscaled; any earlier `upscaled/` is
        ignored.
        """
        grown = self.grown_vocabulary
        return self.base_tokenizer if grown is None else grown.tokenizer()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The run's own tokenizer; new tokens are learned first if they are not there yet."""
        return load_grown(self.folder.upscaled) if self._has_grown else self.make_tokenizer()

    def known_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the run's own tokenizer; None if new tokens would have to be learned first."""
        grown = self.grown_vocabulary
        if grown is None or grown.vocabulary.folder is not None or self._has_grown:
            return self.tokenizer
        if not any(grown.cache.folder.glob("vocabulary.*")):
            return None  # decided without reading any text
        return load_grown(grown.folder) if is_whole(grown.folder) else None

    @property
    def _has_grown(self) -> bool:
        """Whether `upscaled/` has the new tokens that the config asks for."""
        vocabulary = self.config.method.vocabulary
        written = self.folder.upscaled / "scale.yaml"
        if vocabulary is None or not written.is_file():
            return False
        return load_config(written).method.vocabulary == vocabulary

    def open_start(self) -> MethodFolder:
        start = open_folder(self.folder.upscaled, self)
        start.check_same_run(UPSCALE_SECTIONS, BASE_KEYS)
        return start

    def open_final(self) -> MethodFolder:
        self.folder.check_finished()
        return self.open_trained(self.folder.final)

    def open_trained(self, path: Path) -> MethodFolder:
        """Open `final/`, or a checkpoint as if the run ended with it."""
        folder = MethodFolder(path, self)
        if any(
            of.startswith("corpus.") for of in folder.check_same_run(TRAIN_SECTIONS, LOCATION_KEYS)
        ):
            cache = cache_of(self.config, folder.tokenizer)
            names = [cache.name_of(source) for source in self.config.corpus.sources]
            check_same_text(path, names)
        self.check(self.config.evaluation.perplexity)
        return open_folder(path, self)

    def check(self, sources: Sequence[TextSource], num_processes: int = 1) -> None:
        """Raise an error for what is certain to fail later: a folder, the base, a size, or one of
        the `sources`.
        """
        config = self.config
        self.folder.check()
        if config.corpus.cache_dir is not None and not config.corpus.cache_dir.is_dir():
            check_folder("corpus.cache_dir", config.corpus.cache_dir)
        base = base_without_weights(self.base_config, config.model.dtype, config.model.quantisation)
        check_weight_files(config.model)
        check_sizes(config, base.config.max_position_embeddings, num_processes)
        with torch.device("meta"):
            build_model(base, config.method, config.seed)
        tokenizer = self.base_tokenizer
        check_ids(tokenizer, base.config.vocab_size)
        if config.corpus.isolate_documents and DocumentMarkers.of(tokenizer).context is None:
            raise BaseModelError(
                f"corpus.isolate_documents: the tokenizer of {config.model.base} has neither BOS nor EOS, so a "
                "document's first token would be predicted from the document before"
            )
        for source in sources:
            if source.messages_field is not None and not tokenizer.chat_template:
                raise ConfigError(
                    f"{source.name}: messages_field: the tokenizer of {config.model.base} has no chat template"
                )
            check_source(source)
            check_sample(source, tokenizer, config.corpus)


@dataclass(frozen=True)
class MethodFolder:
    """A method folder of a run: `upscaled/`, a checkpoint, `final/` or an adapter; its files are
    read at first use.
    """

    path: Path
    run: Run  # its config says where the base lies, and which router a widened model has

    @classmethod
    def at(cls, path: Path) -> MethodFolder:
        return cls(path, Run(load_config(path / "scale.yaml")))

    @cached_property
    def config(self) -> RunConfig:
        """The config that made the folder; the run's own may have changed since."""
        return load_config(self.path / "scale.yaml")

    @cached_property
    def method(self) -> MethodConfig:
        """The method of that config, completed by what `upscale` has found."""
        return read_method(self.path)

    @cached_property
    def record(self) -> BaseRecord:
        return BaseRecord.load(self.path)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The folder's own tokenizer if it has new tokens, else its base's."""
        grown = read_json(self.path / "config.json").get("new_tokens")
        return load_grown(self.path) if grown else self.run.base_tokenizer

    def check_same_run(
        self, sections: tuple[str, ...], ignored_keys: str, accepted: Collection[str] | None = None
    ) -> list[str]:
        """Refuse the folder if it was made with a different config; return a line for every change
        that is allowed.

        Allowed are changes of `accepted` keys and of those that `ignored_keys` matches, whose
        content is compared instead. A verb that does not train passes None for `accepted`: no key
        can be accepted.
        """
        changed = differences(self.config, self.run.config, sections, ignored_keys)
        refused = {line.partition(": ")[0]: line for line in changed}
        refused = {key: line for key, line in refused.items() if key not in (accepted or ())}
        if refused:
            may_be_accepted = accepted is not None and refused.keys() <= ACCEPTABLE
            flags = " ".join(f"--accept {key}" for key in refused)
            way = f", allow the change ({flags})" if may_be_accepted else ""
            raise RunFolderError(
                f"{self.path}: was made with another config ({'; '.join(refused.values())}); "
                f"change it back{way}, or start anew in another output_dir"
            )
        return differences(self.config, self.run.config, sections)

    def check_base(self) -> None:
        """Check the base against its record, as far as possible without its weights.

        BaseModelError: the base or its tokenizer cannot be loaded; ChangedBaseError: it is not the
        recorded one.
        """
        _ = self.run.base_config
        check_tokenizer(self.tokenizer, self.record)

    def load_base(self, of_machine: Share | None = None) -> PreTrainedModel:
        """Return the base alone, compared with the record.

        With `of_machine`, all processes of the launch must call this: each hashes a part of it.
        """
        base = self.run.config.model
        loaded, known = load_hashed_base(base)
        check_same_base(loaded, self.record, f"model.base {base.base}", of_machine, known=known)
        return loaded

    def _put_on(self, base: PreTrainedModel) -> MethodModel:
        """Return the model on its loaded base, in evaluation mode; the base becomes a part of it."""
        method = self.method
        if method.vocabulary is not None and not method.definition.widens:
            written = read_json(self.path / "config.json")
            base = grow_plainly(base, NewPieces(written["new_tokens"], written["own_pieces"]))
        if method.trains_base_weights:
            base.float()
        model: MethodModel = method.definition.restore(
            self.path, base, method.settings, self.run.config.seed
        )
        if (self.path / ADAPTER_WEIGHTS).exists():
            load_peft(model, self.path)
        elif (self.path / TRAINED).exists() or has_shards(self.path):
            load_trained(model, self.path)
        return model.eval()

    def load(self, base: PreTrainedModel | None = None) -> MethodModel:
        """Return the model with the router that the config asks for now, on this process's device."""
        model = self._put_on(self.load_base() if base is None else base)
        if self.method.definition.widens:
            set_router(model, self.run.config.method.router, self.run.config.new_script)
        return move_to_device(model)

    def load_to_export(self) -> MethodModel:
        """Return the model on a dequantised base: the quantised weights as plain numbers."""
        return self.load(dequantise(self.load_base()))

    def load_streams(self) -> Streams:
        """Return the base and the trained model; the base is read once.

        A widened model has both. Any other model gets an untouched copy of its base beside it. All
        processes must call this.
        """
        definition = self.method.definition
        base = self.load_base(share_of_machine())
        if definition.widens:
            widened: Any = self.load(base)
            return widened
        stays = definition.streams.shares_weights and not self.method.trains_base_weights
        untouched = without_copies(base) if stays else copy.deepcopy(base)
        model = self._put_on(base)
        pair = definition.streams.pair()
        return move_to_device(pair(beside_new_tokens(untouched, model), model)).eval()

    def load_to_train(self) -> MethodModel:
        """Return the model on the device it was read to, not yet placed or sharded; all processes
        must call this.
        """
        return self._put_on(self.load_base(share_of_machine()))

    def load_beside_base(self) -> tuple[MethodModel, PreTrainedModel]:
        """Return what `load_to_train` does, and a whole copy of its base; the base is read once."""
        base = self.load_base(share_of_machine())
        untouched = copy.deepcopy(base)
        return self._put_on(base), untouched


def open_folder(path: Path, run: Run | None = None) -> MethodFolder:
    """Open a method folder after checking its files and its base; without `run`, the folder's own
    config is used.
    """
    if not path.is_dir():
        raise RunFolderError(f"{path}: no such folder; run the verb that makes it first")
    verify_folder(path)
    folder = MethodFolder.at(path) if run is None else MethodFolder(path, run)
    folder.check_base()
    return folder
