"""What makes a plain export one that can be served routed: keys of its config.json, and two files of code beside them.

Who does not know them, or does not trust the code, loads the plain model.

The plain model's hidden row holds all streams side by side, and the columns of its vocabulary head hold one group for
each: [H | H'_1 | ...]. By groups the one product gives the logits of every head,

    z_0 = H x        z_k = z_parent(k) + H'_k u_k

which the posterior rule mixes (`model/routing.py`). Equal to rounding, not bit for bit; and not where an expansion
writes into x (W12), for the base's head reads the x that nobody has written into.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from scale_cli.model import routed_scale, routing
from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.model.serving_scale import WidenedModel
from scale_cli.model.vocabulary_scale import new_tokens_among
from scale_cli.storage.atomic import read_json
from scale_cli.upscale.method import MethodModel

KEY = "scale_router"
# The second is for `transformers serve`, which asks for a class of that kind first, and else takes the plain one.
_ASKED_FOR = ("AutoModelForCausalLM", "AutoModelForDecision")
_CODE = (Path(str(routed_scale.__file__)), Path(str(routing.__file__)))


def router_keys(model: MethodModel) -> dict[str, Any] | None:
    """Return what `scale_router` is in the config.json of a model's plain export; None where it cannot be routed.

    Returns:
        `stream_sizes`: channels of the hidden row by stream, the base head's first (of a stack, all that its base head
        reads); `parents`: of every other head, the head that its logits are added to; `prior` of the base head, the
        rest being shared evenly by the others; `switch_rate`; `new_tokens`, where the base has not all (`PieceShares`):
        of each the `first` of its pieces, those that are the scripts' `own`, and, where others than the base lack some
        too, which are `known` by every head.
    """
    if not isinstance(model, WidenedModel):
        return None
    lowest = model.routed_heads[0]
    routed = model.branches[lowest:]
    routes = model.config.routes and model.config.router_rule == "posterior"
    if not routes or any(branch.writes for branch in routed):
        return None
    added = [branch.expansion.lm_head.in_features for branch in model.branches]
    sizes = [model.root.config.hidden_size + sum(added[:lowest]), *added[lowest:]]
    parents = [branch.parent - lowest for branch in routed]
    if len(model.log_prior()) == 2:  # one head, over the streams of all, of an ensemble too
        sizes, parents = [sizes[0], sum(sizes[1:])], [0]
    return {
        "stream_sizes": sizes,
        "parents": parents,
        "prior": model.config.router_prior,
        "switch_rate": model.config.router_switch_rate,
        **_new_tokens(model, len(sizes)),
    }


def _new_tokens(model: WidenedModel, num_heads: int) -> dict[str, Any]:
    """Return what tells of tokens that not all heads have; nothing where all have them."""
    if isinstance(model, JoinedForCausalLM):
        config = model.config
        first, own, known = [pieces[0] for pieces in config.pieces()], config.own_pieces, config.known_by_heads()
        all_but_base_know_all = num_heads == 2 or known[1:] == [(0, len(first))] * (num_heads - 1)
        told = {"first": first, "own": own, **({} if all_but_base_know_all else {"known": known})}
        return {"new_tokens": told} if first else {}
    new = new_tokens_among(branch.expansion for branch in model.branches[model.routed_heads[0] :])
    return {} if new is None else {"new_tokens": {"first": new.shared.first, "own": new.shared.own}}


def add_router(folder: Path, architecture: str, router: dict[str, Any]) -> dict[str, Any]:
    """Write the routed class of a plain model beside it, and return what its config.json gains."""
    for source in _CODE:
        shutil.copyfile(source, folder / source.name)
    return {KEY: router, "auto_map": _auto_map(architecture)}


def _auto_map(architecture: str) -> dict[str, str]:
    return dict.fromkeys(_ASKED_FOR, f"{_CODE[0].stem}.{routed_name(architecture)}")


def routed_class(folder: Path) -> Any:
    """Return the class that serves a plain export routed; None where the folder is not one that can be."""
    config = read_json(folder / "config.json")
    (architecture,) = config.get("architectures") or [""]
    return getattr(routed_scale, routed_name(architecture), None) if KEY in config else None


def head_names(num_heads: int) -> list[str]:
    """Return what the heads of such an export are called: it knows no names."""
    return ["base", "trained"] if num_heads == 2 else ["base", *(f"head {head}" for head in range(1, num_heads))]


def routed_name(architecture: str) -> str:
    """Return what the routed class of a plain one is called, in transformers and in vLLM."""
    return f"ScaleRouted{architecture}"
