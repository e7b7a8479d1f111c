"""vLLM's own model classes with the router on top; `scale_cli.serving.register` registers them.

The trunk is vLLM's, untouched: its kernels, graphs, quantisation and tensor parallelism. What runs
both streams through it depends on the second one's kind (`STREAMS`); one last hidden row holds both.
The router's state lies in tables beside the KV cache (block_router.py).

A document begins with the prior of its prompt (prompts.py). So it costs at most -ln of the smaller
head's weight there over the better head: with `script_prior` p, ln(1/p).

Shapes: T tokens of a step, D channels, V vocabulary; 2: the heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.exaone4 import Exaone4ForCausalLM
from vllm.model_executor.models.gemma3 import Gemma3ForCausalLM
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.platforms import current_platform
from vllm.v1.worker.utils import select_common_block_size

from ..model.routing import base_shares
from .adapter_streams import AdapterStreams
from .block_router import BlockRouter, Step, attach_state, detach_state
from .copy_streams import CopyStreams
from .head_parts import Weights
from .prompts import Prompts
from .stream_heads import HeadProducts, Shard, SharedPieces, StreamHeads, scores_of, sizes_of
from .widened_streams import WidenedStreams

_PROFILED_ROWS = 512
# Compiled as vLLM compiles such functions: several passes over all logits become one.
_compiled = partial(torch.compile, dynamic=True, backend=current_platform.simple_compile_backend)


class Streams(Protocol):
    """Interface of what runs a base and the stream beside it."""

    sizes: Sequence[int]  # channels of each stream in a last row

    def run(self, trunk: Callable[..., Tensor], ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Return the last rows (T, D), by the model's own `trunk`."""

    def load(self, load: Callable[..., set[str]], weights: Weights) -> set[str]:
        """Load weights, the model's own by its `load`; return the names of its parameters."""

    def head_products(self) -> HeadProducts:
        """Return what makes both heads' logits of a last row."""


# By `kind` in `scale_router` of config.json, which an expansion's export does not name.
STREAMS: dict[str | None, Callable[[Any, VllmConfig], Streams]] = {
    None: WidenedStreams,
    "adapter": AdapterStreams,
    "copy": CopyStreams,
}


