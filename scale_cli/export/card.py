"""The model card of an export: what it was made of, how, what it forgot, and under which licence.

Source: the hub's metadata, https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from scale_cli.config.load import load_config
from scale_cli.config.names import language_name, method_in_words, method_name
from scale_cli.config.schema import RunConfig
from scale_cli.evaluation.guarantee import guarantee
from scale_cli.evaluation.results import Report
from scale_cli.export.licence import Licence
from scale_cli.export.parity import Parity
from scale_cli.model.configuration_scale import LEAST_TRANSFORMERS
from scale_cli.report.numbers import number, with_interval, worst_document
from scale_cli.storage.atomic import read_json
from scale_cli.storage.layout import RunFolder
from scale_cli.upscale.base import BaseRecord, looks_local, stage_folder
from scale_cli.upscale.folder import read_record

LOADING_WITH_CODE = f"""\
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto", trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=False)

It needs transformers {".".join(map(str, LEAST_TRANSFORMERS))} or newer. The code is in the `.py` files beside this \
card: read it before you trust it. Without it: `scale generate FOLDER`. The tokenizer needs none of it, but \
transformers asks about it unless it is told so, as above."""
_OPTIMISERS = {"adamw": "AdamW", "muon": "Muon on the matrices and AdamW on the rest"}
_LOADING = {
    "llama": """\
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)

It is a plain {architecture}: vLLM, llama.cpp's converter and everything else that loads the base loads it.""",
    "routed": """\
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto", trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)

So loaded it routes: for every token it weighs the head of the base and the trained one by how well each predicted the
text so far. The code is in `routed_scale.py` and `routing.py` beside this card: read it before you trust it. Without
it: `scale generate FOLDER`; as a server: `scale serve FOLDER`, in vLLM or transformers.

**Loaded plainly**, without `trust_remote_code`, by llama.cpp's converter, or by a vLLM that does not have our plug-in,
it is a plain {architecture}: the trained head alone, which has forgotten what the table below says.""",
    "transformers": LOADING_WITH_CODE,
    "adapter": """\
    scale generate FOLDER --prompt TEXT

It is what was trained, alone; it loads onto the base below, checked tensor by tensor, and onto no other.""",
}
_LOADING_BY_PEFT = """\
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE, dtype="{dtype}"), FOLDER)

It is a LoRA adapter as PEFT and servers of adapters load it. That the base is the one below, `scale generate FOLDER`
checks, and they do not."""


@dataclass(frozen=True)
class _Stage:
    """One training, of the model itself or of a widened base that it stands on.

    Args:
        name: of its run.
        config: of its run.
        folder: `final/`, or an adapter export, which says neither how long it was trained nor on how much.
    """

    name: str
    config: RunConfig
    folder: Path


def _stages(config: RunConfig) -> list[_Stage]:
    """Return the trainings that made a model, bottom up."""
    stages = [_Stage(config.output_dir.name, config, RunFolder(config.output_dir).final)]
    while (below := stage_folder(stages[0].config.model)) is not None:
        earlier = load_config(below / "scale.yaml")
        stages.insert(0, _Stage(earlier.output_dir.name, earlier, below))
    return stages


def model_card(config: RunConfig, report: Report | None, parity: Parity, licence: Licence, architecture: str) -> str:
    """Return the README.md of an export.

    Args:
        config: the resolved config.
        report: the forgetting report of this training; None where it has not been evaluated.
        parity: of the export with the trained model.
        licence: of the base.
        architecture: the class that the exported config.json names.
    """
    stages = _stages(config)
    record = read_record(stages[0].folder)
    (export_format,) = config.export.formats
    source = " ([arXiv 2511.03270](https://arxiv.org/abs/2511.03270))" if config.method.widens else ""
    upon = f", upon {' and '.join(stage.name for stage in stages[:-1])}" if len(stages) > 1 else ""
    summary = f"Made by `scale`, by {method_name(config.method.variant)}{source}{upon}."
    if config.method.widens and export_format == "llama":
        summary = f"{_what_it_lacks(config, report)}\n\n{summary}"
    return card_page(
        record,
        [stage.config for stage in stages],
        licence,
        config.method.variant,
        summary,
        {
            "Loading": _loading(config).format(architecture=architecture, dtype=config.model.dtype),
            "How it was made": _making(stages, record, export_format, parity),
            "Data": _data(stages),
            "What it forgot, and what it learned": _forgetting(config, report),
        },
        "peft" if _is_peft(config) else "transformers",
    )


def _is_peft(config: RunConfig) -> bool:
    return config.method.variant == "lora" and config.export.formats == ["adapter"]


def _routes_plainly(config: RunConfig) -> bool:
    """Return whether an export is a plain folder that can be served routed."""
    return config.export.formats == ["llama"] and config.method.routes_plainly


def _loading(config: RunConfig) -> str:
    if _is_peft(config):
        return _LOADING_BY_PEFT
    (export_format,) = config.export.formats
    return _LOADING["routed" if _routes_plainly(config) else export_format]


