"""The schema of the config file: one class per section, every key public (docs/configuration.md)."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError, field_validator, model_validator

from scale_cli.config.baselines import (
    AdeptConfig,
    EloConfig,
    FreezeConfig,
    LlamaProConfig,
    LoraConfig,
    OsfConfig,
)
from scale_cli.config.sources import (
    AnySource,
    BenchmarkSource,
    CorpusConfig,
    EvaluationSource,
    distinct_names,
)
from scale_cli.config.training import TrainConfig
from scale_cli.config.values import (
    Accepted,
    BatchSize,
    Folder,
    Free,
    Length,
    MixedPrecision,
    PathText,
    Section,
)
from scale_cli.config.vocabulary import VocabularyConfig

WIDENED = ("preserve", "adapt", "route")
Variant = Literal["preserve", "adapt", "route", "full", "lora", "osf", "freeze", "llama-pro", "adept", "elo"]
# Of a variant, where a config leaves them out of `train`: the paper's learning rates (section on training details); OSF
# has the fine-tunings', and no decay, which would shrink what it leaves as the base has it.
_LEFT_OUT = {
    **{variant: {"lr": 1.0e-5} for variant in ("full", "lora", "freeze", "elo")},
    "osf": {"lr": 1.0e-5, "weight_decay": 0.0},
    **{variant: {"lr": 2.0e-4} for variant in ("llama-pro", "adept")},
}
Dtype = Literal["float32", "bfloat16"]
ExportFormat = Literal["llama", "transformers", "adapter"]
Start = Literal["svd", "normal", "copy"]
Codes = Literal["random", "spelled", "cooccurrence"]


class ModelConfig(Section):
    """The pretrained model that is widened."""

    base: PathText = Field(
        description="hub id or local folder: Llama (TinyLlama, SmolLM2), Mistral, Qwen2/2.5, Qwen3; or a finished run"
    )
    revision: str | None = Field(default=None, description="of a base on the hub: branch, tag or commit")
    tokenizer: PathText | None = Field(default=None, description="hub id or local folder; null: the base's own")
    dtype: Dtype = Field(default="float32", description="of the frozen base")


class ExpansionConfig(Section):
    """How much is added, and how it starts (`upscale/initialise.py` has the table)."""

    ratio: float = Field(default=0.25, gt=0.0, le=4.0, description="how much wider; rounded to whole key/value heads")
    hidden_ratio: float | None = Field(
        default=None,
        gt=0.0,
        le=4.0,
        description="how much wider the stream; rounded to what the widened heads divide; null: as the heads",
    )
    mlp_ratio: float | None = Field(
        default=None, gt=0.0, le=4.0, description="how much wider the MLP; null: as the heads"
    )
    init: Start = Field(default="svd", description="what the added blocks start as: docs/training.md")
    embedding_scale: float | None = Field(
        default=1.4,
        gt=0.0,
        le=1e3,
        description="rms of E' at the start, relative to the base's stream before its last norm; null: as `init` says",
    )
    codes: Codes = Field(
        default="random",
        description="what E' of such a size starts as: each token's own numbers, in part those of its letters, or in "
        "part what follows it in the corpus too",
    )

    @model_validator(mode="after")
    def _codes_have_a_size(self) -> ExpansionConfig:
        if self.codes != "random" and self.embedding_scale is None:
            raise ValueError(f"codes: {self.codes} has the size that embedding_scale gives it; that is null")
        return self


class CollaborationConfig(Section):
    """Where W12 exists, that is, where the expansion writes into the base stream (paper: collaborative adaptation)."""

    layers: str | list[int] | None = Field(
        default=None, description="none | all | top:K | [indices]; null: what the variant stands for"
    )
    modules: list[Literal["attention", "mlp"]] = Field(
        default=["attention", "mlp"], min_length=1, description="where in those layers"
    )

    @field_validator("layers", mode="before")
    @classmethod
    def _known_form(cls, layers: object) -> object:
        known = layers is None or layers in ("none", "all")
        if isinstance(layers, str):
            known = known or re.fullmatch(r"top:[1-9][0-9]{0,3}", layers) is not None
        elif isinstance(layers, list):
            known = all(type(layer) is int and layer >= 0 for layer in layers)
        if not known:
            raise ValueError(f"{layers!r} is none of: none, all, top:K (K >= 1), a list of layer indices")
        return layers

    @field_validator("modules")
    @classmethod
    def _distinct_modules(cls, modules: list[str]) -> list[str]:
        if len(set(modules)) != len(modules):
            raise ValueError("names a module twice")
        return modules


class RouterConfig(Section):
    """How SCALE-Route chooses between the base head and the trained head."""

    rule: Literal["posterior", "cosine"] = Field(
        default="posterior", description="by how well each head has predicted so far, or the paper's, by layers' cosine"
    )
    prior: float = Field(default=0.5, gt=0.0, lt=1.0, description="weight of the base head at the first token")
    switch_rate: float = Field(default=0.0, ge=0.0, lt=1.0, description="fixed share alpha, per token")
    threshold: float = Field(default=0.5, ge=-1.0, le=1.0, description="tau of the cosine rule")


class DistillationConfig(Section):
    """Learning from the base's own predictions, where the text is of what it knows: on sources with the role replay."""

    weight: Accepted[float] = Field(
        default=0.0,
        ge=0.0,
        le=1e6,
        description="of KL(base || trained head) beside the cross-entropy, on windows of replay alone; 0: off",
    )


