"""What the config.json of a plain export tells of its router: enough to serve it routed, and no harm to who does not.

The plain model's hidden row holds all streams side by side, and the columns of its vocabulary head hold one group for
each: [H | H'_1 | ...]. By groups the one product gives the logits of every head,

    z_0 = H x        z_k = z_parent(k) + H'_k u_k

which the posterior rule mixes (`model/routing.py`). Equal to rounding, not bit for bit; and not where an expansion
writes into x (W12), for the base's head reads the x that nobody has written into.
"""

from __future__ import annotations

from typing import Any

from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.upscale.folder import MethodModel

KEY = "scale_router"


def router_keys(model: MethodModel | JoinedForCausalLM) -> dict[str, Any] | None:
    """Return what `scale_router` is in the config.json of a model's plain export; None where it cannot be routed.

    Returns:
        `stream_sizes`: channels of the hidden row by stream, the base head's first (of a stack, all that its base head
        reads); `parents`: of every other head, the head that its logits are added to; `prior` of the base head, the
        rest being shared evenly by the others; `switch_rate`.
    """
    if isinstance(model, ScaleForCausalLM):
        routes = model.config.variant == "route" and model.config.router_rule == "posterior"
        if not routes or model.branches[-1].writes:
            return None
        *below, top = (stage.expansion_hidden_size for stage in model.config.stages())
        sizes, parents = [model.root.config.hidden_size + sum(below), top], [0]
    elif isinstance(model, JoinedForCausalLM):
        if any(branch.writes for branch in model.branches):
            return None
        added = [sizes.expansion_hidden_size for sizes in model.config.expansions()]
        sizes, parents = [model.root.config.hidden_size, *added], [branch.parent for branch in model.branches]
    else:
        return None
    return {
        "stream_sizes": sizes,
        "parents": parents,
        "prior": model.config.router_prior,
        "switch_rate": model.config.router_switch_rate,
    }
