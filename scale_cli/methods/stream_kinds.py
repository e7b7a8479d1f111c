"""What runs beside the base, by what a method trains: the rows of `STREAM_KINDS`.

Where vLLM runs both streams, `STREAMS` of serving/vllm_plugin.py has a class by the same name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scale_cli.model.heads import ModelPair

ROUTER = "scale_router"  # the key in the config.json of an export that says how it is routed


@dataclass(frozen=True)
class StreamKind:
    """How a trained model and its base are held and run together."""

    name: str  # as `scale_router.kind` in the config.json of an export
    holds_base: bool  # the trained model has the base in it, bit for bit
    num_models: int  # that a server holds
    passes: str  # of the layers for every token, in words; "": by the layers that run twice
    # What puts an export of what trained alone onto its base; "": there is no such export.
    adapter_library: str

    @property
    def shares_weights(self) -> bool:
        """Whether the trained model runs on the base's own weights, which then never train."""
        return self.num_models == 1

    def pair(self) -> type[ModelPair]:
        """Return the class that runs a base and what was trained from it side by side."""
        from scale_cli.model.heads import ModelPair

        return ModelPair


class _AdapterKind(StreamKind):
    def pair(self) -> type[ModelPair]:
        from scale_cli.model.adapter_pair import AdapterPair

        return AdapterPair


EXPANSION = StreamKind(
    name="expansion", holds_base=True, num_models=1, passes="", adapter_library="scale_cli"
)
ADAPTER = _AdapterKind(
    name="adapter",
    holds_base=False,
    num_models=1,
    passes="1, of twice the rows",
    adapter_library="peft",
)
COPY = StreamKind(name="copy", holds_base=False, num_models=2, passes="2", adapter_library="")
STREAM_KINDS = {kind.name: kind for kind in (EXPANSION, ADAPTER, COPY)}
