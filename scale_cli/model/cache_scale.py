"""What transformers calls the argument and the output that carry a model's state from one decoding
step to the next.

transformers 5.24 renamed `past_key_values` to `cache`. A forward pass that is given its state by a
name that it does not know would decode without it, and nothing else would show that. So versions
whose name is not known are refused here, and `require_state` refuses a step that has lost its
state.

A routed export carries this file too.
"""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from torch import Tensor

# pyproject.toml has the range of the package itself
OLDEST = (4, 57)
FIRST_UNTESTED = (5, 25)


def _name_of_cache() -> str:
    version = transformers.__version__
    numbers = tuple(int(number) for number in version.split(".")[:2])
    generate = transformers.GenerationMixin.prepare_inputs_for_generation
    if not OLDEST <= numbers < FIRST_UNTESTED:
        raise ImportError(
            f"transformers {version}: this model's code is tested with transformers "
            f"{OLDEST[0]}.{OLDEST[1]} to {FIRST_UNTESTED[0]}.{FIRST_UNTESTED[1] - 1}, and may decode "
            f"without its state in others; pip install 'transformers<{FIRST_UNTESTED[0]}.{FIRST_UNTESTED[1]}'"
        )
    return "cache" if "cache" in inspect.signature(generate).parameters else "past_key_values"


CACHE = _name_of_cache()


def require_state(attention_mask: Any, position_ids: Tensor | None, num_positions: int) -> None:
    """Raise ValueError if tokens came before these, in a call that was given no state of them.

    Args:
        attention_mask: (B, past + T); None and prepared masks of four dimensions show nothing.
        position_ids: (B, T) or None. They are looked at for one token alone, which is a decoding
            step.
        num_positions: T.
    """
    num_before = 0
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        num_before = attention_mask.shape[1] - num_positions
    elif attention_mask is None and position_ids is not None and num_positions == 1:
        num_before = int(position_ids.min())
    if num_before > 0:
        raise ValueError(
            f"{CACHE}: {num_before:,} tokens came before these, but no state of them; pass the {CACHE} "
            "that the last call returned, or all tokens"
        )
