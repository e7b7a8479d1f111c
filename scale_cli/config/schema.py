"""The schema of the config file, one class per section, and which keys may change between two verbs
of one run.

Every key is public (docs/configuration.md). A key may change only if its field is marked so
(`values.Change`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    create_model,
    model_validator,
)

from scale_cli.config.sources import DISTINCT, BenchmarkSource, CorpusConfig, EvaluationSource
from scale_cli.config.training import TrainConfig
from scale_cli.config.vocabulary import Script, VocabularyConfig
from scale_cli.errors import ConfigError
from scale_cli.methods import METHODS
from scale_cli.methods.method import Method
from scale_cli.methods.recipes import recipes_of
from scale_cli.methods.widened import WideningConfig
from scale_cli.values import (
    BatchSize,
    Change,
    Folder,
    Free,
    Length,
    MixedPrecision,
    PathText,
    Section,
)

Dtype = Literal["float32", "bfloat16", "float16"]
DtypeOrAuto = Literal["auto", "float32", "bfloat16", "float16"]
Quantised = Literal["int8"]
ExportFormat = Literal["plain", "transformers", "adapter"]
_WrittenFormat = Literal[ExportFormat, "llama"]  # plain's name before
Head = Literal["base", "trained", "routed"]  # what answers: one of both heads, or their mixture


class ModelConfig(Section):
    """The pretrained model to begin with."""

    base: PathText = Field(
        description="hub id or local folder of a model (Llama, Qwen, ...: docs/families.md)"
    )
    revision: str | None = Field(
        default=None, description="branch, tag or commit of a base on the hub"
    )
    tokenizer: PathText | None = Field(
        default=None, description="hub id or local folder; null: the base's own"
    )
    dtype: DtypeOrAuto = Field(
        default="auto",
        description="dtype of the frozen base; auto: bfloat16 on a GPU that trains in bf16, else float32",
    )
    quantisation: Quantised | None = Field(
        default=None,
        description="int8: hold the base's linear maps in 8 bits; they compute in dtype; null: off",
    )

    @property
    def held_in(self) -> str:
        """The dtype, and the quantisation of the linear maps if any."""
        return (
            self.dtype
            if self.quantisation is None
            else f"{self.dtype}, linear maps in {self.quantisation}"
        )


class _AnyMethod(WideningConfig):
    """What is trained, and what is served."""

    vocabulary: VocabularyConfig | None = Field(
        default=None, description="new tokens to add; null: none"
    )

    model: PathText | None = Field(
        default=None,
        description="of given: folder or hub id of an adapter (PEFT) or a fine-tuned model of model.base",
    )
    kind: Literal["adapter", "copy"] | None = Field(
        default=None,
        description="of given: PEFT's adapter, or a copy of the base that was fine-tuned; null: whatever lies there",
    )

    @property
    def definition(self) -> Method[Any]:
        return METHODS[self.variant].of(self.settings)

    @property
    def settings(self) -> Any:
        """The method's own section, or this whole section if the method has none."""
        section = METHODS[self.variant].section
        return self if section is None else getattr(self, section)

    @property
    def head(self) -> Head:
        """What answers in `generate` and `serve`, unless they are told otherwise."""
        return "trained" if self.router is None else self.definition.head

    @property
    def served(self) -> str:
        """The head, or rule, by whose row the report judges a run."""
        return self.rules.rule if self.head == "routed" else "trained"

    @property
    def in_words(self) -> str:
        """The method's name and its most important settings."""
        words = self.definition.label + self.definition.in_words(self.settings)
        if self.vocabulary is not None:
            words += f", {'' if self.vocabulary.folder else f'{self.vocabulary.new_tokens:,} '}new tokens"
        return words

    @property
    def trains_base_weights(self) -> bool:
        """Whether the base's own weights (or copies of them) train, and so are held in float32."""
        return self.definition.trains_base_weights(self.settings)

    def check_goes_with_8_bits(self) -> None:
        """Raise ConfigError if the method trains weights that a base in 8 bits holds read-only."""
        if self.trains_base_weights or not self.definition.streams.shares_weights:
            raise ConfigError(
                f"method.variant: {self.variant} trains weights of the base, or copies of them, but "
                "model.quantisation makes them read-only; use preserve, adapt, route or lora, or "
                "remove model.quantisation"
            )

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, tree: Any) -> Any:
        method = METHODS.get(str(tree.get("variant"))) if isinstance(tree, dict) else None
        return tree if method is None else method.completed(tree)

    @model_validator(mode="after")
    def _parts_go_together(self) -> _AnyMethod:
        if (self.model is None) is not self.definition.trains:
            raise ValueError(
                f"model: {self.variant} trains a model of its own; remove this key, or use given"
                if self.definition.trains
                else "model: names the adapter or model that is given; it is missing"
            )
        if self.vocabulary is not None and not self.definition.takes_new_tokens:
            taking = [method.name for method in METHODS.values() if method.takes_new_tokens]
            raise ValueError(
                f"vocabulary: {self.variant} takes no new tokens; remove it, or use {', '.join(taking)}"
            )
        if self.distils and not self.definition.widens:
            raise ValueError(
                f"distillation.weight: {self.variant} does not keep the base in memory, as only preserve and route do; "
                "set method.distillation.weight=0"
            )
        return self