class MethodConfig(Section):
    """What is trained, and what is served."""

    variant: Variant = Field(
        default="route", description="three ways to widen (the paper's SCALE-Preserve, -Adapt, -Route), or a baseline"
    )
    expansion: ExpansionConfig = ExpansionConfig()
    collaboration: CollaborationConfig = CollaborationConfig()
    router: RouterConfig = RouterConfig()
    distillation: DistillationConfig = DistillationConfig()
    vocabulary: VocabularyConfig | None = Field(default=None, description="tokens that are added; null: none")
    lora: LoraConfig = LoraConfig()
    osf: OsfConfig = OsfConfig()
    freeze: FreezeConfig = FreezeConfig()
    llama_pro: LlamaProConfig = LlamaProConfig()
    adept: AdeptConfig = AdeptConfig()
    elo: EloConfig = EloConfig()

    @property
    def widens(self) -> bool:
        """Whether the variant is one of SCALE's; the others are baselines."""
        return self.variant in WIDENED

    @property
    def takes_new_tokens(self) -> bool:
        """Whether tokens can be added to the base's."""
        return self.widens or self.variant == "full"

    @property
    def trains_base_weights(self) -> bool:
        """Whether the base's own weights (or copies of them) train, and so are held in float32."""
        return not self.widens and (self.variant != "lora" or self.lora.embeddings)

    @property
    def routes_plainly(self) -> bool:
        """Whether the plain export can be served routed: its one row of numbers holds what both heads read."""
        collaborates = self.collaboration.layers not in (None, "none", [])
        return self.variant == "route" and self.router.rule == "posterior" and not collaborates

    @property
    def counts_text(self) -> bool:
        """Whether what its blocks start as is counted in the corpus."""
        return self.widens and self.expansion.codes == "cooccurrence"

    @property
    def distils(self) -> bool:
        """Whether replay is learned from the base's predictions too."""
        return self.distillation.weight > 0

    @model_validator(mode="after")
    def _parts_go_together(self) -> MethodConfig:
        collaborates = self.collaboration.layers not in (None, "none", [])
        if self.variant == "preserve" and collaborates:
            raise ValueError(
                "collaboration.layers: the variant 'preserve' has no collaborating layer; use 'adapt' or 'route'"
            )
        if self.vocabulary is not None and not self.takes_new_tokens:
            raise ValueError(f"vocabulary: {self.variant} takes no new tokens; preserve, adapt, route and full do")
        if self.distils and not self.widens:
            raise ValueError(
                f"distillation.weight: {self.variant} has no base beside it in memory; only preserve and route have"
            )
        if self.distils and (self.variant == "adapt" or collaborates):
            raise ValueError(
                "distillation.weight: where layers collaborate the base's predictions are not at hand; take preserve, "
                "or route with collaboration.layers none"
            )
        return self


