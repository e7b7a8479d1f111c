"""The interface of a method. A file of this package holds one method, or several that differ in one
setting.

The config's schema imports this package, so it loads without torch: functions import torch when
they are called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from scale_cli.methods.stream_kinds import COPY, StreamKind
from scale_cli.values import Section

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from scale_cli.methods.recipes import Hook, Training
    from scale_cli.methods.starts.start import TextToLearn

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class MethodSection(Section):
    """The keys of `method` that every method has."""

    variant: str = "route"


Settings = TypeVar("Settings", bound=Section)


@dataclass(frozen=True)
class PlainTraining:
    """What trains in a plain model, which has the base's layers and copies of some."""

    layers: Sequence[tuple[int, bool]]  # bottom up: a layer of the base, and whether it trains
    trains_embedding: bool = False
    trains_top: bool = False  # the last norm, and the head if it is not tied


class Method(Generic[Settings]):
    """Makes a model to train from a base. A subclass overrides what differs from these defaults."""

    name: ClassVar[str]  # as `method.variant`
    label: ClassVar[str]  # the name that people read
    # In figures, its own; after Okabe and Ito: https://jfly.uni-koeln.de/color/
    colour: ClassVar[str]
    mark: ClassVar[tuple[str, str]]  # in figures: for matplotlib, and as a sign in a line of text
    # The section of `method` with its settings; None: all of `method`.
    section: ClassVar[str | None] = None
    settings: ClassVar[type[Section]] = MethodSection
    # Values of `train` keys that the config leaves out.
    train_defaults: ClassVar[Mapping[str, float | str]] = {}
    # where the search of `train.lr: auto` begins (training/rate_search.py)
    usual_lr: ClassVar[float] = 1.0e-5

    first_run: ClassVar[Mapping[str, object]] = {}  # settings of the config by `scale init`

    trains: ClassVar[bool] = True  # False: the config names a model that is trained already
    streams: ClassVar[StreamKind] = COPY  # how its model runs beside the base
    # What answers, and what the report judges, if the config has a router.
    head: ClassVar[Literal["trained", "routed"]] = "routed"
    # what to know of a run, with a place for its tokens per parameter of the base; "": nothing
    advice: ClassVar[str] = ""
    takes_new_tokens: ClassVar[bool] = False
    exports: ClassVar[Sequence[str]] = ("plain",)  # the formats if the config names none

    @property
    def widens(self) -> bool:
        """Whether the base stays in the model, bit for bit."""
        return self.streams.holds_base

    def completed(self, tree: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a config's `method`, unchecked, with what the method finds out itself."""
        return tree

    def of(self, settings: Settings) -> Method[Settings]:
        """Return the method with these settings, where they decide its table entries."""
        return self

    def in_words(self, settings: Settings) -> str:
        """Return the most important settings in words, to follow the label."""
        return ""

    def routes_plainly(self, settings: Settings) -> bool:
        """Return whether the plain export can be served routed."""
        return False

    def trains_base_weights(self, settings: Settings) -> bool:
        """Return whether the base's own weights, or copies of them, train; the whole base is then
        held in float32.
        """
        return True

    def build(self, base: PreTrainedModel, settings: Settings, seed: int, new: Any = None) -> Any:
        """Return the model to train, with `requires_grad` set; `base` may become a part of it.

        The base is frozen, in float32 if its weights train, and on the meta device if only sizes
        are counted. `new` are tokens that a widened model adds (`NewPieces`); a plain base has them
        already.
        """
        raise NotImplementedError

    def start(
        self, model: Any, settings: Settings, seed: int, text: TextToLearn | None = None
    ) -> None:
        """Fill the parameters that `build` added, except rows of new tokens.

        `text` is the text to be learned; None: not known.
        """

    def restore(self, folder: Path, base: PreTrainedModel, settings: Settings, seed: int) -> Any:
        """Return the model of a method folder, before its trained parameters are loaded."""
        return self.build(base, settings, seed)

    def highest_lr(self, settings: Settings) -> float:
        """Return the highest rate that `train.lr: auto` takes.

        A few updates may bear a rate that many do not (docs/results/rates.md).
        """
        return 5.0e-3

    def first_update_tells(self, model: Any) -> bool:
        """Return whether `train.lr: auto` finds a rate by a model's first update at which training
        holds; else it is `usual_lr`.
        """
        return True

    def as_base(self, model: Any) -> Any:
        """Return the model whose logits equal the base's bit for bit at the start."""
        return model

    def hooks(self, settings: Settings, training: Training) -> list[Hook]:
        """Return the hooks that run around every update."""
        return []