# At run time it has a section for every method with one; a type checker knows only what all methods
# share.
if TYPE_CHECKING:
    MethodConfig = _AnyMethod
else:
    MethodConfig = create_model(
        "MethodConfig",
        __base__=_AnyMethod,
        __doc__=_AnyMethod.__doc__,
        __module__=__name__,
        variant=(
            Literal[tuple(METHODS)],
            Field(
                default="route",
                description="three ways to widen (the paper's SCALE-Preserve, -Adapt, -Route), a baseline, or a model "
                "that is given",
            ),
        ),
        **{
            method.section: (method.settings, method.settings())
            for method in METHODS.values()
            if method.section
        },
    )


class EvaluationConfig(Section):
    """What is measured, and how finely."""

    perplexity: Annotated[list[EvaluationSource], DISTINCT] = Field(
        default=[], description="held-out corpora"
    )
    benchmarks: Annotated[list[BenchmarkSource], DISTINCT] = Field(
        default=[],
        description="task names of lm-eval, or mappings {name, path, language, role} for task files",
    )
    sequence_length: Length | None = Field(
        default=None,
        description="context: the most tokens that one is predicted from; a longer document is read in windows that "
        "overlap by half; null: the base's own",
    )
    batch_size: BatchSize = Field(
        default=8, description="times corpus.sequence_length: tokens evaluated at once"
    )
    mixed_precision: MixedPrecision = Field(default="auto", description="autocast; auto: train's")
    bootstrap_resamples: int = Field(
        default=2000, ge=100, le=1_000_000, description="resamples per interval"
    )


class ExportConfig(Section):
    """What `scale export` writes."""

    format: Annotated[
        list[ExportFormat],
        Field(min_length=1),
        AfterValidator(lambda formats: list(dict.fromkeys(formats))),  # each once
        BeforeValidator(
            lambda given: [
                "plain" if name == "llama" else name
                for name in (given if isinstance(given, list) else [given])
            ],
            json_schema_input_type=_WrittenFormat | list[_WrittenFormat],
        ),
    ] = Field(
        default=["plain"],
        description="one format or several; if left out: plain, plus transformers if plain cannot be routed; adapter "
        "with lora; llama is an old name of plain",
    )
    dtype: Dtype | None = Field(
        default=None,
        description="null: the base's own, as its config.json says; float16 suits models that become f16 or q8_0 in "
        "llama.cpp",
    )

    @model_validator(mode="after")
    def _adapter_in_float32(self) -> ExportConfig:
        if "adapter" in self.format and self.dtype not in (None, "float32"):
            raise ValueError(
                "dtype: an adapter is always written in float32; leave dtype out, or set format: plain"
            )
        return self