class VllmRoutedModel:
    """Common part of every family's routed class.

    A base class before vLLM's class of the family.
    """

    config: Any
    model: Any
    lm_head: Any
    logits_processor: Any

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        refuse_what_cannot_be_routed(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg] # of vLLM's class
        routing = self.config.scale_router
        self._streams = STREAMS[routing.get("kind")](self, vllm_config)
        self._vllm_config = vllm_config
        self._prompts = Prompts.of_engines[id(vllm_config)]
        self._attention = self.model.layers[0].self_attn.attn
        self._blocks_of_cache = 0
        self._block_size = 0
        self.router = BlockRouter()
        products = self._streams.head_products()
        self.head_parts = products.modules
        indices = self.lm_head.shard_indices
        shard = Shard(
            indices.org_vocab_start_index,
            indices.num_org_elements,
            gather=lambda tensor: tensor_model_parallel_all_gather(tensor[None].contiguous(), 0),
            sum=tensor_model_parallel_all_reduce,
        )
        shares = base_shares(routing)
        shared = None
        if shares is not None:
            device = self._prompts.prior_R.device
            shared = SharedPieces(shares, self.config.vocab_size, shard, device)
        self.heads = StreamHeads(
            products,
            self._streams.sizes,
            shard,
            shared,
            sizes_of=_compiled(sizes_of),
            scores_of=_compiled(scores_of),
        )

    def forward(self, input_ids: Tensor, positions: Tensor, **_: Any) -> Tensor:
        """Run both streams through vLLM's own trunk, then the router over its hidden rows."""
        hidden_TD = self._streams.run(super().forward, input_ids, positions)  # type: ignore[misc] # likewise
        step = self._step(input_ids, positions)
        if step is None:  # no documents: vLLM is measuring memory, or compiling
            self.heads.observe(hidden_TD[:_PROFILED_ROWS], input_ids[:_PROFILED_ROWS])
            nobody_T = torch.full_like(input_ids, self.router.scrap_row)
            return attach_state(hidden_TD, torch.zeros_like(positions), nobody_T)
        log_odds_T, rows_T = self.router.advance(hidden_TD, step, self.heads)
        return attach_state(hidden_TD, log_odds_T, rows_T)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return the scores of the mixture; None if another device gathers them."""
        hidden_TD, log_odds_T, rows_T = detach_state(hidden_states, sum(self._streams.sizes))
        scores_TV, sizes_T2 = self.heads.mix(hidden_TD, log_odds_T)
        # vLLM also asks for the logits of random rows, to measure memory.
        scrap_row = self.router.scrap_row
        is_known_T = (rows_T >= 0) & (rows_T < scrap_row)
        self.router.remember(torch.where(is_known_T, rows_T, scrap_row), sizes_T2)
        if self.lm_head.tp_size > 1:
            scores_TV = self.logits_processor._gather_logits(scores_TV)
        return None if scores_TV is None else scores_TV[..., : self.config.vocab_size]

    def load_weights(self, weights: Weights) -> set[str]:
        """Load the trunk's weights, and what the second stream has of its own."""
        return self._streams.load(super().load_weights, weights)  # type: ignore[misc] # likewise

    def _step(self, input_ids: Tensor, positions: Tensor) -> Step | None:
        context = get_forward_context()
        if not context.attn_metadata:
            return None
        attention = context.attn_metadata[self._attention.layer_name]
        slots_T = context.slot_mapping[self._attention.layer_name]
        padding = len(positions) - len(slots_T)
        return Step(
            ids_T=input_ids,
            positions_T=positions,
            slots_T=nn.functional.pad(slots_T, (0, padding), value=-1) if padding else slots_T,
            blocks_RB=attention.block_table,
            starts_R=attention.query_start_loc,
            longest=attention.max_query_len,
            block_size=self._beside_the_cache(),
            prior_R=self._prompts.prior_R,
            judged_RP=self._prompts.judged_RP,
        )

    def _beside_the_cache(self) -> int:
        """Return the block size that the attention uses, and allocate one router row per block of
        its cache.
        """
        num_blocks = self._vllm_config.cache_config.num_gpu_blocks
        # Before the first documents; vLLM may have tried a smaller cache first.
        if self._blocks_of_cache != num_blocks:
            spec = self._attention.get_kv_cache_spec(self._vllm_config)
            self._block_size = select_common_block_size(
                spec.block_size, [self._attention.get_attn_backend()], [spec]
            )
            self.router.allocate(
                num_blocks * (spec.block_size // self._block_size),
                sum(self._streams.sizes),
                self._vllm_config.model_config.dtype,
                self._prompts.prior_R.device,
            )
            self._blocks_of_cache = num_blocks
        return self._block_size


class ScaleRoutedLlamaForCausalLM(VllmRoutedModel, LlamaForCausalLM):
    """A routed Llama."""


class ScaleRoutedMistralForCausalLM(VllmRoutedModel, MistralForCausalLM):
    """A routed Mistral."""


class ScaleRoutedQwen2ForCausalLM(VllmRoutedModel, Qwen2ForCausalLM):
    """A routed Qwen2."""


class ScaleRoutedQwen3ForCausalLM(VllmRoutedModel, Qwen3ForCausalLM):
    """A routed Qwen3."""


class ScaleRoutedGemma3ForCausalLM(VllmRoutedModel, Gemma3ForCausalLM):
    """A routed Gemma 3."""


class ScaleRoutedExaone4ForCausalLM(VllmRoutedModel, Exaone4ForCausalLM):
    """A routed EXAONE 4."""


def refuse_what_cannot_be_routed(vllm_config: VllmConfig) -> None:
    """Raise ValueError for a folder without a router, and for settings under which routed answers
    would be wrong.
    """
    config = vllm_config.model_config.hf_config
    routing = getattr(config, "scale_router", None)
    if not routing:
        raise ValueError(
            f"{vllm_config.model_config.model}: config.json has no scale_router, so there is "
            "nothing to route between; serve it as the plain model, or export it anew with "
            "`scale export`"
        )
    if routing.get("kind") not in STREAMS:
        known = " and ".join(kind for kind in STREAMS if kind)
        raise ValueError(
            f"{vllm_config.model_config.model}: config.json: scale_router.kind is "
            f"{routing['kind']!r}; known are {known}"
        )
    parallel = vllm_config.parallel_config
    mode = vllm_config.compilation_config.cudagraph_mode
    refused = {
        "model runner V2 (set VLLM_USE_V2_MODEL_RUNNER=0)": vllm_config.use_v2_model_runner,
        "speculative decoding": vllm_config.speculative_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "dual batch overlap": parallel.enable_dbo,
        "LoRA adapters": vllm_config.lora_config is not None,
        "KV transfer": vllm_config.kv_transfer_config is not None,
        "prompt embeddings": vllm_config.model_config.enable_prompt_embeds,
        "cudagraph_mode FULL": mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL,
        "head_dtype": vllm_config.model_config.head_dtype != vllm_config.model_config.dtype,
    }
    for what, asked in refused.items():
        if asked:
            raise ValueError(
                f"{what}: a routed model cannot be served with it; "
                "remove it, or serve the plain model"
            )