class ContinuationsConfig(Section):
    """Prompts that every head goes on with: in which script?"""

    prompts: int = Field(default=20, ge=1, le=1_000_000, description="beginnings of each held-out corpus's documents")
    prompt_tokens: int = Field(default=32, ge=1, le=2**20, description="of each, at most")
    new_tokens: int = Field(default=32, ge=1, le=2**20, description="after each, at most; the likeliest ones")


class EvaluationConfig(Section):
    """What is measured, and how finely."""

    perplexity: list[EvaluationSource] = Field(default=[], description="held-out corpora")
    benchmarks: list[BenchmarkSource] = Field(
        default=[], description="lm-eval names, or mappings {name, path, language, role} of local files"
    )
    continuations: ContinuationsConfig | None = Field(
        default=None, description="language confusion, of every held-out corpus; null: not measured, {}: 20 prompts"
    )
    sequence_length: Length | None = Field(default=None, description="null: corpus.sequence_length")
    batch_size: BatchSize = Field(default=8, description="windows at once")
    mixed_precision: MixedPrecision = Field(default="no", description="autocast")
    bootstrap_resamples: int = Field(default=2000, ge=100, le=1_000_000, description="behind every interval")

    @field_validator("perplexity", "benchmarks")
    @classmethod
    def _distinct(cls, sources: list[AnySource]) -> list[AnySource]:
        return distinct_names(sources)


class ExportConfig(Section):
    """What `scale export` writes."""

    format: ExportFormat | list[ExportFormat] = Field(
        default="llama",
        description="one or several; where it is left out: llama, and transformers too where llama cannot be routed",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="float16 for what becomes f16 or q8_0 in llama.cpp"
    )

    @field_validator("format", mode="before")
    @classmethod
    def _known_formats(cls, given: object) -> object:
        known = get_args(ExportFormat)
        named = given if isinstance(given, list) else [given]
        if not named or any(name not in known for name in named):
            raise ValueError(f"{given!r} is none of {', '.join(known)}, and no list of them")
        if any(named.count(name) > 1 for name in named):
            raise ValueError("names a format twice")
        return given

    @property
    def formats(self) -> list[ExportFormat]:
        """One or several."""
        return self.format if isinstance(self.format, list) else [self.format]


