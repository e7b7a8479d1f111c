"""Join finished runs on one plain base: one forward pass of the base, and a router over all their heads.

Each expansion appears once, after its parent. The joined tokenizer is the base's with the new tokens of every run,
each set for its own script. The report gives the loss of every head and of the router on held-out text.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from scale_cli.config.load import load_config
from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import EvaluationSource
from scale_cli.config.vocabulary import Script
from scale_cli.data.corpora import open_sources
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.errors import RunFolderError
from scale_cli.evaluation.results import HEADS, NOT_COVERED, finite
from scale_cli.evaluation.scoring import Passes, score_corpus, tokens_bar, tokens_scored
from scale_cli.export.card import Licence, Stage, card
from scale_cli.model.configuration_scale import JoinedConfig
from scale_cli.model.expansion_scale import Expansion
from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.model.vocabulary_scale import composed
from scale_cli.report import Table, number, percent
from scale_cli.runs.folder import RunFolder
from scale_cli.runs.method_folder import router_of
from scale_cli.runs.opened import MethodFolder, open_folder
from scale_cli.storage.records import RunRecord
from scale_cli.upscale.base import root_model, stages_below
from scale_cli.upscale.base_record import BaseRecord, check_same_base, record_base, tensor_sha256
from scale_cli.upscale.base_tokenizer import check_tokenizer, load_tokenizer
from scale_cli.upscale.preservation import SAMPLE_TEXTS, own_logits, sample_ids
from scale_cli.vocabulary.added_tokens import extended, new_tokens
from scale_cli.vocabulary.checks import check_union
from scale_cli.vocabulary.tokenizer import load_grown, read_texts, write_grown

# Configuration fields that a member keeps from its run; the joined model has its own router.
_SIZES = (
    "expansion_hidden_size",
    "expansion_intermediate_size",
    "expansion_num_attention_heads",
    "expansion_num_key_value_heads",
    "attention_collaboration_layers",
    "mlp_collaboration_layers",
)
_TOKENS = ("new_tokens", "own_pieces")  # kept too, if the run has new tokens
_BYTES_COMPARED = (
    1 << 20
)  # of every held-out corpus: text whose ids must be the same as in each run alone


@dataclass(frozen=True)
class Member:
    """One expansion."""

    name: str  # of its head
    parent: int  # the head whose streams it reads: 0 for the base, k for the k-th member
    expansion: Expansion
    config: PreTrainedConfig  # of the run's model
    folder: Path  # where it was read
    sha256: str  # of its tensors and its parents'
    logits: list[Tensor]  # of its head on the sample texts, computed in the run alone
    prompts: list[Tensor]  # those texts, in the tokens of its run


@dataclass(frozen=True)
class RunTokens:
    """The tokens of one run."""

    run: Path  # as it was given
    config: RunConfig
    base_tokenizer: PreTrainedTokenizerBase  # of its plain base
    tokenizer: PreTrainedTokenizerBase  # the run's own; the base's if it has no new tokens
    script: Script  # of the new tokens; empty if there are none


@dataclass(frozen=True)
class JoinedRuns:
    """Several joined runs."""

    model: JoinedForCausalLM  # in evaluation mode
    members: list[Member]
    configs: list[RunConfig]  # of the runs, as they were given
    record: BaseRecord  # of the plain base
    tokenizer: PreTrainedTokenizerBase  # the base's, with the new tokens of all runs
    prompts: list[Tensor]  # the sample texts, in the base's own tokens
    base_logits: list[Tensor]  # the base's own on those prompts


def join_runs(runs: Sequence[Path], prior: float | None, switch_rate: float) -> JoinedRuns:
    """Load finished runs, one after another, and put their expansions on the first one's base.

    A run is given by its folder, its `final/`, or an adapter export. If it stands upon another run, that run is joined
    too.
    """
    base: Any = None
    members, configs, of_runs = list[Member](), list[RunConfig](), list[RunTokens]()
    for run in runs:
        final = open_folder(_finished_folder(run))
        widened, config = final.load_to_export(), final.run.config
        if not isinstance(widened, ScaleForCausalLM):
            raise RunFolderError(
                f"{run}: has no expansion (method.variant: {final.method.variant}); only widened runs can be joined"
            )
        tokens = _tokens_of(run, final)
        if base is None:
            base, record = (
                widened.root,
                record_base(widened.root, root_model(config.model), tokens.base_tokenizer),
            )
        else:
            check_same_base(
                widened.root, record, where=f"{run}: stands on another base than {runs[0]}"
            )
            check_tokenizer(tokens.base_tokenizer, record)
        of_runs.append(tokens)
        _add_stages(members, widened, final.path, config, sample_ids(final.tokenizer))
        here = final.path.parent if final.path.name == "final" else config.output_dir
        configs.append(config.model_copy(update={"output_dir": here}))
    tokenizer = _joined_tokenizer(of_runs, base.config.vocab_size)
    prompts = sample_ids(of_runs[0].base_tokenizer)
    base_logits = own_logits(base, prompts)
    model = stack_reads(base, members, prior, switch_rate)
    return JoinedRuns(model, members, configs, record, tokenizer, prompts, base_logits)


def _finished_folder(run: Path) -> Path:
    layout = RunFolder(run)
    if layout.final.is_dir():
        return layout.final
    if layout.upscaled.is_dir():
        raise RunFolderError(f"{run}: not finished, as it has no final/; run `scale train` first")
    if not BaseRecord.is_in(run):
        raise RunFolderError(
            f"{run}: not a finished run, its final/ or an adapter export; give one of these"
        )
    return run


def _add_stages(
    members: list[Member],
    widened: ScaleForCausalLM,
    folder: Path,
    config: RunConfig,
    prompts: list[Tensor],
) -> int:
    """Add a model's expansion to `members`, after the expansions that it stands upon; return its head."""
    parent, below = 0, next(stages_below(config.model), None)
    if isinstance(widened.base, ScaleForCausalLM) and below is not None:
        parent = _add_stages(members, widened.base, *below, prompts)
    lines = [
        f"{name} {tensor_sha256(tensor)}\n"
        for name, tensor in sorted(widened.expansion.named_parameters())
    ]
    of_parent = members[parent - 1].sha256 if parent else ""
    sha256 = hashlib.sha256("".join([of_parent, "\n", *lines]).encode()).hexdigest()
    known = [member.sha256 for member in members]
    if sha256 in known:
        return known.index(sha256) + 1
    name = _free_name(config.output_dir.name, [*HEADS, *(member.name for member in members)])
    logits = own_logits(widened, prompts)
    members.append(
        Member(name, parent, widened.expansion, widened.config, folder, sha256, logits, prompts)
    )
    return len(members)


