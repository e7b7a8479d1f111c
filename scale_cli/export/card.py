"""The model card of an export: what it was made of, how, what it forgot, and under which licence.

Source: the hub's metadata, https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
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

LOADING_WITH_CODE = """\
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto", trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)

The code is in the `.py` files beside this card: read it before you trust it. Without it: `scale generate FOLDER`."""
_LOADING = {
    "llama": """\
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)

It is a plain {architecture}: vLLM, llama.cpp's converter and everything else that loads the base loads it.""",
    "transformers": LOADING_WITH_CODE,
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
    taught = " and ".join(language_name(code) for code in taught_languages(config))
    metadata = ModelCardData(
        language=languages_of(config),
        license=licence.identifier,
        license_name=licence.name,
        license_link=licence.link,
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=None if looks_local(config.model.base) else config.model.base,
        tags=["scale", "continual-pretraining", config.method.variant],
    )
    source = " ([SCALE](https://arxiv.org/abs/2511.03270))" if config.method.widens else ""
    return card_page(
        metadata,
        {
            f"# {base_title(record)}, taught {taught}": f"Made by `scale` with the method "
            f"{config.method.variant}{source}.",
            "## Loading": _LOADING[config.export.format].format(architecture=architecture),
            "## How it was made": _making(config, record, parity),
            "## Data": _data(config),
            "## What it forgot, and what it learned": _forgetting(report, config.export.format),
            "## Licence": f"{licence.told()} The texts it was trained on have licences of their own.",
        },
    )


def card_page(metadata: ModelCardData, sections: Mapping[str, str]) -> str:
    """Return a card: the hub's metadata, then sections by their titles."""
    return "\n\n".join([f"---\n{metadata.to_yaml()}\n---", *chain.from_iterable(sections.items())]) + "\n"


def taught_languages(config: RunConfig) -> list[str]:
    """Return the codes of the languages that a run trains on."""
    return list(dict.fromkeys(source.language for source in config.corpus.sources))


def languages_of(config: RunConfig) -> list[str]:
    """Return the codes of the languages that a run keeps and of those that it trains on."""
    kept = [source.language for source in config.evaluation.perplexity if source.role == "retention"]
    return list(dict.fromkeys([*kept, *taught_languages(config)]))


def base_title(record: BaseRecord) -> str:
    """Return what the base is called, of a local folder its last two names: where it lies is nobody's business."""
    return "/".join(Path(record.name).parts[-2:]) if looks_local(record.name) else record.name


def _making(config: RunConfig, record: BaseRecord, parity: Parity) -> str:
    position, train = read_json(RunFolder(config.output_dir).final / "position.json"), config.train
    steps, num_tokens, elapsed_s = (position[name] for name in ("step", "num_tokens", "elapsed_s"))
    revision = f" at `{record.revision}`" if record.revision else ""
    rows = {
        "base": f"{base_title(record)}{revision}, {record.dtype}",
        "base, SHA-256": f"`{record.content_sha256}`",
        "method": _method(config),
        "trained": f"{steps:,} steps of {train.global_batch_size:,} sequences of "
        f"{config.corpus.sequence_length:,} tokens: {num_tokens:,} tokens in {elapsed_s:,.0f} s",
        "optimiser": f"AdamW, lr {train.lr:g} ({train.schedule}, {train.warmup_steps:,} steps of warm-up), "
        f"weight decay {train.weight_decay:g}, seed {config.seed}",
        "this folder": f"format {config.export.format}; max difference of a logit from the trained model "
        f"{parity.max_logit_difference:.1e} over {parity.num_positions:,} positions",
    }
    return table(["", ""], [[name, told] for name, told in rows.items()])


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
    return table(["source", "language", "documents read", "dropped", "tokens", "tokens trained on"], rows)


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
    return f"{table(head_row, rows)}\n\n{told}"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
