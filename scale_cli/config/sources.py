"""Config sections for the sources of text and benchmarks, and for how they are read and mixed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)
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

# Name prefixes of lm-eval's Korean suites; any other suite is English unless the config says
# otherwise.
_KOREAN_SUITES = ("kobest", "kmmlu", "haerae", "click")
_LEAST_WEIGHT = 1e-6
CORPORA = "corpora.json"  # beside a state: the names of the text that was trained on
TOKENS = "tokens"  # folder of a run for tokenised corpora, unless `cache_dir` names another
Role = Annotated[
    Literal["retention", "acquisition"],
    Field(
        description="knowledge to keep, or to acquire; default for benchmarks: retention if English"
    ),
]


class TextSource(Section):
    """Where documents come from: local files by a glob, or a dataset on the hub."""

    name: Name
    # A test compares it with `FORMATS` (data/formats.py).
    path: SourcePatterns | None = Field(
        default=None,
        description="one or several globs of .txt .md .jsonl .json .csv files, plain or compressed as "
        ".gz .xz .zst, or of .parquet files; local, or on hf:// s3:// gs:// az:// https://",
    )
    dataset: PathText | None = Field(default=None, description="hub dataset id")
    subset: str | None = Field(default=None, description="configuration of the dataset")
    split: str = Field(default="train", description="split of the dataset")
    revision: str | None = Field(default=None, description="branch, tag or commit of the dataset")
    text_field: str = Field(
        default="text",
        description="where the text is: column of a table or dataset; key of a JSON record",
    )
    messages_field: str | None = Field(
        default=None,
        min_length=1,
        description="instead of text_field: key of a conversation, a list of {role, content}, of a JSON record or a "
        "dataset's row; the base's chat template formats it; training learns from the assistant's turns alone, held-"
        "out text is scored whole",
    )
    documents: Literal["paragraph", "line", "file"] = Field(
        default="paragraph",
        description="a .txt or .md file's documents: text between blank lines, a line, or the whole file",
    )
    language: Language
    skip_documents: int = Field(
        default=0,
        ge=0,
        le=10**12,
        description="skip this many first documents, as if they were not there",
    )
    max_documents: Documents | None = Field(
        default=None,
        description="reading ends after this many documents, or when more than this many records were dropped; a "
        "conversation that the chat template refuses counts as a document, here and in skip_documents",
    )

    @property
    def paths(self) -> list[str]:
        """The patterns of its files; empty for a dataset."""
        return [self.path] if isinstance(self.path, str) else self.path or []

    @property
    def is_local(self) -> bool:
        """Whether it is files of this machine, and not in a store or on the hub."""
        return self.dataset is None and not any("://" in path for path in self.paths)

    @model_validator(mode="after")
    def _one_origin(self) -> TextSource:
        if (self.path is None) == (self.dataset is None):
            raise ValueError("give exactly one of path (local files) and dataset (a hub id)")
        for key in ("subset", "revision"):
            if self.path is not None and getattr(self, key) is not None:
                raise ValueError(f"{key}: is for a dataset; path has none")
        if (
            self.messages_field is not None
            and self.text_field != type(self).model_fields["text_field"].default
        ):
            raise ValueError("give one of text_field and messages_field")
        if self.documents != "paragraph" and self.path is None:
            raise ValueError(
                f"documents: {self.documents!r} is for .txt files; a dataset's rows are its documents"
            )
        return self


class CorpusSource(TextSource):
    """A training source and its share of the training tokens."""

    role: Literal["new", "replay"] = Field(
        default="new",
        description="replay: text of what the base knows, so that it is not forgotten",
    )
    weight: float = Field(
        default=1.0,
        ge=0.0,
        le=1e6,
        description="share of the training windows, relative to the others; 0: replay that is only measured on",
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
    """A held-out corpus, and whether it measures retention or acquisition."""

    split: str = Field(default="validation", description="split of the dataset")
    role: Role


class BenchmarkSource(Section):
    """A benchmark: a task or group by lm-eval's name, or a task's YAML."""

    name: Name
    path: Annotated[PathText, Field(pattern=r"\.ya?ml$")] | None = Field(
        default=None,
        description="a task's .yaml in lm-eval's format, read only with --trust-tasks; null: `name` is lm-eval's name",
    )
    language: Language
    role: Role
    num_fewshot: int | None = Field(
        default=None, ge=0, le=1000, description="examples a prompt; null: the task's own"
    )
    limit: Documents | None = Field(
        default=None, description="only this many first items of every task"
    )

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
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Allow a plain name in the JSON Schema too."""
        mapping = handler(core)
        handler.resolve_ref_schema(mapping)["required"] = ["name"]
        return {"anyOf": [{"type": "string"}, mapping]}


def _check_names(sources: list[Any]) -> list[Any]:
    """Return the sources; ValueError if two share a name, since results are keyed by it."""
    names = [source.name for source in sources]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two sources are named {twice[0]!r}")
    return sources


DISTINCT = AfterValidator(_check_names)


class ReadingConfig(Section):
    """How every source is read, for training and held out."""

    max_document_bytes: int = Field(
        default=10_000_000,
        ge=1,
        le=2**31,
        description="a larger document is dropped and counts as bad",
    )
    max_bad_fraction: Free[Fraction] = Field(
        default=0.001,
        description="a source is refused if more than this share of its records or files is bad",
    )
    max_unknown_fraction: Free[Fraction] = Field(
        default=0.01,
        description="a source is refused if the tokenizer loses more than this share of its text",
    )
    num_workers: Free[int | None] = Field(
        default=None,
        ge=1,
        le=1024,
        description="processes that tokenise; any number gives the same bytes; null: one per usable core",
    )


class CorpusConfig(ReadingConfig):
    """The training corpus."""

    sequence_length: Length = Field(default=2048, description="tokens per window")
    isolate_documents: bool = Field(
        default=False,
        description="positions restart at every document in a window, and attention stays within it",
    )
    cache_dir: Free[Folder | None] = Field(
        default=None,
        description="folder of tokenised corpora, named by content, each with its ledger.json; null: "
        f"output_dir/{TOKENS}",
    )
    sources: Annotated[list[CorpusSource], DISTINCT] = Field(
        description="the sources to train on; of given: those that it was trained on, if known"
    )

    @property
    def new(self) -> list[CorpusSource]:
        return [source for source in self.sources if source.role == "new"]

    @property
    def replay(self) -> list[CorpusSource]:
        return [source for source in self.sources if source.role == "replay"]

    @property
    def shares(self) -> list[float]:
        """Each source's share of the windows of a run."""
        whole = sum(source.weight for source in self.sources)
        return [source.weight / whole for source in self.sources]

    @field_validator("sources")
    @classmethod
    def _new_text(cls, sources: list[CorpusSource]) -> list[CorpusSource]:
        if sources and all(source.role == "replay" for source in sources):
            raise ValueError(
                "every source has the role replay; give the text to be learned the role new"
            )
        return sources
