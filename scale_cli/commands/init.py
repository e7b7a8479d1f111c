"""The verb `scale init`: write a first config for a user's base and text, with sizes that fit the device."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from scale_cli import report
from scale_cli.commands.answers import checked_method
from scale_cli.config.load import checked, dump_line, json_schema_text, parse
from scale_cli.config.schema import MethodConfig, ModelConfig, RunConfig
from scale_cli.data.documents import CorpusReader
from scale_cli.data.encoding import Document, Encoder
from scale_cli.data.files import check_source
from scale_cli.errors import BaseModelError, CorpusError, UsageError, require
from scale_cli.methods.widened import far_from_asked
from scale_cli.planning.beginnings import HeldOut
from scale_cli.planning.device import measure_device
from scale_cli.planning.estimate import Estimate, estimate
from scale_cli.planning.step import step_cost
from scale_cli.processes import fast_precision
from scale_cli.runs.folder import RunFolder
from scale_cli.starter.fitting import LEAST_STEP_TOKENS, MIN_STEPS, MOST_READINGS, fit_sizes
from scale_cli.starter.offer import NewTokens, offer_tokens, own_tokens
from scale_cli.starter.parts import Parted, chat_of, measured_on_alone, part
from scale_cli.starter.texts import Text, look_into, warnings_of
from scale_cli.storage.atomic import write_text
from scale_cli.terminal import log, print_json
from scale_cli.upscale.base import load_base_config
from scale_cli.upscale.base_tokenizer import load_tokenizer
from scale_cli.vocabulary.tokenizer import check_ids

SCHEMA_FILE = "scale.schema.json"
# Shares of the documents: text to learn is worth more in training, known text in measuring.
_MOST_HELD_OUT = 0.1
_MOST_KEPT = 0.5
_REPLAY_SHARE = 0.1  # of the windows; a weight of 0.111 beside a weight of 1 gives it


def init(
    file: Path,
    base: str,
    learned: dict[str, Any],
    known: dict[str, Any],
    *,
    method: MethodConfig | None,
    minutes: float,
) -> None:
    """Write a config that `scale run` accepts unchanged; `learned` and `known` are the texts' entries in it.

    Without a method, the base is measured on the text. `minutes` are those of the whole run. Only the
    beginnings of the texts are read.
    """
    log("looking at     the base and the texts")
    model = checked(ModelConfig, {"base": base}, "--base")
    base_config = load_base_config(model)
    tokenizer = load_tokenizer(model)
    check_ids(tokenizer, base_config.vocab_size)
    encoder = Encoder(tokenizer, conversations=False)
    text = look_into(learned, encoder, "--corpus")
    retention = look_into(known, encoder, "--retention")
    if text.documents == retention.documents:
        raise UsageError(
            "--retention: is the same text as --corpus; give text that the base already knows"
        )
    precision = fast_precision()
    kind = None
    if method is None:
        # The code of models is slow to import, and only a measured base needs it.
        from scale_cli.starter.kind import kind_that_fits

        log(f"measuring      what the base knows of {learned['language']}")
        kind = kind_that_fits(model, base_config, text, tokenizer, precision)
        method = checked_method(kind.variant)
        if library := method.definition.streams.adapter_library:
            require(library, kind.words)
    new = own_tokens(text)
    if method.definition.takes_new_tokens:
        is_unknown = kind is not None and method.definition.widens  # so it was chosen
        new = offer_tokens(text, tokenizer, base_config.vocab_size, is_unknown=is_unknown)
    num_tokens = int(text.num_bytes * (new.tokens_per_byte or text.tokens_per_byte))
    if num_tokens < LEAST_STEP_TOKENS:
        raise CorpusError(
            f"--corpus: only about {num_tokens:,} tokens, but a step takes {LEAST_STEP_TOKENS:,}; "
            "give more text"
        )

    draft = _fit(
        file,
        base,
        base_config,
        tokenizer,
        method=method,
        why="" if kind is None else kind.words,
        precision=precision,
        text=text,
        retention=retention,
        new=new,
        num_tokens=num_tokens,
        minutes=minutes,
    )
    files = {path: content for of in draft.measured for path, content in of.files.items()}
    takes = draft.takes.in_words()
    with _new_files(files):
        _check(draft.config, tokenizer)
        write_text(file, config_text(file, **draft.found))
    if not (schema := file.with_name(SCHEMA_FILE)).exists():
        write_text(schema, json_schema_text())

    sizes = draft.found["sizes"]
    told = {"corpus": draft.found["corpus"].words, "retention": draft.found["kept"].words}
    told |= {"tokens": new.words, "method": method.variant, "why": draft.found["why"]}
    print_json({"file": file, **told, "sizes": sizes, "estimate": draft.takes})
    warnings = [*warnings_of(text), *warnings_of(retention)]
    warnings += [*draft.found["corpus"].warnings(), *draft.found["kept"].warnings()]
    if method.definition.widens:
        warnings += far_from_asked(base_config, method.expansion)
    is_too_long = sizes.max_steps == MIN_STEPS and draft.takes.total_s > 60 * minutes
    said = report.render(
        "init.txt.j2",
        file=file,
        **draft.found,
        takes=takes,
        schema=SCHEMA_FILE,
        texts=[path.name for path in files],
        too_long=f"{minutes:g}" if is_too_long else "",
        min_steps=MIN_STEPS,
        warnings=warnings,
    )
    for line in said.splitlines():
        log(line)


@dataclass(frozen=True)
class _Draft:
    """A config, and what it was made from."""

    found: dict[str, Any]  # what the templates show
    config: RunConfig
    measured: list[Parted]  # the parts of texts that evaluations read
    takes: Estimate


def _fit(
    file: Path,
    base: str,
    base_config: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    method: MethodConfig,
    why: str,  # this method; empty: it was asked for
    precision: str,
    text: Text,
    retention: Text,
    new: NewTokens,
    num_tokens: int,  # of the whole text
    minutes: float,
) -> _Draft:
    """Return sizes and parts of the texts with which the whole run takes the minutes."""
    device = measure_device(base_config, method, precision)
    step = step_cost(base_config, method, precision, num_new=new.number)
    training_s = 60 * minutes
    for _ in range(3):  # each time with the time that evaluation, start and export have left
        sizes = fit_sizes(
            step,
            base_config.max_position_embeddings,
            method,
            device,
            mixed_precision=precision,
            training_s=training_s,
            num_tokens=num_tokens,
        )
        corpus = part(text, "held-out", file, sizes.num_tokens, most=_MOST_HELD_OUT)
        replayed = round(_REPLAY_SHARE * sizes.num_tokens)
        if MOST_READINGS * retention.num_bytes * retention.tokens_per_byte < replayed:
            kept = measured_on_alone(retention, "retention")
        else:
            kept = part(retention, "retention", file, replayed, most=_MOST_KEPT)
        held_out = {"acquisition": [corpus], "retention": [kept]}
        if tokenizer.chat_template:
            for role, parts in held_out.items():
                parts.append(chat_of(parts[0], role, file))
        measured = [of for parts in held_out.values() for of in parts]
        found = {
            "model": {"base": base},
            "method": method,
            "why": why,
            "corpus": corpus,
            "kept": kept,
            "held_out": held_out,
            "has_chat": bool(tokenizer.chat_template),
            "retention_language": retention.source["language"],
            "new": new,
            "sizes": sizes,
        }
        words = config_text(file, **found)
        config = checked(RunConfig, parse(words, str(file)), str(file))
        counting = new.grown or tokenizer.backend_tokenizer
        texts = [
            HeldOut.of(
                of.held_out_documents,
                counting,
                window=sizes.sequence_length,
                context=base_config.max_position_embeddings,
            )
            for of in measured
        ]
        takes = estimate(config, step, device, texts)
        training_s = max(0.0, 60 * minutes - takes.total_s + takes.training_s)
    return _Draft(found, config, measured, takes)


def config_text(file: Path, **found: object) -> str:
    """Return the config as YAML with comments."""
    output_dir = json.dumps(f"runs/{file.stem}", ensure_ascii=False)
    return report.render(
        "starter.yaml.j2", file=file, **found, output_dir=output_dir, line=dump_line
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


def _check(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check what `scale run` would refuse, and what was not seen when the texts were read."""
    RunFolder(config.output_dir).check()
    for source in (*config.corpus.sources, *config.evaluation.perplexity):
        if not source.is_local:
            continue
        check_source(source)
        if source.messages_field is not None:
            turns = CorpusReader(source, config.corpus.max_document_bytes, tokenizer)
            if not any(isinstance(record, Document) for record in turns):
                raise BaseModelError(
                    f"--base: its chat template refuses a turn of user and assistant: "
                    f"{turns.ledger.described_losses()}"
                )
