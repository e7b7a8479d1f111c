"""The model card of an export: what it was made of, how, what it forgot, and under which licence.

Source: the hub's metadata, https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from markupsafe import Markup

from scale_cli.config.display_names import language_name, method_in_words, method_name
from scale_cli.config.load import load_config
from scale_cli.config.schema import RunConfig
from scale_cli.data.ledger import SourceTokens, TokenLedger
from scale_cli.evaluation.guarantee import guarantee
from scale_cli.evaluation.results import CorpusResult, Report
from scale_cli.export.licence import Licence
from scale_cli.model.configuration_scale import LEAST_TRANSFORMERS
from scale_cli.report.numbers import number, percent, with_interval, worst_document
from scale_cli.report.pages import code, markdown
from scale_cli.report.tables import Column, Row, Table, share_cell
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.records import AverageRecord, BaseRecord, BranchPoint, Parity, TrainState
from scale_cli.upscale.base import looks_local, stage_folder

# Formats whose folders answer as the run is served, its router included; `llama` does where it `routes_plainly`. A new
# format is the trained head alone until it stands here: no card promises a bound that nobody has looked at.
_ANSWER_AS_SERVED = ("transformers", "adapter")
_OPTIMISERS = {"adamw": "AdamW", "muon": "Muon on the matrices and AdamW on the rest"}


@dataclass(frozen=True)
class _Stage:
    """One training, of the model itself or of a widened base that it stands on."""

    name: str  # of its run
    config: RunConfig  # of its run
    folder: Path  # final/, or an adapter export, which says neither how long it was trained nor on how much


def _stages(config: RunConfig) -> list[_Stage]:
    """Return the trainings that made a model, bottom up."""
    stages = [_Stage(config.output_dir.name, config, RunFolder(config.output_dir).final)]
    while (below := stage_folder(stages[0].config.model)) is not None:
        earlier = load_config(below / "scale.yaml")
        stages.insert(0, _Stage(earlier.output_dir.name, earlier, below))
    return stages


def model_card(config: RunConfig, report: Report | None, parity: Parity, licence: Licence, architecture: str) -> str:
    """Return the README.md of an export; `architecture` is the class that its config.json names."""
    stages = _stages(config)
    record = BaseRecord.load(stages[0].folder)
    (export_format,) = config.export.formats
    routed = export_format == "llama" and config.method.routes_plainly
    is_peft = config.method.variant == "lora" and export_format == "adapter"
    kind = "peft" if is_peft else "routed" if routed else export_format
    answers_as_served = routed or export_format in _ANSWER_AS_SERVED
    runs, library = [stage.config for stage in stages], "peft" if is_peft else "transformers"
    bounded = config.method.variant == "route" and answers_as_served
    return markdown(
        "export_card.md.j2",
        **shared_values(record, runs, licence, config.method.variant, library),
        loading=loading(kind, architecture, config.model.dtype),
        config=config,
        report=report,
        stages=stages,
        routed=routed,
        answers_as_served=answers_as_served,
        method=method_name(config.method.variant),
        making=_making(stages, record, export_format, parity).markdown(),
        sources=_sources_table(stages).markdown(),
        trained_by_language=_trained_by_language(stages),
        served=None if report is None else _figures(report, report.served).markdown(),
        plainly=None if report is None else _figures(report, "adapted").markdown(),
        guarantee=guarantee(config.method.router) if bounded else "",
        language_name=language_name,
        number=number,
        percent=percent,
    )


def loading(kind: str, architecture: str = "", dtype: str = "") -> Markup:
    """Return how a folder is loaded: of a format, of a plain one that can route too (routed), or by PEFT (peft)."""
    least = ".".join(map(str, LEAST_TRANSFORMERS))
    values = {"kind": kind, "architecture": architecture, "dtype": dtype, "least_transformers": least}
    return Markup(markdown("card_loading.md.j2", **values).strip("\n"))


def shared_values(
    record: BaseRecord,  # of the plain base
    runs: Sequence[RunConfig],  # the trainings that made the model, the first of them on that base
    licence: Licence,
    kind: str,  # of model, for the hub's tags
    library: str = "transformers",  # that loads it, by the hub's name
) -> dict[str, Any]:
    """Return what every card holds: the hub's metadata, what the base is called, what was taught, the licence."""
    base = runs[0].model.base
    taught = [source.language for run in runs for source in run.corpus.new]
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
    return {
        "metadata": Markup(metadata.to_yaml()),
        "base": base_title(record),
        "taught": [language_name(code) for code in _distinct(taught)],
        "licence": Markup(licence.sentence()),
    }