def _what_it_lacks(config: RunConfig, report: Report | None) -> str:
    """Return the first line of the card of a plain folder: what the head in it lost, and what keeps that."""
    lost = "what it lost has not been measured"
    if report is not None and report.with_role("retention"):
        changes = [
            f"{language_name(corpus.language)} ({corpus.name}) from {number(corpus.heads['base'].bits_per_byte)} to "
            f"{number(corpus.heads['adapted'].bits_per_byte)} bits/byte"
            for corpus in report.with_role("retention")
        ]
        lost = f"against the base it took {', '.join(changes)}"
    if _routes_plainly(config):
        keeping = (
            "with its router (`trust_remote_code=True`, `scale generate`, `scale serve`) it keeps what the base knew"
        )
        return f"**Loaded plainly, this is the trained head alone, without a router: {lost}; {keeping}.**"
    keeping = "a run of the variant `route` keeps what the base knew"
    if config.method.variant == "route":
        keeping = "the folder of the format `transformers`, and `scale generate`, route and keep what the base knew"
    return f"**This is the trained head alone, without a router: {lost}; {keeping}.**"


def card_page(
    record: BaseRecord,
    runs: Sequence[RunConfig],
    licence: Licence,
    kind: str,
    summary: str,
    sections: Mapping[str, str],
    library: str = "transformers",
) -> str:
    """Return a card: the hub's metadata, title and summary, sections by their titles, the licence.

    Args:
        record: of the plain base.
        runs: the trainings that made the model, the first of them on that base.
        licence: of the base.
        kind: of model, for the hub's tags.
        summary: one sentence.
        sections: in Markdown.
        library: that loads it, by the hub's name.
    """
    base = runs[0].model.base
    taught = _distinct(code for run in runs for code in _taught(run))
    metadata = ModelCardData(
        language=_distinct(code for run in runs for code in _languages(run)),
        license=licence.identifier,
        license_name=licence.name,
        license_link=licence.link,
        library_name=library,
        pipeline_tag="text-generation",
        base_model=None if looks_local(base) else base,
        tags=["scale", "continual-pretraining", kind],
    )
    told = f"{licence.told()} The texts it was trained on have licences of their own."
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {base_title(record)}, taught {' and '.join(map(language_name, taught))}",
        summary,
        *(f"## {title}\n\n{text}" for title, text in {**sections, "Licence": told}.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _distinct(codes: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(codes))


def _taught(config: RunConfig) -> list[str]:
    """Return the codes of the languages that a run trains on to acquire them."""
    return [source.language for source in config.corpus.sources if source.role == "new"]


def _languages(config: RunConfig) -> list[str]:
    """Return the codes of the languages that a run keeps and of those that it trains on."""
    kept = [source.language for source in config.evaluation.perplexity if source.role == "retention"]
    return [*kept, *(source.language for source in config.corpus.sources)]


def base_title(record: BaseRecord) -> str:
    """Return what the base is called, of a local folder its last two names: where it lies is nobody's business."""
    return "/".join(Path(record.name).parts[-2:]) if looks_local(record.name) else record.name


def _making(stages: list[_Stage], record: BaseRecord, export_format: str, parity: Parity) -> str:
    revision = f" at `{record.revision}`" if record.revision else ""
    rows = [
        ["base", f"{base_title(record)}{revision}, {record.dtype}"],
        ["base, SHA-256", f"`{record.content_sha256}`"],
    ]
    for stage in stages:
        named = f"{stage.name}: " if len(stages) > 1 else ""
        if stage is not stages[0]:
            rows.append([f"{named}stands on, SHA-256", f"`{read_record(stage.folder).content_sha256}`"])
        rows += [[f"{named}{what}", told] for what, told in _training(stage).items()]
    told = f"format {export_format}; {_difference(parity)}"
    if parity.routed is not None:
        told += f"; served routed: {_difference(parity.routed)}"
    return table(["", ""], [*rows, ["this folder", told]])


def _difference(parity: Parity) -> str:
    return (
        f"max difference of a logit from the trained model {parity.max_logit_difference:.1e} "
        f"over {parity.num_positions:,} positions (that model's own rounding: {parity.own_max_difference:.1e})"
    )


def _training(stage: _Stage) -> dict[str, str]:
    config, train = stage.config, stage.config.train
    trained = "not known: it is an adapter export"
    if (stage.folder / "position.json").is_file():
        position = read_json(stage.folder / "position.json")
        steps, num_tokens = position["step"], position["num_tokens"]
        stepping_s = position.get("stepping_s")
        # Older folders know the time of training and evaluating together only.
        rate = f" in {stepping_s:,.0f} s ({num_tokens / stepping_s:,.0f} tokens/s)" if stepping_s else ""
        trained = (
            f"{steps:,} steps of {train.global_batch_size:,} sequences of {config.corpus.sequence_length:,} tokens: "
            f"{num_tokens:,} tokens{rate}"
        )
    if (stage.folder / "init_from.json").is_file():
        begun = read_json(stage.folder / "init_from.json")
        trained += (
            f"; begun with what another run had trained in {begun['step']:,} steps, {begun['num_tokens']:,} tokens "
            f"({begun['moments']} moments, SHA-256 {begun['content_sha256'][:12]})"
        )
    if train.average is not None:
        kinds = {
            "tail": "the mean of the last {:,} steps' weights",
            "ema": "a moving average of the weights, {:,} steps long",
        }
        trained += "; " + kinds[train.average.kind].format(train.averaged_steps)
    return {
        "method": _method(config),
        "trained": trained,
        "optimiser": f"{_OPTIMISERS[train.optimiser]}, lr {train.lr:g} "
        f"({train.schedule}, {train.warmup_steps:,} steps of warm-up), "
        f"weight decay {train.weight_decay:g}, seed {config.seed}",
    }


def _method(config: RunConfig) -> str:
    method, router = config.method, config.method.router
    told = method_in_words(method)
    if method.variant != "route":
        return told
    settings = f"threshold {router.threshold:g}"
    if router.rule == "posterior":
        settings = f"prior of the base {router.prior:g}, switch rate {router.switch_rate:g}"
    return f"{told}, {router.rule} rule ({settings})"


def _data(stages: list[_Stage]) -> str:
    head = ["source", "language", "use", "documents read", "dropped", "tokens", "tokens trained on"]
    rows = [[stage.name, *row] for stage in stages for row in _sources(stage)]
    listed = table(["run", *head], rows) if len(stages) > 1 else table(head, [row[1:] for row in rows])
    return f"{listed}\n\n{_by_language(stages)}"


def _by_language(stages: list[_Stage]) -> str:
    """Return how many tokens of each language were trained on."""
    counts: dict[str, int] = {}
    for stage in stages:
        trained = _token_ledger(stage)
        for source in stage.config.corpus.sources:
            if source.name not in trained:
                return "How many tokens of each language were trained on is not known of every run."
            name = language_name(source.language) + (" (replay)" if source.role == "replay" else "")
            counts[name] = counts.get(name, 0) + trained[source.name]["num_trained"]
    told = ", ".join(f"{name} {count:,} ({count / max(1, sum(counts.values())):.1%})" for name, count in counts.items())
    note = (
        " Replay is text of what the base knows, and is to keep." if any("(replay)" in name for name in counts) else ""
    )
    return f"Tokens trained on, by language: {told}.{note}"


def _token_ledger(stage: _Stage) -> dict[str, Any]:
    """Return the account of every source; empty where the folder has none."""
    path = stage.folder / "token_ledger.json"
    ledger: dict[str, Any] = read_json(path) if path.is_file() else {}
    return ledger


def _sources(stage: _Stage) -> list[list[str]]:
    ledgers = _token_ledger(stage)
    rows = []
    for source in stage.config.corpus.sources:
        counts = ["not known"] * 4
        if source.name in ledgers:
            entry, corpus = ledgers[source.name], ledgers[source.name]["corpus"]
            dropped = sum(count["documents"] for count in corpus["dropped"].values())
            numbers = [corpus["read"]["documents"], dropped, corpus["num_tokens"], entry["num_trained"]]
            counts = [f"{count:,}" for count in numbers]
        use = "replay" if source.role == "replay" else "new text"
        rows.append([source.name, language_name(source.language), use, *counts])
    return rows


def _forgetting(config: RunConfig, report: Report | None) -> str:
    told = _measured(config, report)
    if config.method.variant == "route" and (_routes_plainly(config) or config.export.formats != ["llama"]):
        told = f"{told}\n\n{guarantee(config.method.router)}".strip()
    return told


def _measured(config: RunConfig, report: Report | None) -> str:
    if report is None:
        return "Not measured: `scale evaluate`, then `scale export` again, puts the table here."
    if not report.corpora:
        return "Not measured: `evaluation.perplexity` names no text to measure it on."
    told = "Bits per byte; less is better. Differences with paired bootstrap intervals over documents."
    if config.export.formats != ["llama"]:
        return f"{_figures(report, report.served)}\n\n{told}"
    plainly = _figures(report, "adapted")
    if _routes_plainly(config):
        return f"With its router:\n\n{_figures(report, report.served)}\n\nLoaded plainly:\n\n{plainly}\n\n{told}"
    if report.served != "adapted":
        told += (
            " This folder holds the adaptation head alone; the router, which keeps what the base knew, is in the format"
            " `transformers`."
        )
    return f"{plainly}\n\n{told}"


def _figures(report: Report, answers: str) -> str:
    """Return what the head (or the router) that answers made of every held-out corpus, beside the base."""
    rows = []
    for corpus in report.corpora:
        head = corpus.heads[answers]
        figures = [number(corpus.heads["base"].bits_per_byte), number(head.bits_per_byte)]
        named = [corpus.name, f"{language_name(corpus.language)}, {corpus.role}", f"{corpus.num_documents:,}"]
        difference = with_interval(head.bits_per_byte_difference, 4)
        rows.append([*named, *figures, difference, worst_document(head.worst_document_nats)])
    head_row = ["held-out", "", "documents", "base", "this model", "difference [95 %]", "worst document, nats"]
    return table(head_row, rows)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
