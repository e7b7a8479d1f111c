"""Where text and benchmarks come from: what a config says of each source, and of how they are read and mixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

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


class CorpusSource(TextSource):
    """A training source and its share of the training tokens."""

    REMOVED: ClassVar[Mapping[str, Any]] = {"order": "shuffled", "select": None}

    role: Literal["new", "replay"] = Field(
        default="new", description="replay: text of what the base knows, so that it is not forgotten"
    )
    weight: float = Field(
        default=1.0,
        ge=0.0,
        le=1e6,
        description="share of the training windows, relative to the others; 0 of replay that is only measured on",
    )

    @field_validator("weight")
    @classmethod
    def _is_read(cls, weight: float, info: ValidationInfo) -> float:
        if weight < _LEAST_WEIGHT and (weight or info.data.get("role") != "replay"):
            raise ValueError(
                f"{weight:g} is below {_LEAST_WEIGHT:g}; 0 is allowed only for replay that is only measured on"
            )
        return weight


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
            raise ValueError("is not a .yaml file; write an lm-eval task with these data_files: docs/benchmarks.md")
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

    REMOVED: ClassVar[Mapping[str, Any]] = {"stages": []}

    sequence_length: Length = Field(default=2048, description="tokens a window")
    isolate_documents: bool = Field(
        default=False, description="in a window, positions restart and attention ends at every document's beginning"
    )
    cache_dir: Free[Folder | None] = Field(
        default=None,
        description="tokenised corpora, keyed by content, each with its ledger.json; null: output_dir/tokens",
    )
    sources: list[CorpusSource] = Field(min_length=1, description="what is trained on")

    @property
    def new(self) -> list[CorpusSource]:
        return [source for source in self.sources if source.role == "new"]

    @property
    def replay(self) -> list[CorpusSource]:
        return [source for source in self.sources if source.role == "replay"]

    @property
    def shares(self) -> list[float]:
        """Of every source its share of all the windows of a run."""
        whole = sum(source.weight for source in self.sources)
        return [source.weight / whole for source in self.sources]

    @field_validator("sources")
    @classmethod
    def _distinct(cls, sources: list[CorpusSource]) -> list[CorpusSource]:
        if all(source.role == "replay" for source in sources):
            raise ValueError("every source has the role replay; give the text to be learned the role new")
        return distinct_names(sources)