class RunConfig(Section):
    """The whole file: one YAML serves upscale, train, evaluate and export."""

    output_dir: Free[Folder] = Field(description="the folder under which everything is written")
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**32,
        description="seed of the initial weights, data order and bootstrap",
    )
    model: ModelConfig
    method: MethodConfig = MethodConfig()
    corpus: CorpusConfig
    train: TrainConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    export: ExportConfig = ExportConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, tree: Any) -> Any:
        """Fill in defaults that depend on another section: the method's rates, export formats."""
        sections = ("method", "train", "export", "corpus")
        if not isinstance(tree, dict):
            return tree
        if not all(isinstance(tree.get(name, {}), dict) for name in sections):
            return tree
        given, train, export, corpus = (tree.get(name, {}) for name in sections)
        row = METHODS.get(str(given.get("variant")))
        if row is not None and not row.trains:  # what only training reads is not asked for
            train = {"max_steps": 1, **train}
            tree = tree | {"train": train, "corpus": {"sources": [], **corpus}}
        if "train" not in tree:
            return tree
        try:
            checked = MethodConfig.model_validate(given)
        except ValidationError:  # reported when the method is validated
            return tree
        method = checked.definition
        formats = [*method.exports]
        if method.widens and checked.served != "trained":
            formats += [] if method.routes_plainly(checked.settings) else ["transformers"]
        return tree | {
            "train": {**method.train_defaults, **train},
            "export": {"format": formats, **export},
        }

    @property
    def script_prior(self) -> float | None:
        """The weight with which a head starts that a prompt's script does not point to; None if no
        script tells.
        """
        return None if self.new_script is None else self.method.rules.script_prior

    @property
    def new_script(self) -> Script | None:
        """The script of the new languages and tokens; None if it tells nothing: one of the
        languages has another, such as Latin, or what is to be kept (replay, retention) has the same.
        """
        vocabulary = self.method.vocabulary
        languages: dict[str, set[str]] = {"new": set(), "known": set()}
        for source in self.corpus.sources:
            languages["known" if source.role == "replay" else "new"].add(source.language)
        for held in self.evaluation.perplexity:
            if held.role == "retention":
                languages["known"].add(held.language)
            elif not self.corpus.sources:
                languages["new"].add(held.language)
        are_known = all(Script.of_languages([code]).ranges for code in languages["new"])
        if vocabulary is None and not are_known:
            return None
        script = Script.of_languages(languages["new"])
        if vocabulary is not None:
            script = Script((*script.ranges, *Script.named(vocabulary.script).ranges))
        return None if script.meets(Script.of_languages(languages["known"])) else script

    def teaches(self, held_out: EvaluationSource) -> bool:
        """Return whether text of a held-out text's kind is trained on; conversations often are not."""
        sources = self.corpus.sources
        return (
            held_out.messages_field is None
            or not sources
            or any(source.messages_field is not None for source in sources)
        )

    @property
    def eval_tokens(self) -> int:
        """The most tokens that an evaluation during training scores; 0 if there is none."""
        train = self.train
        if train.eval_every_steps is None:
            return 0
        if train.eval_max_tokens is not None:
            return train.eval_max_tokens
        of_each = self.eval_beginning * len(self.evaluation.perplexity)
        trained = train.eval_every_steps * train.global_batch_size * self.corpus.sequence_length
        return max(trained // _TRAINED_FOR_EACH_EVALUATED, of_each)

    @property
    def eval_beginning(self) -> int:
        """The most tokens of a document that an evaluation during training scores.

        Many beginnings say more than a few whole documents.
        """
        return self.evaluation.sequence_length or self.corpus.sequence_length

    @model_validator(mode="after")
    def _sections_go_together(self) -> RunConfig:
        for problem in (*self._method_problems(), *self._observing_problems()):
            raise ValueError(problem)
        return self

    def _method_problems(self) -> Iterator[str]:
        method = self.method
        train = self.train
        if method.definition.trains and not self.corpus.sources:
            yield "corpus.sources: is empty; name the text to be learned"
        if method.distils and not any(source.weight for source in self.corpus.replay):
            yield (
                "method.distillation.weight: acts only on replay; give one of corpus.sources the role replay, with a "
                "weight above 0"
            )
        if train.mixed_precision == "fp16" and train.sharding != "none":
            yield f"train.mixed_precision: fp16 needs train.sharding: none, not {train.sharding}"
        if (train.mixed_precision, self.model.dtype) in (("fp16", "bfloat16"), ("bf16", "float16")):
            yield f"train.mixed_precision: {train.mixed_precision} does not go with model.dtype: {self.model.dtype}"
        if self.model.quantisation is not None and (train.sharding != "none" or train.compile):
            asked = "compile: true" if train.compile else f"sharding: {train.sharding}"
            yield f"train.{asked} does not go with model.quantisation: {self.model.quantisation}"
        for recipe in recipes_of(train):
            yield from recipe.problems(self)
        if (vocabulary := method.vocabulary) is None:
            return
        known = [source.name for source in self.corpus.sources]
        if odd := [name for name in vocabulary.sources if name not in known]:
            yield f"method.vocabulary.sources: {odd[0]!r} is not one of corpus.sources ({', '.join(known)})"
        taken = vocabulary.sources or [source.name for source in self.corpus.new]
        if any(
            source.messages_field is not None and source.name in taken
            for source in self.corpus.sources
        ):
            yield (
                "method.vocabulary.sources: new tokens are learned from text, not from conversations; name only "
                "sources without messages_field"
            )

    def _observing_problems(self) -> Iterator[str]:
        train = self.train
        if train.eval_every_steps and not self.evaluation.perplexity:
            yield "train.eval_every_steps: evaluation.perplexity names no text to measure; name one, or remove it"
        if train.max_forgetting is None:
            return
        if not train.eval_every_steps:
            yield "train.max_forgetting: needs periodic evaluations to choose from; set train.eval_every_steps"
        if missing := {"acquisition", "retention"} - {
            source.role for source in self.evaluation.perplexity
        }:
            yield f"train.max_forgetting: evaluation.perplexity has no corpus of role {min(missing)}"


# Keys that say where something lies. Callers that compare its content by hash (base, corpora)
# ignore them.
BASE_KEYS = r"model\.(base|revision|tokenizer)"
LOCATION_KEYS = BASE_KEYS + r"|corpus\.sources\.\d+\.(path(\.\d+)?|dataset|revision)"
# Of periodic evaluations, by default: they then take a few per cent of the time.
_TRAINED_FOR_EACH_EVALUATED = 10
# Keys that change the scores of periodic evaluations.
_SCORED_BY = (
    r"method\.router(?!\.script_prior).*"
    r"|evaluation\.(sequence_length|mixed_precision|perplexity\.\d+\.(?!path|revision).+)"
)
# The router acts in evaluation and generation only, so it may be set after training; here it is its
# own section. Distillation acts in training only, so it may be set after upscaling.
_MOVED = {"method.router": "router", "method.distillation.": "train"}
UPSCALE_SECTIONS = ("seed", "model", "method")
TRAIN_SECTIONS = (*UPSCALE_SECTIONS, "corpus", "train")
SERVED_SECTIONS = (*TRAIN_SECTIONS, "router")
EVALUATE_SECTIONS = (*SERVED_SECTIONS, "evaluation")
EXPORT_SECTIONS = (*SERVED_SECTIONS, "export")


def _marked(section: type[BaseModel], mark: Change, prefix: str = "") -> Iterator[str]:
    # Lists, and sections that may be null, are not entered: a mark on a key of a source (`weight`)
    # does nothing.
    for name, field in section.model_fields.items():
        if mark in field.metadata:
            yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _marked(field.annotation, mark, f"{prefix}{name}.")


FREE, ACCEPTABLE = (frozenset(_marked(RunConfig, mark)) for mark in (Change.FREE, Change.ACCEPTED))


def differences(
    before: RunConfig, now: RunConfig, sections: tuple[str, ...], ignored_keys: str = ""
) -> list[str]:
    """Return `key: before -> now` for every changed key in `sections` that makes it a different
    run.

    Keys that match the pattern `ignored_keys` do not count: the caller compares the content behind
    them.
    """

    def counts(key: str) -> bool:
        section = next(
            (moved for prefix, moved in _MOVED.items() if key.startswith(prefix)),
            key.partition(".")[0],
        )
        is_free = re.sub(r"\.\d+$", "", key) in FREE  # items of a list share its key
        return section in sections and not is_free and not re.fullmatch(ignored_keys, key)

    return [line for key, line in _changes(before, now).items() if counts(key)]


def scored_otherwise(before: RunConfig, now: RunConfig) -> list[str]:
    """Return `key: before -> now` for every changed key that makes scores of periodic evaluations
    incomparable.
    """
    changed = [line for key, line in _changes(before, now).items() if re.fullmatch(_SCORED_BY, key)]
    if before.eval_tokens != now.eval_tokens:
        changed.append(f"train.eval_max_tokens: {before.eval_tokens} -> {now.eval_tokens}")
    return changed


def _is_where_it_was(recorded: Any, written: Any) -> bool:
    """Return whether a relative path whose target is gone can be the absolute one that a run recorded."""
    if not isinstance(recorded, str) or not isinstance(written, str) or not written:
        return False
    path, now = Path(recorded), Path(written)
    return (
        path.is_absolute() and not now.is_absolute() and path.parts[-len(now.parts) :] == now.parts
    )


def _changes(before: RunConfig, now: RunConfig) -> dict[str, str]:
    old, new = (dict(leaves(config.model_dump(mode="json"))) for config in (before, now))
    changed = [
        key
        for key in {**old, **new}
        if old.get(key) != new.get(key) and not _is_where_it_was(old.get(key), new.get(key))
    ]
    return {key: f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in changed}


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a tree with its key, such as `train.lr` or `corpus.sources.0.name`."""
    # An empty one is a value too: layers [] is not layers null.
    if isinstance(value, dict | list) and value:
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(child, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
