"""The proof that a model decodes with its cache as it scores without one: what is served is what
was measured.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from scale_cli.errors import ExportParityError, one_line
from scale_cli.export.parity import check_close

_NUM_PROMPTS = 2
_NUM_STEPS = 4  # decoded for each prompt; the first already shows a lost cache
# Of the largest logit. Cached products have other shapes, which in 16 bits round otherwise: the
# plain SmolLM2-135M differs by 0.025 in bfloat16 and by 3e-6 in float32. A lost cache is 0.35 at
# least, on a model of 5 M parameters; on SmolLM2 it is 0.63.
_ALLOWED = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}


def _next_of(ids: list[int], _row: int, so_far_T: Tensor) -> list[int]:
    return [ids[len(so_far_T)]]


@torch.no_grad()
def check_cached_decoding(model: Any, prompts: list[Tensor]) -> None:
    """Raise ExportParityError unless `generate` computes with the cache what one pass computes
    without.

    The last tokens of each of the first (1, T) prompts are decoded one by one, by transformers' own
    loop.
    """
    settings = GenerationConfig(
        max_new_tokens=_NUM_STEPS,
        do_sample=False,
        pad_token_id=0,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    for ids_1T in [ids for ids in prompts if ids.shape[1] > _NUM_STEPS][:_NUM_PROMPTS]:
        num_read = ids_1T.shape[1] - _NUM_STEPS
        of_whole_1TV = model(input_ids=ids_1T, use_cache=False).logits[:, num_read - 1 : -1]
        try:
            decoded = model.generate(
                ids_1T[:, :num_read],
                attention_mask=torch.ones_like(ids_1T[:, :num_read]),
                generation_config=settings,
                prefix_allowed_tokens_fn=partial(_next_of, ids_1T[0].tolist()),
            ).logits
        except ValueError as error:  # `require_state`
            raise ExportParityError(f"cached decoding fails: {one_line(error)}") from None

        decoded_1TV = torch.stack(decoded, dim=1)
        check_close(
            decoded_1TV,
            of_whole_1TV[:, : decoded_1TV.shape[1]],
            _ALLOWED[model.dtype],
            "cached decoding does not compute what one pass without a cache computes",
        )
