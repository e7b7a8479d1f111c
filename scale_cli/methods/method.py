"""What a method is. A file of this package holds one, or several that are one but for a setting; `METHODS` lists all.

The config's schema reads this package, so it loads without torch: what computes imports torch where it is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from scale_cli.values import Section

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from scale_cli.methods.recipes import Hook, Training

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class MethodSection(Section):
    """What a config says of its method, whichever it is."""

    variant: str = "route"


Settings = TypeVar("Settings", bound=Section)


class Method(Generic[Settings]):
    """What makes a model to train of a base. A subclass says what is not as here."""

    name: ClassVar[str]  # as `method.variant`
    label: ClassVar[str]  # where people read of it
    colour: ClassVar[str]  # in figures, of Okabe and Ito's palette but its yellow: https://jfly.uni-koeln.de/color/
    mark: ClassVar[tuple[str, str]]  # in figures: for matplotlib, and as a sign in a line of text
    section: ClassVar[str | None] = None  # of `method`, that has its settings; None: all of `method`
    settings: ClassVar[type[Section]] = MethodSection
    left_out: ClassVar[Mapping[str, float]] = {"lr": 1.0e-5}  # of `train`, where a config does not say

    widens: ClassVar[bool] = False  # the base stays in the model, bit for bit
    routes: ClassVar[bool] = False  # what is served is a router's mixture with that base
    takes_new_tokens: ClassVar[bool] = False
    is_sharded: ClassVar[bool] = True  # may be trained in parts
    reads_known_text: ClassVar[bool] = False  # measures on sources of the role replay
    has_tensor_rates: ClassVar[bool] = False  # every tensor is a group of the optimiser, with a rate of its own
    adapter: ClassVar[Literal["", "scale", "peft"]] = ""  # whose folder holds what trains, to be put onto the base

    def check(self, settings: Settings) -> None:
        """Refuse settings that do not go together, by a ValueError."""

    def in_words(self, settings: Settings) -> str:
        """Return the settings that matter most, to be read after the label."""
        return ""

    def served(self, settings: Settings) -> str:
        """Return the head that answers: the trained one, or the rule of a router."""
        return "adapted"

    def served_in_words(self, settings: Settings) -> str:
        """Return that rule, to be read after the settings."""
        return ""

    def routes_plainly(self, settings: Settings) -> bool:
        """Return whether the plain export can be served routed."""
        return False

    def trains_base_weights(self, settings: Settings) -> bool:
        """Return whether the base's own weights (or copies of them) train, and so are held in float32."""
        return True

    def build(self, base: PreTrainedModel, settings: Settings, seed: int, new: Any = None) -> Any:
        """Return the model that is trained, which of it trains decided; `base` may become a part of it.

        The base is frozen, in float32 where its weights train, and without weights (on the meta device) to count. `new`
        are tokens that a widened model adds (`NewPieces`); a plain base has them already.
        """
        raise NotImplementedError

    def start(self, model: Any, settings: Settings, seed: int) -> None:
        """Fill what `build` has added, but for rows of new tokens."""

    def restore(self, folder: Path, base: PreTrainedModel, settings: Settings, seed: int) -> Any:
        """Return the model that a method folder is of, its trained parameters not loaded yet."""
        return self.build(base, settings, seed)

    def as_base(self, model: Any) -> Any:
        """Return what is the base bit for bit at the start."""
        return model

    def probe_windows(self, settings: Settings) -> int:
        """Return the windows of known text, of each source, in which `find` looks before training; 0: nowhere."""
        return 0

    def find(self, settings: Settings, base: PreTrainedModel, probe: Sequence[Any]) -> Settings:
        """Return the settings with what is found on windows of known text."""
        return settings

    def found(self, settings: Settings) -> str:
        """Return in words what was found, or named in its place."""
        return ""

    def hooks(self, settings: Settings, training: Training) -> list[Hook]:
        """Return what is done around every update."""
        return []

    def work_beside(self, settings: Settings, max_steps: int, global_batch_size: int, num_known_sources: int) -> float:
        """Return the windows that are measured on in a run, relative to those that are trained on."""
        return 0.0
