"""The verb `scale init`: a first config for a base and text of somebody's own, in sizes for the device at hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from scale_cli.config.load import checked, json_schema_text
from scale_cli.config.safe_yaml import dump_line, parse
from scale_cli.config.schema import MethodConfig, ModelConfig, RunConfig
from scale_cli.data.corpora import every_source
from scale_cli.errors import CorpusError, UsageError
from scale_cli.planning.fitting import MIN_STEP_TOKENS, MOST_READINGS, Sizes, fitting_sizes, gib
from scale_cli.planning.texts import NewTokens, Parted, as_jsonl, check_apart, limit, look_into, offer_tokens, part
from scale_cli.storage.atomic import write_text
from scale_cli.upscale.base import load_base_config
from scale_cli.upscale.run import Run
from scale_cli.upscale.tokenizer import load_tokenizer
from scale_cli.values import check_language

SCHEMA_FILE = "scale.schema.json"
_FIRST = {"max_documents": 32}  # of a text that is only measured on
_REPLAY_SHARE = 0.1  # of the windows, which a weight of 0.111 beside 1 gives
# Measured on bases of 5 M parameters (docs/training.md); of larger ones the paper's, which is the default.
_SMALL_HIDDEN_SIZE, _MEASURED_LR, _PAPERS_LR = 512, 5.0e-3, 1.0e-3


@dataclass(frozen=True)
class Answers:
    """What only the reader knows, by the flags of `scale init`; texts are files, or OWNER/NAME[:SUBSET[:SPLIT]]."""

    base: str
    corpus: str
    language: str
    retention: str
    retention_language: str
    held_out: str | None  # None: a part of the corpus
    minutes: float


@dataclass(frozen=True)
class StarterSummary:
    """What was written, for the terminal."""

    file: Path
    texts: dict[str, str]  # where their documents went
    tokens: str
    sizes: Sizes

    def lines(self) -> list[str]:
        """Return what was found, where it is, what it asks for, and what to do with it."""
        sizes = self.sizes
        step = f"{sizes.global_batch_size} x {sizes.sequence_length:,} tokens, {sizes.micro_batch_size} at once"
        return [
            *(f"{name:<15}{words}" for name, words in self.texts.items()),
            f"tokens         {self.tokens}",
            f"sizes          {sizes.max_steps:,} steps of {step}: about {sizes.minutes:.2g} min, {sizes.device.origin}",
            f"{'':<15}a run of minutes shows that everything works; to write well takes hours",
            f"written        {self.file}, and {SCHEMA_FILE} beside it, by which an editor checks it",
            f"next           scale plan {self.file}; scale run {self.file}",
        ]


def init(answers: Answers, file: Path) -> StarterSummary:
    """Write a config that `scale run` takes as it is."""
    if file.exists():
        raise UsageError(f"{file}: is there already; give another name")
    _check(answers)
    model = {"base": answers.base, "dtype": "float32"}
    named = checked(ModelConfig, model, "--base")
    base_config, tokenizer = load_base_config(named), load_tokenizer(named)
    corpus = look_into("corpus", answers.corpus, answers.language, tokenizer)
    if answers.held_out is None:
        parted = part(corpus, "held-out", file)
    else:
        other = look_into("held-out", answers.held_out, answers.language, tokenizer)
        parted = Parted(corpus.source, other.source | _FIRST, "all of it to train on")
    new = offer_tokens(corpus, tokenizer, base_config.vocab_size)
    num_tokens = int(corpus.num_bytes * (new.tokens_per_byte or corpus.tokens_per_byte))
    if num_tokens < MIN_STEP_TOKENS:
        raise CorpusError(
            f"--corpus {answers.corpus}: about {num_tokens:,} tokens, and a step takes {MIN_STEP_TOKENS:,}"
        )
    retention = look_into("replay", answers.retention, answers.retention_language, tokenizer)
    kept = part(retention, "retention", file)
    distilling = MethodConfig.model_validate({"distillation": {"weight": 4.0}})
    sizes = fitting_sizes(base_config, distilling, new.number, answers.minutes, num_tokens)
    if MOST_READINGS * retention.num_tokens < _REPLAY_SHARE * sizes.num_tokens:  # too little to train on
        kept = Parted({}, retention.source | {"name": "retention"} | _FIRST, "all of it to measure on")
    parted = limit(corpus, parted, sizes.num_tokens)
    kept = limit(retention, kept, round(_REPLAY_SHARE * sizes.num_tokens))
    if sizes.device.type != "cpu" and base_config.dtype == torch.bfloat16:
        model["dtype"] = "bfloat16"
    lr = _MEASURED_LR if base_config.hidden_size <= _SMALL_HIDDEN_SIZE else _PAPERS_LR
    text = starter_text(answers, file, model, parted, kept, new, sizes, lr)
    _write(file, text, parted.files | kept.files)
    return StarterSummary(file, {"corpus": parted.words, "retention": kept.words}, new.words, sizes)


def _check(answers: Answers) -> None:
    """Refuse, by their flags, languages that are none and texts that are not apart."""
    for flag, code in (("--language", answers.language), ("--retention-language", answers.retention_language)):
        try:
            check_language(code)
        except ValueError as error:
            raise UsageError(f"{flag}: {error}") from None
    texts = {"--corpus": answers.corpus, "--retention": answers.retention, "--held-out": answers.held_out}
    check_apart({flag: text for flag, text in texts.items() if text is not None})


def starter_text(
    answers: Answers,
    file: Path,
    model: dict[str, str],
    corpus: Parted,
    kept: Parted,
    new: NewTokens,
    sizes: Sizes,
    lr: float,
) -> str:
    """Return the config, comments and all."""
    template = Environment(
        loader=PackageLoader("scale_cli", "report/templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    ).get_template("starter.yaml.j2")
    values: dict[str, Any] = {
        "output_dir": json.dumps(f"runs/{file.stem}", ensure_ascii=False),
        "model": dump_line(model),
        "corpus": dump_line(corpus.trained_on),
        "held_out": dump_line(corpus.held_out | {"role": "acquisition"}),
        "retention": dump_line(kept.held_out | {"role": "retention"}),
        "replay": dump_line(kept.trained_on | {"weight": 0.111, "role": "replay"}) if kept.trained_on else None,
        "memory": gib(sizes.memory_bytes),
        "available": gib(sizes.available_bytes),
    }
    return template.render(
        values, answers=answers, file=file, new=new, sizes=sizes, lr=f"{lr:.1e}".replace("e-0", "e-")
    )


def _write(file: Path, text: str, texts: dict[Path, list[str]]) -> None:
    """Write the config and the parts of texts that it names; nothing, where `scale run` would refuse it."""
    if there := next((path for path in texts if path.exists()), None):
        raise UsageError(f"{there}: is there already; give the config another name, or move that away")
    config = checked(RunConfig, parse(text, str(file)), str(file))
    try:
        for path, documents in texts.items():
            write_text(path, as_jsonl(documents))
        Run(config).check(every_source(config))
    except BaseException:
        for path in texts:
            path.unlink(missing_ok=True)
        raise
    write_text(file, text)
    if not (schema := file.with_name(SCHEMA_FILE)).exists():
        write_text(schema, json_schema_text())
