"""The model card of an export: what it was made of, how, what it forgot, and under which licence.

Source: the hub's metadata, https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from scale_cli.config.schema import RunConfig
from scale_cli.evaluation.render import language_name, number, signed
from scale_cli.evaluation.results import Report
from scale_cli.export.licence import Licence
from scale_cli.export.parity import Parity
from scale_cli.storage.atomic import read_json
from scale_cli.storage.layout import RunFolder
from scale_cli.upscale.base import BaseRecord, looks_local
from scale_cli.upscale.folder import read_record

_LOADING = {
    "llama": """\
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)

It is a plain {architecture}: vLLM, llama.cpp's converter and everything else that loads the base loads it.""",
    "transformers": """\
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto", trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)

The code is in the `.py` files beside this card: read it before you trust it. Without it: `scale generate FOLDER`.""",
    "adapter": """\
    scale generate FOLDER --prompt TEXT

It is the expansion alone; it loads onto the base below, checked tensor by tensor, and onto no other.""",
}


def model_card(config: RunConfig, report: Report | None, parity: Parity, licence: Licence, architecture: str) -> str:
    """Return the README.md of an export.

    Args:
        config: the resolved config.
        report: the forgetting report of this training; None where it has not been evaluated.
        parity: of the export with the trained model.
        licence: of the base.
        architecture: the class that the exported config.json names.
    """
    record = read_record(RunFolder(config.output_dir).final)
    languages = _languages(config)
    taught = " and ".join(language_name(code) for code in _taught(config))
    metadata = ModelCardData(
        language=languages,
        license=licence.identifier,
        license_name=licence.name,
        license_link=licence.link,
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=None if looks_local(config.model.base) else config.model.base,
        tags=["scale", "continual-pretraining", config.method.variant],
    )
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {_title(record)}, taught {taught}",
        f"Made by `scale` with the method {config.method.variant}"
        f"{' ([SCALE](https://arxiv.org/abs/2511.03270))' if config.method.widens else ''}.",
        "## Loading",
        _LOADING[config.export.format].format(architecture=architecture),
        "## How it was made",
        _making(config, record, parity),
        "## Data",
        _data(config),
        "## What it forgot, and what it learned",
        _forgetting(report, config.export.format),
        "## Licence",
        f"{licence.told()} The texts it was trained on have licences of their own.",
    ]
    return "\n\n".join(parts) + "\n"


def _taught(config: RunConfig) -> list[str]:
    return list(dict.fromkeys(source.language for source in config.corpus.sources))


def _languages(config: RunConfig) -> list[str]:
    kept = [source.language for source in config.evaluation.perplexity if source.role == "retention"]
    return list(dict.fromkeys([*kept, *_taught(config)]))


def _title(record: BaseRecord) -> str:
    """Return what the base is called, of a local folder its last two names: where it lies is nobody's business."""
    return "/".join(Path(record.name).parts[-2:]) if looks_local(record.name) else record.name


def _making(config: RunConfig, record: BaseRecord, parity: Parity) -> str:
    position, train = read_json(RunFolder(config.output_dir).final / "position.json"), config.train
    steps, num_tokens, elapsed_s = (position[name] for name in ("step", "num_tokens", "elapsed_s"))
    revision = f" at `{record.revision}`" if record.revision else ""
    rows = {
        "base": f"{_title(record)}{revision}, {record.dtype}",
        "base, SHA-256": f"`{record.content_sha256}`",
        "method": _method(config),
        "trained": f"{steps:,} steps of {train.global_batch_size:,} sequences of "
        f"{config.corpus.sequence_length:,} tokens: {num_tokens:,} tokens in {elapsed_s:,.0f} s",
        "optimiser": f"AdamW, lr {train.lr:g} ({train.schedule}, {train.warmup_steps:,} steps of warm-up), "
        f"weight decay {train.weight_decay:g}, seed {config.seed}",
        "this folder": f"format {config.export.format}; max difference of a logit from the trained model "
        f"{parity.max_logit_difference:.1e} over {parity.num_positions:,} positions",
    }
    return _table(["", ""], [[name, told] for name, told in rows.items()])


def _method(config: RunConfig) -> str:
    method = config.method
    if not method.widens:
        return method.variant
    told = f"{method.variant}, widened by {method.expansion.ratio:g} (start: {method.expansion.init})"
    return f"{told}, {method.router.rule} rule" if method.variant == "route" else told


def _data(config: RunConfig) -> str:
    ledgers = read_json(RunFolder(config.output_dir).final / "token_ledger.json")
    rows = []
    for source in config.corpus.sources:
        entry: dict[str, Any] = ledgers[source.name]
        corpus = entry["corpus"]
        dropped = sum(count["documents"] for count in corpus["dropped"].values())
        counts = [corpus["read"]["documents"], dropped, corpus["num_tokens"], entry["num_trained"]]
        rows.append([source.name, language_name(source.language), *(f"{count:,}" for count in counts)])
    return _table(["source", "language", "documents read", "dropped", "tokens", "tokens trained on"], rows)


def _forgetting(report: Report | None, export_format: str) -> str:
    if report is None or not report.corpora:
        return "Not measured: `scale evaluate`, then `scale export` again, puts the table here."
    answers = "adapted" if export_format == "llama" else report.served
    rows = []
    for corpus in report.corpora:
        head = corpus.heads[answers]
        figures = [number(corpus.heads["base"].bits_per_byte), number(head.bits_per_byte)]
        named = [corpus.name, f"{language_name(corpus.language)}, {corpus.role}", f"{corpus.num_documents:,}"]
        difference = signed(head.bits_per_byte_difference, 4)
        rows.append([*named, *figures, difference, number(head.worst_document_nats)])
    head_row = ["held-out", "", "documents", "base", "this model", "difference [95 %]", "worst document, nats"]
    told = "Bits per byte; less is better. Differences with paired bootstrap intervals over documents."
    if answers != report.served:
        told += (
            " This folder holds the adaptation head alone; the router, which keeps what the base knew, is in the format"
            " `transformers`."
        )
    return f"{_table(head_row, rows)}\n\n{told}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
