"""The verb `scale init`: write a first config for a user's base and text, with sizes that fit the device."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from transformers import PreTrainedTokenizerBase

from scale_cli import report
from scale_cli.config.load import checked, dump_line, json_schema_text, parse
from scale_cli.config.schema import MethodConfig, ModelConfig, RunConfig
from scale_cli.config.sources import CorpusSource, ReadingConfig
from scale_cli.config.training import TrainConfig
from scale_cli.config.vocabulary import SCRIPTS, VocabularyConfig
from scale_cli.data.corpora import every_source
from scale_cli.data.documents import CorpusReader
from scale_cli.data.encoding import Document
from scale_cli.data.ledger import check_bad_fraction
from scale_cli.data.tokens import TokenCache
from scale_cli.errors import BaseModelError, ConfigError, CorpusError, UsageError
from scale_cli.planning.device import Device, measure_device
from scale_cli.planning.memory import memory_of
from scale_cli.planning.sizes import BaseSizes
from scale_cli.planning.walk import Base, walk
from scale_cli.runs.opened import Run
from scale_cli.storage.atomic import write_text
from scale_cli.terminal import log, print_json
from scale_cli.upscale.base import load_base_config
from scale_cli.upscale.base_tokenizer import load_tokenizer
from scale_cli.vocabulary.added_tokens import extended
from scale_cli.vocabulary.tokenizer import AddedTokens, most_added

SCHEMA_FILE = "scale.schema.json"
_FIRST = 32  # documents of a text that is only evaluated on
_REPLAY_SHARE = 0.1  # of the windows; a weight of 0.111 beside a weight of 1 gives it
_LENGTHS = (2048, 1024, 512, 256, 128, 64)
# Steps with fewer tokens are too noisy, and schedules with fewer steps too short, if there is time for more.
_MIN_STEP_TOKENS, _MAX_STEP_TOKENS, _MIN_BATCH_SIZE = 2048, 131_072, 8
_MIN_STEPS, _WANTED_STEPS, _MAX_STEPS = 10, 100, 100_000
_MOST_READINGS = 4  # readings of a text; they teach nearly as much as new text (Muennighoff et al., arXiv 2305.16264)
_SHARE_OF_HOST, _SHARE_OF_DEVICE = (
    0.5,
    0.8,
)  # of memory; the rest is for data, evaluation and other processes
# Limits in bytes: documents that are read, the sample whose tokens are counted, and one document.
_BYTES_READ, _BYTES_SAMPLED, _LARGEST_DOCUMENT = 1 << 22, 1 << 18, 1 << 28
_HELD_OUT_DOCUMENTS, _HELD_OUT_BYTES, _MOST_HELD_OUT = (
    32,
    1 << 16,
    10,
)  # at most 1 of 10 documents is held out
_OF_A_DATASET = 1 << 40  # bytes that a dataset is taken to have: more than a first run reads
_FEWEST_LINES, _UNEVEN = 100, 1.5
_TURNS, _TURN_CHARACTERS = 8, 400  # of chat that is measured
_PIECE, _LARGEST_PIECE = 2_000, 500_000  # characters
# Tokens per character of the new text. From the first figure on, new tokens are offered; from the
# second on, the base spells the script in bytes, and they are part of the config. Between the two a
# base knows the text by its own tokens, and learns more by them (docs/results/real-base.md).
_OFFERED_FROM = 1.3
_TAKEN_FROM = 2.0
_FEWEST_NEW = 256  # fewer new tokens save little
_SURE = 0.8  # share of a text's new tokens that it still gives when a part of it is held out


@dataclass(frozen=True)
class Text:
    """A user's text, and what its beginning shows."""

    source: dict[str, Any]  # an entry of a config
    documents: list[str]  # the first
    is_whole: bool  # whether those are all
    num_bytes: int  # of the whole text, estimated if it was not read to the end
    sample: str
    tokens_per_byte: float


@dataclass(frozen=True)
class Parted:
    """A text in two parts: one to train on, one held out."""

    trained_on: dict[str, Any]  # entries of a config
    held_out: dict[str, Any]
    words: str  # how it was split
    files: dict[Path, list[str]] = field(
        default_factory=dict
    )  # the documents of each new file to write


