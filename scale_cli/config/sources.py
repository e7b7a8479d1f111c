"""Where text and benchmarks come from: what a config says of each source, and of how they are read and mixed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, GetJsonSchemaHandler, ValidationInfo, field_validator, model_validator
from pydantic_core import CoreSchema

from scale_cli.values import (
    Documents,
    Folder,
    Fraction,
    Free,
    Language,
    Length,
    Name,
    PathText,
    Section,
    SourcePatterns,
)

# How the names of lm-eval's Korean suites begin; any other suite is English unless the config says otherwise.
_KOREAN_SUITES = ("kobest", "kmmlu", "haerae", "click")
_LEAST_WEIGHT = 1e-6
Role = Annotated[
    Literal["retention", "acquisition"],
    Field(description="what is to be kept, or what is to be learned; of a benchmark left out: kept if it is English"),
]


class TextSource(Section):
    """Where documents come from: local files by a glob, or a dataset on the hub."""

    name: Name
    path: SourcePatterns | None = Field(
        default=None,
        description="one or several globs of .txt .jsonl .json .csv, plain or .gz .xz "
        ".zst, or of .parquet; local, or hf:// s3:// gs:// az:// https://",
    )
    dataset: PathText | None = Field(default=None, description="hub dataset id")
    subset: str | None = Field(default=None, description="of the dataset: its configuration")
    split: str = Field(default="train", description="of the dataset")
    revision: str | None = Field(default=None, description="of the dataset: branch, tag or commit")
    text_field: str = Field(
        default="text", description="column of a dataset, of .csv or .parquet, key of .jsonl or .json"
    )
    messages_field: str | None = Field(
        default=None,
        min_length=1,
        description="in place of text_field: key of a conversation, a list of {role, content}, in .jsonl, .json or a "
        "dataset; the base's chat template writes it, and what is trained on are the assistant's turns alone",
    )
    documents: Literal["paragraph", "line", "file"] = Field(
        default="paragraph", description="what one document of a .txt file is: text between blank lines, a line, or all"
    )
    language: Language
    skip_documents: int = Field(
        default=0, ge=0, le=10**12, description="the first so many are passed over, as if they were not there"
    )
    max_documents: Documents | None = Field(
        default=None, description="the first that are kept; reading ends too when more than so many were dropped"
    )

    @property
    def paths(self) -> list[str]:
        """The patterns of its files; none of a dataset."""
        return [self.path] if isinstance(self.path, str) else self.path or []

    @model_validator(mode="after")
    def _one_origin(self) -> TextSource:
        if (self.path is None) == (self.dataset is None):
            raise ValueError("give exactly one of path (local files) and dataset (a hub id)")
        if self.documents != "paragraph" and self.path is None:
            raise ValueError(f"documents: {self.documents!r} is for .txt files; a dataset's rows are its documents")
        return self


class SelectConfig(Section):
    """A share of a source's windows, by a score each; the rest is not trained on."""

    by: Literal["base_loss", "ngram"] = Field(
        description="the base's loss on a window, or that of an n-gram model of the source's own text"
    )
    keep: float = Field(default=0.25, gt=0.0, le=1.0, description="share of the windows")
    side: Literal["low", "middle", "high"] = Field(default="low", description="of the scores: which windows are kept")


class CorpusSource(TextSource):
    """A training source and its share of the training tokens."""

    role: Literal["new", "replay"] = Field(
        default="new", description="replay: text of what the base knows, so that it is not forgotten"
    )
    weight: float = Field(
        default=1.0,
        ge=0.0,
        le=1e6,
        description="share of the training windows, relative to the others; 0 of replay that is only measured on",
    )

    select: SelectConfig | None = Field(default=None, description="trained on is a part of it; null: all")

    @model_validator(mode="before")
    @classmethod
    def _drop_order(cls, given: Any) -> Any:
        """Read the configs of earlier runs, which say `order: shuffled`: so it is, and nothing else."""
        if isinstance(given, dict) and given.get("order") == "shuffled":
            return {key: value for key, value in given.items() if key != "order"}
        return given

    @property
    def share_read(self) -> float:
        """The share of its windows that is trained on."""
        return 1.0 if self.select is None else self.select.keep

    @field_validator("weight")
    @classmethod
    def _is_read(cls, weight: float, info: ValidationInfo) -> float:
        if weight < _LEAST_WEIGHT and (weight or info.data.get("role") != "replay"):
            raise ValueError(f"{weight:g} is below {_LEAST_WEIGHT:g}; 0 is for replay, to be measured on")
        return weight


class StageConfig(Section):
    """A part of a run, and of what it is drawn."""

    until: float = Field(gt=0.0, le=1.0, description="share of max_steps at which it ends; of the last one 1")
    weights: dict[Name, Annotated[float, Field(ge=0.0, le=1e6)]] = Field(
        description="shares of the training windows by source, relative to each other; 0 where one is not named"
    )


class EvaluationSource(TextSource):
    """A held-out corpus, and what a change on it would mean."""

    split: str = Field(default="validation", description="of the dataset")
    role: Role