def _distinct(codes: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(codes))


def _languages(config: RunConfig) -> list[str]:
    """Return the codes of the languages that a run keeps and of those that it trains on."""
    kept = [source.language for source in config.evaluation.perplexity if source.role == "retention"]
    return [*kept, *(source.language for source in config.corpus.sources)]


def base_title(record: BaseRecord) -> str:
    """Return what the base is called, of a local folder its last two names: where it lies is nobody's business."""
    return "/".join(Path(record.name).parts[-2:]) if looks_local(record.name) else record.name


def _making(stages: list[_Stage], record: BaseRecord, export_format: str, parity: Parity) -> Table:
    revision = f" at {record.revision}" if record.revision else ""
    rows: list[Row] = [
        ["base", f"{base_title(record)}{revision}, {record.dtype}"],
        ["base, SHA-256", code(record.content_sha256)],
    ]
    for stage in stages:
        named = f"{stage.name}: " if len(stages) > 1 else ""
        if stage is not stages[0]:
            rows.append([f"{named}stands on, SHA-256", code(BaseRecord.load(stage.folder).content_sha256)])
        rows += [[f"{named}{what}", value] for what, value in _training(stage).items()]
    routed = "" if parity.routed is None else f"; served routed: {_difference(parity.routed)}"
    rows.append(["this folder", f"format {export_format}; {_difference(parity)}{routed}"])
    return Table(["", ""], rows, "ll")


def _difference(parity: Parity) -> str:
    return (
        f"max difference of a logit from the trained model {parity.max_logit_difference:.1e} "
        f"over {parity.num_positions:,} positions (that model's own rounding: {parity.own_max_difference:.1e})"
    )


def _training(stage: _Stage) -> dict[str, str]:
    config, train = stage.config, stage.config.train
    trained = "not known: it is an adapter export"
    if (state := TrainState.load_if_there(stage.folder)) is not None:
        rate = f" in {state.stepping_s:,.0f} s ({state.tokens_per_s:,.0f} tokens/s)" if state.tokens_per_s else ""
        trained = (
            f"{state.step:,} steps of {train.global_batch_size:,} sequences of {config.corpus.sequence_length:,} "
            f"tokens: {state.num_tokens:,} tokens{rate}"
        )
    if (begun := BranchPoint.load_if_there(stage.folder)) is not None:
        trained += (
            f"; begun with what another run had trained in {begun.step:,} steps, {begun.num_tokens:,} tokens "
            f"({begun.moments} moments, SHA-256 {begun.content_sha256[:12]})"
        )
    if (averaged := AverageRecord.load_if_there(stage.folder)) is not None:
        members = (f"step {member.step:,} (weight {member.weight:.4g})" for member in averaged.members)
        trained += f"; the mean of {len(averaged.members)} such: {', '.join(members)}"
    elif train.average is not None:
        kinds = {
            "tail": "the mean of the last {:,} steps' weights",
            "ema": "a moving average of the weights, {:,} steps long",
        }
        trained += "; " + kinds[train.average.kind].format(train.averaged_steps)
    if (ahead := train.lookahead) is not None:
        trained += f"; every {ahead.every_steps:,} steps back to {ahead.share:g} of the way since"
    bounded = ", rows of E' bounded" if train.embedding_norm == "bounded" else ""
    return {
        "method": _method(config),
        "trained": trained,
        "optimiser": f"{_OPTIMISERS[train.optimiser]}, lr {train.lr:g} "
        f"({train.schedule}, {train.warmup_steps:,} steps of warm-up), "
        f"weight decay {train.weight_decay:g}{' to the base' if train.decay_to_base else ''}"
        f"{bounded}, seed {config.seed}",
    }