@dataclass(frozen=True)
class NewTokens:
    """New tokens for a text's script, or why none are added."""

    words: str
    script: str = ""
    number: int = 0  # that the config has
    offered: int = 0  # that it has as a comment
    tokens_per_byte: float = 0.0  # with those that it has


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run that fit the device and the time."""

    device: Device
    mixed_precision: str
    sequence_length: int
    global_batch_size: int
    micro_batch_size: int
    max_steps: int
    minutes: float  # that its steps take at the device's speed
    memory_bytes: int
    available_bytes: int

    @property
    def num_tokens(self) -> int:
        return self.max_steps * self.global_batch_size * self.sequence_length


def init(
    file: Path, base: str, learned: dict[str, Any], known: dict[str, Any], minutes: float
) -> None:
    """Write a config that `scale run` accepts unchanged; `learned` and `known` are the texts' entries in it."""
    if file.exists():
        raise UsageError(f"{file}: already exists; give another name")
    model = {"base": base}
    named = checked(ModelConfig, model, "--base")
    base_config, tokenizer = load_base_config(named), load_tokenizer(named)
    text, retention = look_into(learned, tokenizer), look_into(known, tokenizer)
    if text.documents == retention.documents:
        raise UsageError(
            "--retention: is the same text as --corpus; give text that the base already knows"
        )
    new = offer_tokens(text, tokenizer, base_config.vocab_size)
    num_tokens = int(text.num_bytes * (new.tokens_per_byte or text.tokens_per_byte))
    if num_tokens < _MIN_STEP_TOKENS:
        raise CorpusError(
            f"--corpus: only about {num_tokens:,} tokens, but a step takes {_MIN_STEP_TOKENS:,}; give more text"
        )
    base_sizes = BaseSizes.of(base_config.to_dict(), base)
    sizes = fit_sizes(base_sizes, new.number, minutes, num_tokens)
    corpus = part(text, "held-out", file, sizes.num_tokens)
    replayed = round(_REPLAY_SHARE * sizes.num_tokens)
    if (
        _MOST_READINGS * retention.num_bytes * retention.tokens_per_byte < replayed
    ):  # too little to train on
        measured_on = retention.source | {"name": "retention", "max_documents": _FIRST}
        kept = Parted({}, measured_on, "too little to train on: all of it is held out")
    else:
        kept = part(retention, "retention", file, replayed)
    files = {path: _as_lines(documents) for path, documents in (corpus.files | kept.files).items()}
    chat: list[dict[str, Any]] = []
    if tokenizer.chat_template:
        parts = {"retention": (retention, kept), "acquisition": (text, corpus)}
        chat, of_chat = measured_chat(file, parts)
        files |= of_chat
    of_texts = {"corpus": corpus, "kept": kept, "retention_language": known["language"]}
    text_of_config = config_text(file, model=model, **of_texts, new=new, sizes=sizes, chat=chat)
    _write(file, text_of_config, files)
    found = {"corpus": corpus.words, "retention": kept.words, "tokens": new.words}
    print_json({"file": file, **found, "sizes": sizes})
    a_step = f"{sizes.global_batch_size} x {sizes.sequence_length:,} tokens, {sizes.micro_batch_size} at once"
    for name, words in found.items():
        log(f"{name:15}{words}")
    if chat:
        log(
            "chat           the base has a chat template. Plain text makes the plain export forget to "
            "answer; so\n               a turn in each language is measured, before and after. For a "
            "model that answers, train on\n               conversations: messages_field in a source, "
            "and as replay too (docs/training.md)"
        )
    takes = f"about {sizes.minutes:.2g} min without evaluation, {sizes.device.origin}"
    log(f"sizes          {sizes.max_steps:,} steps of {a_step}: {takes}")
    if sizes.max_steps == _MIN_STEPS and sizes.minutes > minutes:
        log(
            f"warning: longer than --minutes {minutes:g}, since a run takes at least {_MIN_STEPS} steps"
        )
    log(
        "               a run of minutes only shows that everything works; a model that writes well takes hours"
    )
    log(f"written        {file}, and {SCHEMA_FILE} beside it, with which an editor checks it")
    log(f"next           scale plan {file}; scale run {file}")


