"""The config of the benchmark: the number of people, the training stages, and the methods."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.methods.recipes import recipes_of
from scale_cli.values import BatchSize, Folder, LearningRate, MixedPrecision, Name, Section, Steps
from scripts.research.lookahead import LookaheadConfig


class PeopleConfig(Section):
    """The number of synthetic people in each stage."""

    pretraining: int = Field(
        default=200, ge=1, le=1_000_000, description="people whose biographies are pre-trained"
    )
    biographies_each: int = Field(
        default=5, ge=1, le=10_000, description="biographies per person, differently worded"
    )
    task_0: int = Field(
        default=100, ge=1, le=1_000_000, description="people among them whom Task 0 asks about"
    )
    task_1: int = Field(
        default=100,
        ge=1,
        le=1_000_000,
        description="people never seen before, whom Task 1 asks about",
    )
    measured: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="number of people measured per task, from the first; null: all",
    )

    @model_validator(mode="after")
    def _task_0_is_pretrained(self) -> PeopleConfig:
        if self.task_0 > self.pretraining:
            raise ValueError(f"task_0 {self.task_0} is more than pretraining {self.pretraining}")
        return self


class ModelSizes(Section):
    """The Llama that is trained from a random start; its embeddings are tied."""

    vocab_size: int = Field(default=2048, ge=512, le=2**20)
    hidden_size: int = Field(default=128, ge=8, le=2**16)
    intermediate_size: int = Field(default=352, ge=8, le=2**18)
    num_hidden_layers: int = Field(default=4, ge=1, le=1000)
    num_attention_heads: int = Field(default=4, ge=1, le=2**12)
    num_key_value_heads: int = Field(default=4, ge=1, le=2**12)

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelSizes:
        if (
            self.hidden_size % self.num_attention_heads
            or self.num_attention_heads % self.num_key_value_heads
        ):
            raise ValueError(
                "num_key_value_heads divides num_attention_heads, which divides hidden_size"
            )
        return self


class StageConfig(Section):
    """One stage of training; a sequence is one biography, or one question with its answer."""

    max_steps: Steps
    batch_size: BatchSize = Field(description="sequences a step")
    lr: LearningRate = 2.0e-3
    warmup_steps: int = Field(default=10, ge=0, le=10_000_000)

    def train_config(self, mixed_precision: MixedPrecision, **others: Any) -> TrainConfig:
        """Return the training settings of this stage; `others` replace some of them."""
        of_stage = {
            "max_steps": self.max_steps,
            "global_batch_size": self.batch_size,
            "micro_batch_size": self.batch_size,
            "lr": self.lr,
            "warmup_steps": min(self.warmup_steps, self.max_steps),
            "mixed_precision": mixed_precision,
        }
        return TrainConfig.model_validate(of_stage | others)


class ComparedMethod(Section):
    """A method that learns Task 1, its learning rate, and its means to keep Task 0."""

    name: Name
    lr: LearningRate
    method: MethodConfig
    weight_decay: float = Field(default=0.1, ge=0.0, le=100.0, description="as train.weight_decay")
    decay_to_base: float | None = Field(default=None, description="as train.decay_to_base")
    lookahead: LookaheadConfig | None = Field(default=None, description="as train.lookahead")
    replay: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="share of the questions trained on that are Task 0's",
    )

    def training(self, stage: StageConfig, mixed_precision: MixedPrecision) -> TrainConfig:
        """Return the training settings of a stage by this method."""
        given = self.model_dump(exclude={"name", "method", "replay"}, exclude_none=True)
        train = stage.train_config(mixed_precision, **given)
        for recipe in recipes_of(train):
            for problem in recipe.problems(SimpleNamespace(method=self.method, train=train)):
                raise ValueError(problem)
        return train

    @field_validator("method")
    @classmethod
    def _learns_questions_alone(cls, method: MethodConfig) -> MethodConfig:
        if method.distils:
            raise ValueError(
                "distillation.weight: the benchmark learns its questions alone; leave it out"
            )
        if method.vocabulary is not None:
            raise ValueError(
                "vocabulary: the benchmark's tokenizer has all that is asked; leave it out"
            )
        return method


def _widened(
    variant: Literal["preserve", "adapt", "route"], layers: str | None = None
) -> MethodConfig:
    return MethodConfig.model_validate(
        {"variant": variant, "expansion": {"ratio": 0.5}, "collaboration": {"layers": layers}}
    )


# Rates with which each learns Task 1 within the default steps; they are not tuned against one another. In Route the top
# layer collaborates, so that it differs from Preserve served with a router.
_DEFAULT_METHODS = [
    ComparedMethod(name="full", lr=2.0e-3, method=MethodConfig(variant="full")),
    ComparedMethod(name="lora", lr=5.0e-3, method=MethodConfig(variant="lora")),
    ComparedMethod(name="llama-pro", lr=5.0e-3, method=MethodConfig(variant="llama-pro")),
    ComparedMethod(name="preserve", lr=5.0e-3, method=_widened("preserve")),
    ComparedMethod(name="adapt", lr=3.0e-3, method=_widened("adapt")),
    ComparedMethod(name="route", lr=3.0e-3, method=_widened("route", "top:1")),
]


class BiographyConfig(Section):
    """The whole file; every key but output_dir has a default."""

    output_dir: Folder
    seed: int = Field(default=0, ge=0, lt=2**32)
    language: Literal["en", "ko"] = "en"
    mixed_precision: MixedPrecision = "bf16"
    people: PeopleConfig = PeopleConfig()
    model: ModelSizes = ModelSizes()
    pretraining: StageConfig = StageConfig(max_steps=600, batch_size=32, lr=3.0e-3)
    task_0: StageConfig = StageConfig(max_steps=400, batch_size=48)
    task_1: StageConfig = StageConfig(max_steps=400, batch_size=48)
    measure_every_steps: Steps = 25
    methods: list[ComparedMethod] = Field(default=_DEFAULT_METHODS, min_length=1)

    @field_validator("methods")
    @classmethod
    def _distinct(cls, methods: list[ComparedMethod]) -> list[ComparedMethod]:
        names = [method.name for method in methods]
        if len(set(names)) != len(names):
            raise ValueError("two methods share a name")
        return methods

    @model_validator(mode="after")
    def _steps_are_enough(self) -> BiographyConfig:
        for compared in self.methods:
            try:
                compared.training(self.task_1, self.mixed_precision)
            except ValidationError as error:
                reason = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise ValueError(f"methods: {compared.name}: {reason}") from None
            except ValueError as error:
                raise ValueError(f"methods: {compared.name}: {error}") from None
        return self
