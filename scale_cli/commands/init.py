"""The verb `scale init`: write a first config for a user's base and text, with sizes that fit the device."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from scale_cli import report
from scale_cli.commands.flags import checked_method, first_output_dir
from scale_cli.config.load import checked, dump_line, json_schema_text, parse
from scale_cli.config.paths import with_absolute_paths
from scale_cli.config.schema import MethodConfig, ModelConfig, RunConfig
from scale_cli.config.sources import ReadingConfig
from scale_cli.data.documents import CorpusReader
from scale_cli.data.encoding import Document, Encoder
from scale_cli.data.files import check_source, source_files
from scale_cli.errors import BaseModelError, CorpusError, UsageError, require
from scale_cli.methods.widened import far_from_asked
from scale_cli.planning.beginnings import HeldOut
from scale_cli.planning.device import Device, measure_device
from scale_cli.planning.estimate import Estimate, estimate
from scale_cli.planning.step import StepCost, step_cost
from scale_cli.processes import fast_precision
from scale_cli.runs.folder import RunFolder
from scale_cli.starter.fitting import (
    LEAST_STEP_TOKENS,
    MIN_STEPS,
    MOST_READINGS,
    Sizes,
    fit_sizes,
)
from scale_cli.starter.offer import TokenOffer, offer_tokens, own_tokens
from scale_cli.starter.parts import Parted, chat_of, measured_on_alone, part
from scale_cli.starter.texts import Text, look_into, warnings_of
from scale_cli.storage.atomic import write_text
from scale_cli.terminal import log, print_json
from scale_cli.upscale.base import load_base_config
from scale_cli.upscale.base_tokenizer import load_tokenizer
from scale_cli.vocabulary.tokenizer import check_ids

SCHEMA_FILE = "scale.schema.json"
# Most of the documents that are held out: text to learn is worth more in training, known text in
# measuring.
_MOST_HELD_OUT = 0.1
_MOST_RETENTION = 0.5
_REPLAY_SHARE = 0.1  # of the windows; a weight of 0.111 beside a weight of 1 gives it


@dataclass(frozen=True)
class _Asked:
    """What a config is written for."""

    file: Path
    beside: Path  # the same, as the names of new texts beside it begin
    base: str
    base_config: Any
    tokenizer: PreTrainedTokenizerBase
    corpus_text: Text
    retention_text: Text
    precision: str
    method: MethodConfig
    why: str  # this method; empty: it was asked for
    new: TokenOffer

    @property
    def is_unknown(self) -> bool:
        """Whether the base was measured, and does not know the text.

        Only then an expansion is chosen.
        """
        return bool(self.why) and self.method.definition.widens


@dataclass(frozen=True)
class _Draft:
    """A config with sizes that fit, and the parts of the texts that it names."""

    text: str  # as it is written
    config: RunConfig
    sizes: Sizes
    corpus: Parted
    retention: Parted  # held out to measure, and the rest as replay
    chats: dict[str, Parted]  # turns to measure, by role
    takes: Estimate


def init(
    file: Path,
    base: str,
    corpus: dict[str, Any],
    retention: dict[str, Any],
    *,
    method: MethodConfig | None,
    minutes: float,
) -> None:
    """Write a config that `scale run` accepts unchanged; `corpus` and `retention` are the texts' entries in it.

    Without a method, the base is measured on the text. `minutes` are those of the whole run. Only the
    beginnings of the texts are read.
    """
    log("looking at     the base and the texts")
    beside = file
    if file.absolute().parent != Path.cwd():  # paths that hold from the folder of the config too
        beside = file.absolute()
        base = with_absolute_paths({"base": base}, Path())["base"]
        corpus = with_absolute_paths(corpus, Path())
        retention = with_absolute_paths(retention, Path())
    model = checked(ModelConfig, {"base": base}, "--base")
    base_config = load_base_config(model)
    tokenizer = load_tokenizer(model)
    check_ids(tokenizer, base_config.vocab_size)
    encoder = Encoder(tokenizer, conversations=False)
    corpus_text = look_into(corpus, encoder, "--corpus")
    retention_text = look_into(retention, encoder, "--retention")
    if corpus_text.documents == retention_text.documents:
        raise UsageError(
            "--retention: is the same text as --corpus; give text that the base already knows"
        )

    precision = fast_precision()
    why = ""
    if method is None:
        # The code of models is slow to import, and only a measured base needs it.
        from scale_cli.starter.method_choice import choose_method

        log(f"measuring      what the base knows of {corpus['language']}")
        variant, why = choose_method(model, base_config, corpus_text, tokenizer, precision)
        method = checked_method(variant)
        if library := method.definition.streams.adapter_library:
            require(library, why)

    asked = _Asked(
        file=file,
        beside=beside,
        base=base,
        base_config=base_config,
        tokenizer=tokenizer,
        corpus_text=corpus_text,
        retention_text=retention_text,
        precision=precision,
        method=method,
        why=why,
        new=own_tokens(corpus_text),
    )
    if method.definition.takes_new_tokens:
        first_id = base_config.vocab_size
        new = offer_tokens(corpus_text, tokenizer, first_id, is_unknown=asked.is_unknown)
        asked = replace(asked, new=new)
    _write(asked, _fit(asked, minutes), minutes)


def _write(asked: _Asked, draft: _Draft, minutes: float) -> None:
    """Write a config, the texts that it names and its schema, and print what it is made of."""
    file = asked.file
    parts = (draft.corpus, draft.retention, *draft.chats.values())
    files = {path: content for part in parts for path, content in part.files.items()}
    beside = (
        {} if (schema := file.with_name(SCHEMA_FILE)).exists() else {schema: json_schema_text()}
    )
    with _new_files(files | beside):
        _check(draft.config, asked.tokenizer, files | beside)
        write_text(file, draft.text)

    print_json(
        {
            "file": file,
            "corpus": draft.corpus.words,
            "retention": draft.retention.words,
            "tokens": asked.new.words,
            "method": asked.method.variant,
            "why": asked.why,
            "sizes": draft.sizes,
            "estimate": draft.takes,
        }
    )
    warnings = [*warnings_of(asked.corpus_text), *warnings_of(asked.retention_text)]
    warnings += [*draft.corpus.warnings(), *draft.retention.warnings()]
    if asked.method.definition.widens:
        warnings += far_from_asked(asked.base_config, asked.method.expansion)
    is_too_long = draft.sizes.max_steps == MIN_STEPS and draft.takes.total_s > 60 * minutes
    said = report.render(
        "init.txt.j2",
        quote=shlex.quote,
        **vars(asked),
        **vars(draft),
        schema=SCHEMA_FILE,
        files=[path.name for path in files],
        too_long=f"{minutes:g}" if is_too_long else "",
        min_steps=MIN_STEPS,
        warnings=warnings,
    )
    for line in said.splitlines():
        log(line)


def _fit(asked: _Asked, minutes: float) -> _Draft:
    """Return sizes and parts of the texts with which the whole run takes the minutes."""
    base_config = asked.base_config
    num_tokens = int(asked.corpus_text.num_bytes * asked.new.tokens_per_byte)
    if num_tokens < LEAST_STEP_TOKENS:
        raise CorpusError(
            f"--corpus: only about {num_tokens:,} tokens, but a step takes {LEAST_STEP_TOKENS:,}; "
            "give more text"
        )
    device = measure_device(base_config, asked.method, asked.precision)
    step = step_cost(base_config, asked.method, asked.precision, num_new=asked.new.number)
    training_s = 60 * minutes
    for _ in range(3):  # each time with the time that evaluation, start and export have left
        sizes = fit_sizes(
            step,
            base_config.max_position_embeddings,
            asked.method,
            device,
            mixed_precision=asked.precision,
            training_s=training_s,
            num_tokens=num_tokens,
        )
        draft = _draft(asked, sizes, step, device)
        training_s = max(0.0, 60 * minutes - draft.takes.total_s + draft.takes.training_s)
    return draft


def _draft(asked: _Asked, sizes: Sizes, step: StepCost, device: Device) -> _Draft:
    """Return a config of these sizes, and how long its run takes."""
    file = asked.beside
    corpus = part(asked.corpus_text, "held-out", file, sizes.num_tokens, most=_MOST_HELD_OUT)
    text = asked.retention_text
    num_replayed = round(_REPLAY_SHARE * sizes.num_tokens)
    if MOST_READINGS * text.num_bytes * text.tokens_per_byte < num_replayed:
        retention = measured_on_alone(text, "retention")
    else:
        retention = part(text, "retention", file, num_replayed, most=_MOST_RETENTION)
    held_out = {"acquisition": corpus, "retention": retention}
    chats = {}
    if asked.tokenizer.chat_template:
        chats = {role: chat_of(of_role, role, file) for role, of_role in held_out.items()}

    parts: dict[str, Any] = {"corpus": corpus, "retention": retention, "chats": chats}
    documents = (*asked.corpus_text.documents, *asked.retention_text.documents)
    largest_bytes = max(len(document.encode()) for document in documents)
    allowed_bytes = ReadingConfig.model_fields["max_document_bytes"].default
    written = config_text(
        **vars(asked),
        sizes=sizes,
        max_document_bytes=largest_bytes if largest_bytes > allowed_bytes else None,
        **parts,
    )
    config = checked(RunConfig, parse(written, str(file)), str(file))
    counting = asked.new.grown or asked.tokenizer.backend_tokenizer
    texts = [
        HeldOut.of(
            of_part.held_out_documents,
            counting,
            role=role,
            window=sizes.sequence_length,
            context=asked.base_config.max_position_embeddings,
        )
        for role, of_part in (*held_out.items(), *chats.items())
    ]
    # An expansion for text that the base does not know starts with codes, and takes a fixed rate.
    takes = estimate(config, step, device, texts, searches=not asked.is_unknown)
    return _Draft(text=written, config=config, sizes=sizes, **parts, takes=takes)


def config_text(file: Path, **shown: object) -> str:
    """Return the config as YAML with comments."""
    output_dir = json.dumps(str(first_output_dir(file)), ensure_ascii=False)
    return report.render(
        "starter.yaml.j2",
        file=file,
        **shown,
        output_dir=output_dir,
        line=dump_line,
        quote=shlex.quote,
    )


@contextmanager
def _new_files(files: Mapping[Path, str]) -> Iterator[None]:
    """Write the text files that a config names; remove them if the config cannot be written."""
    if there := next((path for path in files if path.exists()), None):
        raise UsageError(
            f"{there}: already exists; give the config another name, or move this file"
        )
    try:
        for path, content in files.items():
            write_text(path, content)
        yield
    except BaseException:
        for path in files:
            path.unlink(missing_ok=True)
        raise


def _check(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, written: Collection[Path]
) -> None:
    """Check what `scale run` would refuse, and what was not seen when the texts were read."""
    RunFolder(config.output_dir).check()
    new = {path.resolve() for path in written}
    for source in (*config.corpus.sources, *config.evaluation.perplexity):
        if not source.is_local:
            continue
        check_source(source)
        for path in (Path(found.name).resolve() for found in source_files(source)):
            if path in new and str(source.path) not in map(str, written):
                raise UsageError(
                    f"{source.path}: the pattern of {source.name} matches {path.name} too, which this "
                    "verb writes beside the config; narrow it, or give the config another folder"
                )
        if source.messages_field is not None:
            turns = CorpusReader(source, config.corpus.max_document_bytes, tokenizer)
            if not any(isinstance(record, Document) for record in turns):
                raise BaseModelError(
                    f"--base: its chat template refuses a turn of user and assistant: "
                    f"{turns.ledger.described_losses()}"
                )