class RunConfig(Section):
    """The whole file: one YAML serves upscale, train, evaluate and export."""

    output_dir: Free[Folder] = Field(description="everything is written under it")
    seed: int = Field(default=0, ge=0, lt=2**32, description="of the start, the order of the data, the bootstrap")
    model: ModelConfig
    method: MethodConfig = MethodConfig()
    corpus: CorpusConfig
    train: TrainConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    export: ExportConfig = ExportConfig()

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_variant(cls, tree: Any) -> Any:
        train, method = (tree.get(key) if isinstance(tree, dict) else None for key in ("train", "method"))
        variant = method.get("variant") if isinstance(method, dict) else None
        if isinstance(train, dict) and isinstance(variant, str) and variant in _LEFT_OUT:
            return {**tree, "train": {**_LEFT_OUT[variant], **train}}
        return tree

    @model_validator(mode="after")
    def _has_what_the_method_needs(self) -> RunConfig:
        if self.method.distils and not any(source.weight for source in self.corpus.replay):
            raise ValueError(
                "method.distillation.weight: acts on replay alone, and no corpus.sources[].role is replay with weight"
            )
        if self.method.variant in ("osf", "adept") and self.train.sharding != "none":
            raise ValueError(f"method.variant: {self.method.variant} trains unsharded only; set train.sharding to none")
        if self.train.decay_to_base and not self.method.trains_base_weights:
            raise ValueError(f"train.decay_to_base: {self.method.variant} trains none of the base's weights")
        if self.train.embedding_norm == "bounded" and not self.method.widens:
            raise ValueError(f"train.embedding_norm: {self.method.variant} has no E', which alone can be bounded")
        if self.train.embedding_norm == "bounded" and self.method.expansion.embedding_scale is None:
            raise ValueError("train.embedding_norm: bounded by the size that method.expansion.embedding_scale gives E'")
        variant, phase = self.method.variant, self.method.elo.phase
        if variant == "adept" and not self.corpus.replay:
            raise ValueError(
                "method.variant: adept measures on what the base knows: give a source with the role replay, and with "
                "weight 0 where it is not to be trained on"
            )
        if variant == "elo" and phase == "alignment" and self.train.init_from is None:
            raise ValueError("method.elo.phase: alignment begins with what was trained of the layers: train.init_from")
        return self

    @model_validator(mode="after")
    def _learns_tokens_of_its_sources(self) -> RunConfig:
        if (vocabulary := self.method.vocabulary) is None:
            return self
        known = [source.name for source in self.corpus.sources]
        if odd := [name for name in vocabulary.sources if name not in known]:
            raise ValueError(f"method.vocabulary.sources: {odd[0]!r} is none of corpus.sources ({', '.join(known)})")
        taken = vocabulary.sources or [source.name for source in self.corpus.new]
        if any(source.messages_field is not None and source.name in taken for source in self.corpus.sources):
            raise ValueError("method.vocabulary.sources: new tokens are learned of text, not of conversations")
        if judged := [source.name for source in self.corpus.sources if source.judge == "base_loss"]:
            raise ValueError(
                f"method.vocabulary: {judged[0]} is judged by the base, which has none of the new tokens; "
                "select by ngram"
            )
        return self

    @model_validator(mode="after")
    def _can_be_observed(self) -> RunConfig:
        train, roles = self.train, {source.role for source in self.evaluation.perplexity}
        if train.eval_benchmarks_every_steps and not self.evaluation.benchmarks:
            raise ValueError("train.eval_benchmarks_every_steps: evaluation.benchmarks names none")
        if train.max_forgetting is None:
            return self
        if not train.eval_every_steps:
            raise ValueError(
                "train.max_forgetting: needs periodic evaluations to choose from; set train.eval_every_steps"
            )
        if missing := sorted({"acquisition", "retention"} - roles):
            raise ValueError(f"train.max_forgetting: evaluation.perplexity has no corpus of role {missing[0]}")
        return self

    @model_validator(mode="after")
    def _flash_attention_can(self) -> RunConfig:
        train = self.train
        if train.attention != "flash_attention_2":
            return self
        at_once = train.sequences_at_once(1)
        if self.corpus.isolate_documents and at_once > 1:
            # It finds documents by their positions, and in a batch of one alone; others it would run together.
            raise ValueError(
                "train.attention: flash_attention_2 cannot keep corpus.isolate_documents with train.micro_batch_size "
                f"{at_once}: set that to 1, or take flex_attention"
            )
        if train.compile and at_once == 1:
            raise ValueError(
                "train.compile: flash_attention_2 cannot be compiled with train.micro_batch_size 1; take another"
                " train.attention"
            )
        if self.model.dtype == "bfloat16" and not self.method.trains_base_weights:
            return self
        evaluated = [("evaluation", self.evaluation.mixed_precision)] if train.observes else []
        for section, precision in [("train", train.mixed_precision), *evaluated]:
            if precision == "no":
                raise ValueError(
                    f"train.attention: flash_attention_2 computes in 16 bits: set {section}.mixed_precision to bf16"
                )
        return self

    @model_validator(mode="before")
    @classmethod
    def _formats_of_the_variant(cls, tree: Any) -> Any:
        """Export a routed model in two folders where the plain one cannot be served routed."""
        export = tree.get("export", {}) if isinstance(tree, dict) else None
        if not isinstance(export, dict) or "format" in export:
            return tree
        try:
            method = MethodConfig.model_validate(tree.get("method", {}))
        except ValidationError:  # it is told of where the method is
            return tree
        if method.variant == "route" and not method.routes_plainly:
            return {**tree, "export": {**export, "format": ["llama", "transformers"]}}
        return tree