def _free_name(name: str, taken: Collection[str]) -> str:
    """Return a name, with a number after it if it is taken."""
    numbered = (f"{name}-{number}" for number in count(2))
    return next(free for free in chain([name], numbered) if free not in taken)


def _tokens_of(run: Path, final: MethodFolder) -> RunTokens:
    """Return the tokens of a run; of runs upon one another, only the lowest can have added any."""
    config = final.run.config
    *_, bottom = config, *(below for _, below in stages_below(config.model))
    if bottom.method.vocabulary is None:
        return RunTokens(run, config, final.tokenizer, final.tokenizer, Script(()))
    script = Script.named(bottom.method.vocabulary.script)
    return RunTokens(run, config, load_tokenizer(bottom.model), final.tokenizer, script)


def _joined_tokenizer(runs: Sequence[RunTokens], first_id: int) -> PreTrainedTokenizerBase:
    """Return a tokenizer with the tokens of all runs, the first run's first; new ones have ids from `first_id` on.

    Every text must be tokenised as by the run that has its script. RunFolderError: two runs have different tokens for
    one script.
    """
    distinct: dict[str, RunTokens] = {}  # by the tokenizer in JSON
    for tokens in runs:
        described = tokens.tokenizer.backend_tokenizer.to_str()
        if not tokens.script.ranges or described in distinct:
            continue
        for other in distinct.values():
            if tokens.script.meets(other.script):
                raise RunFolderError(
                    f"{tokens.run} and {other.run} add different tokens for the same script, so they tokenise its text "
                    "differently; train one of them with method.vocabulary.folder set to the final/ of the other"
                )
        distinct[described] = tokens
    if len(distinct) <= 1:
        return next(iter(distinct.values()), runs[0]).tokenizer
    parts = [(tokens.tokenizer.backend_tokenizer, tokens.script) for tokens in distinct.values()]
    united = parts[0][0]
    for backend, _ in parts[1:]:
        united = extended(united, new_tokens(backend, first_id), united.get_vocab_size())
    texts = [
        text
        for tokens in runs
        for text in read_texts(
            tokens.config.evaluation.perplexity, tokens.config.corpus, _BYTES_COMPARED
        )
    ]
    check_union(parts, united, first_id, texts)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        write_grown(Path(folder), next(iter(distinct.values())).tokenizer, united)
        return load_grown(Path(folder))