def measured_chat(
    file: Path, texts: dict[str, tuple[Text, Parted]]
) -> tuple[list[dict[str, Any]], dict[Path, str]]:
    """Return sources of turns to measure, by the role of their text, and the files to write.

    The user gives the beginning of a held-out document, and the assistant the rest.
    """
    sources, files = [], {}
    for role, (text, parted) in texts.items():
        path = file.with_name(f"{file.stem}.chat-{role}.jsonl")
        named = {"name": f"chat-{role}", "path": str(path), "messages_field": "messages"}
        sources.append({**named, "language": text.source["language"], "role": role})
        of_files = parted.files.get(Path(parted.held_out.get("path", "")))
        files[path] = turns_of(of_files or text.documents)
    return sources, files


def turns_of(documents: list[str]) -> str:
    """Return the lines of a file of conversations, one of each document."""
    lines = []
    for document in documents[:_TURNS]:
        text = document[: 2 * _TURN_CHARACTERS]
        middle = len(text) // 2
        turns = [("user", text[:middle]), ("assistant", text[middle:])]
        messages = [{"role": role, "content": content} for role, content in turns]
        lines.append(json.dumps({"messages": messages}, ensure_ascii=False))
    return "\n".join(lines) + "\n"


def config_text(file: Path, **found: object) -> str:
    """Return the config as YAML with comments."""
    output_dir = json.dumps(f"runs/{file.stem}", ensure_ascii=False)
    return report.render(
        "starter.yaml.j2", file=file, **found, output_dir=output_dir, line=dump_line
    )


def fit_sizes(base: BaseSizes, num_new: int, minutes: float, num_tokens: int) -> Sizes:
    """Return the longest windows, and the largest micro-batch, that fit in memory and leave time for many steps.

    The time limits the number of steps, and so do four readings of the text, of `num_tokens`.
    """
    devices = {precision: measure_device(base, precision) for precision in ("no", "bf16")}
    mixed_precision, device = max(devices.items(), key=lambda item: item[1].flops_per_s)
    available = _memory_bytes(device.type)
    method = MethodConfig.model_validate({"distillation": {"weight": 4.0}})
    step = walk(Base(base, itemsize=4), method, mixed_precision, num_new=num_new)
    settings = {"max_steps": 1, "mixed_precision": mixed_precision}

    def memory(length: int, at_once: int) -> int:
        batch = {"global_batch_size": at_once, "micro_batch_size": at_once}
        return memory_of(
            step,
            TrainConfig.model_validate(settings | batch),
            sequence_length=length,
            vocab_size=base.vocab_size + num_new,
            device_type=device.type,
            distils=True,
        ).total

    def tokens_of_run(length: int) -> float:
        return min(
            60 * minutes * device.flops_per_s / step.flops(length), _MOST_READINGS * num_tokens
        )

    step_tokens = min(
        max(tokens_of_run(_LENGTHS[-1]) / _WANTED_STEPS, _MIN_STEP_TOKENS), _MAX_STEP_TOKENS
    )
    longest = min(base.max_position_embeddings, step_tokens // _MIN_BATCH_SIZE)
    lengths = [
        length for length in _LENGTHS if length <= longest and memory(length, 1) <= available
    ]
    if not lengths:
        needed, there = (
            f"{num_bytes / 2**30:.1f} GiB" for num_bytes in (memory(_LENGTHS[-1], 1), available)
        )
        raise ConfigError(
            f"--base: training needs {needed}, but {device.type} has {there} available; choose a smaller base"
        )
    length = lengths[0]
    batch_size = at_once = 2 ** int(step_tokens / length).bit_length() // 2
    while at_once > 1 and memory(length, at_once) > available:
        at_once //= 2
    steps = min(max(_MIN_STEPS, int(tokens_of_run(length) / (batch_size * length))), _MAX_STEPS)
    takes = steps * batch_size * length * step.flops(length) / device.flops_per_s / 60
    held = memory(length, at_once)
    return Sizes(
        device, mixed_precision, length, batch_size, at_once, steps, takes, held, available
    )


def _memory_bytes(device_type: str) -> int:
    """Return the bytes a run may use: a share of a CPU's whole memory, or of another device's free memory."""
    if device_type == "cpu":
        return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _SHARE_OF_HOST)
    import torch

    return int(torch.accelerator.get_memory_info()[0] * _SHARE_OF_DEVICE)