class BenchmarkSource(Section):
    """A benchmark: a task or group by lm-eval's name, or a task's YAML."""

    name: Name
    path: PathText | None = Field(
        default=None, description="a task's .yaml as lm-eval has it, of local files; null: `name` is lm-eval's name"
    )
    language: Language
    role: Role
    num_fewshot: int | None = Field(default=None, ge=0, le=1000, description="null: the task's own")
    limit: Documents | None = Field(default=None, description="first items of every task")

    @field_validator("path")
    @classmethod
    def _names_a_task(cls, path: str | None) -> str | None:
        if path is not None and not path.endswith((".yaml", ".yml")):
            raise ValueError("is no .yaml; write a task of lm-eval with these data_files: docs/benchmarks.md")
        return path

    @model_validator(mode="before")
    @classmethod
    def _language_and_role_of_the_name(cls, item: Any) -> Any:
        item = {"name": item} if isinstance(item, str) else item
        if not isinstance(item, dict):
            return item
        if item.get("path") is None and isinstance(item.get("name"), str):
            item = {"language": "ko" if item["name"].startswith(_KOREAN_SUITES) else "en"} | item
        if "language" in item:
            item = {"role": "retention" if item["language"] == "en" else "acquisition"} | item
        return item

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Say so in the JSON Schema too: a name is enough."""
        mapping = handler(core)
        handler.resolve_ref_schema(mapping)["required"] = ["name"]
        return {"anyOf": [{"type": "string"}, mapping]}


AnySource = TypeVar("AnySource", bound="TextSource | BenchmarkSource")


def distinct_names(sources: list[AnySource]) -> list[AnySource]:
    """Return the sources, or raise where two share a name (results are keyed by it)."""
    names = [source.name for source in sources]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two sources are named {twice[0]!r}")
    return sources


class ReadingConfig(Section):
    """How every source is read, those that are trained on and those that are held out."""

    max_document_bytes: int = Field(
        default=10_000_000, ge=1, le=2**31, description="a larger document is dropped, and is bad"
    )
    max_bad_fraction: Free[Fraction] = Field(
        default=0.001, description="more of a source's records or files: it is refused"
    )
    max_unknown_fraction: Free[Fraction] = Field(
        default=0.01, description="more of a source's text is lost by the tokenizer: it is refused"
    )
    num_workers: Free[int | None] = Field(
        default=None,
        ge=1,
        le=1024,
        description="processes that tokenise, to the same bytes for any number; null: the usable cores",
    )


class CorpusConfig(ReadingConfig):
    """What is trained on."""

    sequence_length: Length = Field(default=2048, description="tokens a window")
    isolate_documents: bool = Field(
        default=False, description="in a window, positions restart and attention ends at every document's beginning"
    )
    cache_dir: Free[Folder | None] = Field(
        default=None,
        description="tokenised corpora, keyed by content, each with its ledger.json; null: output_dir/tokens",
    )
    sources: list[CorpusSource] = Field(min_length=1, description="what is trained on")
    stages: list[StageConfig] = Field(
        default=[], description="parts of the run, in order, each with weights of its own instead of the sources'"
    )

    @property
    def new(self) -> list[CorpusSource]:
        return [source for source in self.sources if source.role == "new"]

    @property
    def replay(self) -> list[CorpusSource]:
        return [source for source in self.sources if source.role == "replay"]

    def mixture(self, max_steps: int) -> list[tuple[int, list[float]]]:
        """Return the steps at which the stages of a run end, and of each of them every source's weight."""
        if not self.stages:
            return [(max_steps, [source.weight for source in self.sources])]
        names = [source.name for source in self.sources]
        return [
            (round(stage.until * max_steps), [stage.weights.get(name, 0.0) for name in names]) for stage in self.stages
        ]

    def shares(self, max_steps: int) -> list[float]:
        """Return of every source its share of all the windows of a run."""
        totals, first = [0.0] * len(self.sources), 0
        for until, weights in self.mixture(max_steps):
            for index, weight in enumerate(weights):
                totals[index] += (until - first) * weight / sum(weights)
            first = until
        return [total / max_steps for total in totals]

    @model_validator(mode="after")
    def _stages_are_a_whole_run_of_the_sources(self) -> CorpusConfig:
        for problem in self._problems_of_stages() if self.stages else ():
            raise ValueError(f"stages: {problem}")
        return self

    def _problems_of_stages(self) -> Iterator[str]:
        ends, known = [0.0, *(stage.until for stage in self.stages)], [source.name for source in self.sources]
        if sorted(set(ends)) != ends or ends[-1] != 1.0:
            yield "each must end later than the one before (until), and the last one at 1"
        for stage in self.stages:
            if odd := [name for name in stage.weights if name not in known]:
                yield f"{odd[0]!r} is none of the sources ({', '.join(known)})"
            if not any(stage.weights.values()):
                yield f"the one until {stage.until:g} draws from no source"
        for source in self.sources:
            is_drawn = any(stage.weights.get(source.name) for stage in self.stages)
            if is_drawn and not source.weight:
                yield f"{source.name} has weight 0, and so in every stage"
            if source.weight and not is_drawn:
                yield f"{source.name} has a weight in none of them; leave the source out"
            if source.weight not in (0.0, 1.0):
                yield f"they give the weights; leave out that of {source.name}"

    @field_validator("sources")
    @classmethod
    def _distinct(cls, sources: list[CorpusSource]) -> list[CorpusSource]:
        if all(source.role == "replay" for source in sources):
            raise ValueError("every source has the role replay; what is to be learned has the role new")
        return distinct_names(sources)