def stack_reads(
    base: Any,  # becomes a part of it
    members: Sequence[Member],  # each after its parent
    prior: float
    | None = None,  # weight of the base head at the first token; None for an even share of every head
    switch_rate: float = 0.0,  # of the posterior rule
) -> JoinedForCausalLM:
    """Return one model of a plain base and copies of some expansions, in evaluation mode."""
    described = [
        {
            "name": member.name,
            "parent": member.parent,
            "expansion": {
                name: value
                for name in (*_SIZES, *_TOKENS)
                if (value := getattr(member.config, name)) or name in _SIZES
            },
        }
        for member in members
    ]
    config = JoinedConfig(
        base_config=base.config.to_diff_dict(),
        members=described,
        router_prior=prior,
        router_switch_rate=switch_rate,
    )
    model = JoinedForCausalLM(config, base)
    for head, (place, member) in enumerate(zip(model.members, members, strict=True), start=1):
        tensors = member.expansion.state_dict()
        tensors["embed_tokens.weight"] = _rows_of_all_tokens(
            tensors["embed_tokens.weight"], config, head
        )
        place.load_state_dict(tensors, strict=True)
    model.to(base.device)
    return model.eval()


def _rows_of_all_tokens(rows_VE: Tensor, config: JoinedConfig, head: int) -> Tensor:
    """Return an expansion's embedding with rows for the other members' tokens, composed like the rows of x."""
    unknown, pieces = config.unknown_tokens(head), config.pieces()
    if not unknown:
        return rows_VE
    added = composed(rows_VE, [pieces[at] for at in unknown]).to(rows_VE)
    return torch.cat([rows_VE, added])[torch.tensor(config.token_ids(head)).argsort()]


KIND = "scale join"


@dataclass(frozen=True)
class HeadFigures:
    """One head, or the router, on one corpus; a figure that is not finite is None."""

    nats_per_token: float | None  # cross-entropy
    bits_per_byte: float | None  # the same loss per UTF-8 byte of text
    share: float | None  # share of the tokens that this head served; None for the router


@dataclass(frozen=True)
class JoinedCorpus:
    """The figures of every head and the router on one corpus."""

    name: str  # if two different corpora have one name, the second gets its run's name in brackets
    language: str
    num_documents: int  # scored
    num_tokens: int  # scored
    heads: dict[str, HeadFigures]  # by name, the base's first
    routed: HeadFigures  # the mixture
    worst_document_nats: (
        float | None
    )  # the most that routing cost over the best head on any one document