def _as_lines(documents: list[str]) -> str:
    return "".join(json.dumps({"text": of}, ensure_ascii=False) + "\n" for of in documents)


def _write(file: Path, text: str, texts: dict[Path, str]) -> None:
    """Write the config and the text files that it names; write nothing if `scale run` would reject it."""
    if there := next((path for path in texts if path.exists()), None):
        raise UsageError(
            f"{there}: already exists; give the config another name, or move this file"
        )
    config = checked(RunConfig, parse(text, str(file)), str(file))
    try:
        for path, content in texts.items():
            write_text(path, content)
        Run(config).check(every_source(config))
    except BaseException:
        for path in texts:
            path.unlink(missing_ok=True)
        raise
    write_text(file, text)
    if not (schema := file.with_name(SCHEMA_FILE)).exists():
        write_text(schema, json_schema_text())


def look_into(source: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Text:
    """Read the beginning of a user's text: files, or a dataset of the hub.

    A .txt without blank lines is read line by line if its lines vary in length, like comments, unlike those of a page.
    """
    text = _read(source, tokenizer)
    if len(text.documents) < _MOST_HELD_OUT and _is_txt(text.source):
        by_line = _read({**text.source, "documents": "line"}, tokenizer)
        lengths = [len(line) for line in by_line.documents]
        if len(lengths) >= _FEWEST_LINES and quantiles(lengths, n=20)[-1] > _UNEVEN * median(
            lengths
        ):
            return by_line
    return text


def _is_txt(source: dict[str, Any]) -> bool:
    return re.search(r"\.txt(\.\w+)?$", source.get("path", "")) is not None


def _read(source: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Text:
    known = checked(CorpusSource, source, source["name"])
    reader = CorpusReader(known, _LARGEST_DOCUMENT)
    documents, size, is_whole, read_bytes = [], 0, True, 0
    for document in (record for record in reader if isinstance(record, Document)):
        documents.append(document.text)
        size += document.num_bytes
        if size >= _BYTES_READ:
            is_whole, read_bytes = False, reader.position_bytes  # known only while its file is open
            break
    if not is_whole:
        size = size * reader.total_bytes // read_bytes if read_bytes else _OF_A_DATASET
    sample = "\n".join(documents[:: max(1, len(documents) // 64)])[:_BYTES_SAMPLED]
    num_tokens = reader.ledger.num_tokens = len(
        tokenizer(sample, add_special_tokens=False).input_ids
    )
    check_bad_fraction(known, reader.ledger, ReadingConfig().max_bad_fraction)
    return Text(source, documents, is_whole, size, sample, num_tokens / len(sample.encode()))


def part(text: Text, held_name: str, file: Path, num_tokens: int) -> Parted:
    """Hold out a tenth of a text's documents, or fewer if these are 32 documents and 64 KiB.

    Of fewer than ten, hold out the end of each. Of a large text, leave out what a run of `num_tokens` does not read.
    """
    number = len(text.documents)
    if number < _MOST_HELD_OUT and text.is_whole:
        return _cut(text, held_name, file)
    sizes = list(accumulate(len(document.encode()) for document in text.documents))
    enough = next(
        (
            held
            for held, size in enumerate(sizes, 1)
            if held >= _HELD_OUT_DOCUMENTS and size >= _HELD_OUT_BYTES
        ),
        number,
    )
    held = min(max(1, number // _MOST_HELD_OUT), enough)
    source = {**text.source, "skip_documents": held}
    counted, rest, each = f"{number:,}", "the rest to train on", ""
    if not text.is_whole:  # twice what a run reads, and at least what was read here
        most = max(number, ceil(2 * num_tokens / text.tokens_per_byte / sizes[-1] * number))
        source["max_documents"] = most
        counted, rest = (
            f"more than {number:,}",
            f"{most:,} to train on, which is enough for these steps",
        )
    if _is_txt(text.source):
        each = " (a line each)" if "documents" in text.source else " (text between blank lines)"
    first = {"split": "train"} if "dataset" in text.source else {}
    return Parted(
        source,
        {**first, **text.source, "name": held_name, "max_documents": held},
        f"{counted} documents{each}: the first {held:,} held out, {rest}",
    )


def _cut(text: Text, held_name: str, file: Path) -> Parted:
    """Hold out the last tenth of every document, in files of their own."""
    name, number = text.source["name"], len(text.documents)
    parts: dict[str, list[str]] = {name: [], held_name: []}
    for document in text.documents:
        pieces = _split(document, min(_PIECE, max(1, len(document) // _MOST_HELD_OUT)))
        at = len(pieces) - max(1, len(pieces) // _MOST_HELD_OUT)
        parts[name] += _split("".join(pieces[:at]), _LARGEST_PIECE)
        parts[held_name] += pieces[at:]
    files, sources = {}, []
    for part_name, pieces in parts.items():
        path = file.with_name(f"{file.stem}.{part_name}.jsonl")
        files[path] = [piece.strip() for piece in pieces if piece.strip()]
        sources.append({"name": part_name, "path": str(path), "language": text.source["language"]})
    if not all(files.values()):
        raise CorpusError(
            f"{name}: {number} documents of {text.num_bytes:,} bytes are too little text to hold out a part; "
            "give more text"
        )
    words = (
        "1 document: its last tenth"
        if number == 1
        else f"{number} documents: the last tenth of each"
    )
    written = " and ".join(path.name for path in files)
    trained_on, held_out = sources
    return Parted(trained_on, held_out, f"{words} held out; written as {written}", files)


def _split(text: str, length: int) -> list[str]:
    """Cut a text into pieces of at most `length` characters, after white space if there is any."""
    return re.findall(rf".{{1,{length}}}(?:(?<=\s)|\Z)|.{{1,{length}}}", text, re.DOTALL)


def offer_tokens(text: Text, tokenizer: PreTrainedTokenizerBase, first_id: int) -> NewTokens:
    """Find new tokens for a text whose characters cost many tokens."""
    num_bytes = len(text.sample.encode())
    cost = text.tokens_per_byte * num_bytes / len(text.sample)
    words = f"{cost:.2f} per character, {1 / text.tokens_per_byte:.2f} bytes each"
    letters = Counter[str]()
    for sign, number in Counter(text.sample).items():
        letters.update(
            {
                name: number
                for name, of in SCRIPTS.items()
                if any(a <= ord(sign) <= b for a, b in of)
            }
        )
    if cost < _OFFERED_FROM or not letters:
        return NewTokens(words)
    script = letters.most_common(1)[0][0]  # the most frequent one beyond ASCII
    wanted, known = VocabularyConfig(script=script), CorpusSource.model_validate(text.source)
    more = wanted.model_copy(update={"new_tokens": round(wanted.new_tokens / _SURE)})
    try:
        found, _ = AddedTokens(first_id, more, [known], TokenCache(Path(), tokenizer)).learned(
            _BYTES_READ, wanted.min_count
        )
    except (BaseModelError, ConfigError) as error:
        return NewTokens(f"{words}; no new ones: {error}")
    number = min(wanted.new_tokens, most_added(first_id, int(_SURE * len(found))))
    if number < _FEWEST_NEW:
        return NewTokens(f"{words}; no new ones: the text yields only {len(found):,} of {script}")
    grown = extended(tokenizer.backend_tokenizer, found[:number], first_id)
    per_byte = len(grown.encode(text.sample, add_special_tokens=False).ids) / num_bytes
    saved = 1 - per_byte / text.tokens_per_byte
    words += (
        f"; with {number:,} new ones of {script} {1 / per_byte:.2f} bytes each: {saved:.0%} fewer "
        "tokens for the same text"
    )
    if cost < _TAKEN_FROM:
        return NewTokens(f"{words}; a comment in the config adds them", script, offered=number)
    return NewTokens(words, script, number, tokens_per_byte=per_byte)
