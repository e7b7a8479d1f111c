"""What the posterior rule guarantees, in a figure and in words, and what it does not."""

from __future__ import annotations

import math

from scale_cli.methods.widened import RouterConfig

NOT_COVERED = (
    "That is of whole documents, scored from their first token. It does not cover a text scored after a context that "
    "favours the other head (the choices of a benchmark), nor a generation: as many nats as a long prompt has given "
    "one head, the other has to win back."
)


def bound_nats(prior: float, switch_rate: float) -> float | None:
    """Return by how much routing may cost a document more than a head of some weight at the start, whatever heads do.

    With a switch rate there is no figure that holds for documents of every length.
    """
    return None if switch_rate else -math.log(prior)


def guarantee(router: RouterConfig) -> str:
    """Return what is guaranteed of a router of two heads, in a sentence or two; empty where nothing is."""
    over_base, over_trained = (bound_nats(prior, router.switch_rate) for prior in (router.prior, 1.0 - router.prior))
    if router.rule != "posterior" or over_base is None or over_trained is None:
        return ""
    what = f"{over_base:.3f} nats over the better of the two heads"
    if over_base != over_trained:
        what = f"{over_base:.3f} nats over the base head, nor than {over_trained:.3f} over the trained one"
    return f"Whatever was trained, no document costs more than {what} (-ln of its weight at the start). {NOT_COVERED}"