@dataclass(frozen=True)
class JoinReport(RunRecord):
    """The joined expansions, and the loss of every head and the router."""

    FILE = "report.json"
    base: str  # name of the plain base
    base_sha256: str  # of its tensors
    members: list[
        dict[str, Any]
    ]  # for every expansion: name, parent (0 for the base), folder and SHA-256
    router_prior: float  # weight of the base head at the first token
    router_switch_rate: float  # of the posterior rule
    # upper bound on what routing costs over the best head on a document; None with a switch rate
    max_cost_nats: float | None
    corpora: list[JoinedCorpus]
    format: str = "transformers"  # of the folder

    def to_json(self) -> dict[str, Any]:
        return {"kind": KIND, **asdict(self)}

    def lines(self) -> list[str]:
        names = ["base", *(member["name"] for member in self.members)]
        return [
            f"base           {self.base} (sha256 {self.base_sha256[:12]})",
            *(
                f"member         {member['name']}, upon {names[member['parent']]} (sha256 {member['sha256'][:12]})"
                for member in self.members
            ),
            f"proved         logits of every head, the base's too, bitwise equal to those of the head alone on "
            f"{len(SAMPLE_TEXTS)} prompts",
            *self.table().lines(),
            self.bound_in_words(),
        ]

    def table(self) -> Table:
        titles = ["corpus", "", *self.corpora[0].heads, "routed", "worst document"]
        rows = []
        for corpus in self.corpora:
            heads = [*corpus.heads.values(), corpus.routed]
            worst = f"{number(corpus.worst_document_nats, 3, '+')} nats"
            rows += [
                [
                    f"{corpus.name} ({corpus.language})",
                    "nats/token",
                    *(number(head.nats_per_token, 4) for head in heads),
                    worst,
                ],
                ["", "bits/byte", *(number(head.bits_per_byte, 4) for head in heads), ""],
                [
                    "",
                    "served",
                    *("" if head.share is None else percent(head.share) for head in heads),
                    "",
                ],
            ]
        return Table(titles, rows, "ll" + "r" * (len(titles) - 2))

    def bound_in_words(self) -> str:
        if self.max_cost_nats is None:
            return "worst document: routed - best head; no bound holds with a switch rate"
        return f"worst document: routed - best head, in nats; {self.max_cost_nats:.3f} at most, whatever was trained"


def score_corpora(
    model: JoinedForCausalLM, configs: Sequence[RunConfig], tokenizer: PreTrainedTokenizerBase
) -> list[JoinedCorpus]:
    """Score the held-out corpora of some runs, each in its run's windows and precision; a shared one is scored once."""
    opened: dict[str, tuple[EvaluationSource, TokenisedCorpus, RunConfig]] = {}
    for config in configs:
        corpora = open_sources(config, config.evaluation.perplexity, tokenizer)
        for source, corpus in zip(config.evaluation.perplexity, corpora, strict=True):
            if any(corpus.name == other.name for _, other, _ in opened.values()):
                continue
            name = (
                source.name
                if source.name not in opened
                else f"{source.name} ({config.output_dir.name})"
            )
            opened[_free_name(name, opened)] = source, corpus, config
    return [_score(model, name, *held_out) for name, held_out in opened.items()]


def _score(
    model: JoinedForCausalLM,
    name: str,
    source: EvaluationSource,
    corpus: TokenisedCorpus,
    config: RunConfig,
) -> JoinedCorpus:
    names, passes = model.config.head_names, Passes.of(config)
    with tokens_bar(tokens_scored(corpus, passes.sequence_length), f"scoring {name}") as bar:
        losses = score_corpus(model, corpus, router_of(model), passes, heads=names, bar=bar)
    num_tokens, routed = losses.num_tokens.sum(), losses.nats["posterior"]

    def figures(head: str, share: float | None = None) -> HeadFigures:
        return HeadFigures(
            finite(losses.nats_per_token(head)), finite(losses.bits_per_byte(head)), share
        )

    shares = losses.served["posterior"].sum(axis=1) / num_tokens
    return JoinedCorpus(
        name=name,
        language=source.language,
        num_documents=len(routed),
        num_tokens=int(num_tokens),
        heads={
            head: figures(head, float(share)) for head, share in zip(names, shares, strict=True)
        },
        routed=figures("posterior"),
        worst_document_nats=finite(
            float(np.max(routed - np.min([losses.nats[head] for head in names], axis=0)))
        ),
    )


def joined_card(joined: JoinedRuns, report: JoinReport, licence: Licence) -> str:
    """Return the README.md: the base, what each expansion was taught, what they cost, and the licence."""
    stages = [
        Stage(load_config(member.folder / "scale.yaml"), member.folder) for member in joined.members
    ]
    kind = "joined" if report.format == "llama" else report.format
    return card(
        "joined_card.md.j2",
        stages,
        licence,
        "joined",
        kind,
        config=joined.model.config,
        members=list(zip(joined.members, stages, strict=True)),
        heads=["base", *(member.name for member in joined.members)],
        report=report,
        not_covered="" if report.max_cost_nats is None else NOT_COVERED,
    )