def _method(config: RunConfig) -> str:
    method, router = config.method, config.method.router
    if method.variant != "route":
        return method_in_words(method)
    settings = f"threshold {router.threshold:g}"
    if router.rule == "posterior":
        settings = f"prior of the base {router.prior:g}, switch rate {router.switch_rate:g}"
    return f"{method_in_words(method)}, {router.rule} rule ({settings})"


def _sources_table(stages: list[_Stage]) -> Table:
    titles = ["source", "language", "use", "documents read", "dropped", "tokens", "tokens trained on"]
    rows = [[stage.name, *row] for stage in stages for row in _sources(stage)]
    if len(stages) > 1:
        return Table(["run", *titles], rows, "l" * 8)
    return Table(titles, [row[1:] for row in rows], "l" * 7)


def _trained_by_language(stages: list[_Stage]) -> dict[str, int] | None:
    """Return how many tokens of each language were trained on; None where a run does not say."""
    counts: dict[str, int] = {}
    for stage in stages:
        trained = tokens_by_source(stage.folder)
        for source in stage.config.corpus.sources:
            if source.name not in trained:
                return None
            name = language_name(source.language) + (" (replay)" if source.role == "replay" else "")
            counts[name] = counts.get(name, 0) + trained[source.name].num_trained
    return counts


def tokens_by_source(folder: Path) -> dict[str, SourceTokens]:
    """Return the account of every source that was trained on; empty where a folder has none, as an adapter export."""
    ledger = TokenLedger.load_if_there(folder)
    return {} if ledger is None else ledger.sources


def _sources(stage: _Stage) -> list[list[str]]:
    ledgers = tokens_by_source(stage.folder)
    rows = []
    for source in stage.config.corpus.sources:
        counts = ["not known"] * 4
        if source.name in ledgers:
            tokens = ledgers[source.name]
            dropped = sum(count.documents for count in tokens.corpus.dropped.values())
            numbers = [tokens.corpus.read.documents, dropped, tokens.corpus.num_tokens, tokens.num_trained]
            counts = [f"{count:,}" for count in numbers]
        use = "replay" if source.role == "replay" else "new text"
        rows.append([source.name, language_name(source.language), use, *counts])
    return rows


def _figures(report: Report, answers: str) -> Table:
    """Return what the head (or the router) that answers made of every held-out corpus, beside the base."""
    columns: list[Column[CorpusResult]] = [
        Column("held-out", lambda corpus: corpus.name, "l"),
        Column("", lambda corpus: f"{language_name(corpus.language)}, {corpus.role}", "l"),
        Column("documents", lambda corpus: f"{corpus.num_documents:,}", "l"),
        Column("bytes/token", lambda corpus: f"{corpus.bytes_per_token:.2f}", "l"),
        Column("base", lambda corpus: number(corpus.heads["base"].bits_per_byte), "l"),
        Column("this model", lambda corpus: number(corpus.heads[answers].bits_per_byte), "l"),
        Column(
            "difference [95 %]", lambda corpus: with_interval(corpus.heads[answers].bits_per_byte_difference, 4), "l"
        ),
        Column("worst document, nats", lambda corpus: worst_document(corpus.heads[answers].worst_document_nats), "l"),
    ]
    if any(corpus.num_prompts for corpus in report.corpora):

        def in_script(corpus: CorpusResult) -> str:
            return ", ".join(str(share_cell(corpus.heads[head].in_script)) for head in ("base", answers))

        columns.append(Column("letters in the prompt's script, base and this model [95 %]", in_script, "l"))
    return Table.of(columns, report.corpora)
