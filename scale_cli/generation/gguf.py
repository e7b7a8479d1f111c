"""A plain export whose layers llama.cpp computes, in any format of its own; the heads and the router stay here.

llama.cpp gives the hidden row of every token, which holds all streams side by side; what `model/routed_scale.py` does
with such a row does not depend on who computed it. The vocabulary head is the export's, not the file's.

Shapes: T positions, D channels.
"""

from __future__ import annotations

import atexit
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig
from transformers.modeling_outputs import BaseModelOutputWithPast

from scale_cli.errors import ConfigError, MissingExtraError, RunFolderError
from scale_cli.export.router_keys import routed_class
from scale_cli.extras import is_installed

_HEAD = "lm_head.weight"
_MOST_POSITIONS = 8192  # room is made for all of them at once
_AT_ONCE = 512


class LlamaCppDecoder(nn.Module):
    """What a model's decoder is to its head, of one text at a time: a GGUF of the plain export that a config is of."""

    def __init__(self, file: Path, config: Any) -> None:
        super().__init__()
        if not is_installed("llama_cpp"):
            raise MissingExtraError("--gguf: needs llama-cpp-python: pip install 'scale-cli[runtimes]'")
        import llama_cpp

        self._lib = llama_cpp
        self._num_positions = min(config.max_position_embeddings, _MOST_POSITIONS)
        sizes = {"n_ctx": self._num_positions, "n_batch": _AT_ONCE, "embedding": True}
        try:
            self._llama = llama_cpp.Llama(str(file), verbose=False, **sizes)
        except (ValueError, AssertionError) as error:
            raise ConfigError(f"--gguf {file}: llama.cpp does not open it: {error}") from None
        atexit.register(self._llama.close)  # at the very end its library is gone
        found, wanted = (self._llama.n_embd(), self._llama.n_vocab()), (config.hidden_size, config.vocab_size)
        if found != wanted:
            raise ConfigError(
                f"--gguf {file}: has {found[0]:,} channels and {found[1]:,} tokens, the export {wanted[0]:,} and "
                f"{wanted[1]:,}: it is of another model"
            )
        self._batch = llama_cpp.llama_batch_init(_AT_ONCE, 0, 1)

    def forward(self, input_ids: Tensor, past_key_values: Any = None, **_: Any) -> BaseModelOutputWithPast:
        """Return the last hidden rows (1, T, D) of `input_ids` (1, T), after what a cache says was read before them."""
        if len(input_ids) != 1:
            raise ConfigError("--gguf: continues one text at a time: leave num_beams out")
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        ids = input_ids[0].tolist()
        if past + len(ids) > self._num_positions:
            raise ConfigError(f"--gguf: prompt and answer are longer than {self._num_positions:,} tokens")
        self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(self._llama.ctx), 0, past, -1)
        rows = [self._rows(ids[at : at + _AT_ONCE], past + at) for at in range(0, len(ids), _AT_ONCE)]
        if past_key_values is not None:  # llama.cpp has its own: this one counts
            counted = torch.zeros(1, 1, len(ids), 1)
            past_key_values.update(counted, counted, 0)
        return BaseModelOutputWithPast(last_hidden_state=torch.cat(rows)[None], past_key_values=past_key_values)

    def _rows(self, ids: list[int], first: int) -> Tensor:
        batch = self._batch
        batch.n_tokens = len(ids)
        for index, token in enumerate(ids):
            batch.token[index], batch.pos[index], batch.logits[index] = token, first + index, True
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
        if code := self._lib.llama_decode(self._llama.ctx, batch):
            raise ConfigError(f"--gguf: llama.cpp cannot compute these tokens (llama_decode: {code})")
        size = (self._llama.n_embd(),)
        rows = (self._lib.llama_get_embeddings_ith(self._llama.ctx, index) for index in range(len(ids)))
        return torch.from_numpy(np.stack([np.ctypeslib.as_array(row, size) for row in rows]))


def routed_by_llama_cpp(folder: Path, file: Path) -> Any:
    """Return a plain export with its router, its layers computed from a GGUF that was converted from it."""
    routed = routed_class(folder)
    if routed is None:
        raise RunFolderError(f"{folder}: has no router; llama.cpp itself continues what it converts to")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        model = routed(config)
    model.model = LlamaCppDecoder(file, config)
    model.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, device="meta")
    model.lm_head.weight = nn.Parameter(_head(folder).float(), requires_grad=False)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _head(folder: Path) -> Tensor:
    index = folder / "model.safetensors.index.json"
    name = json.loads(index.read_text())["weight_map"][_HEAD] if index.is_file() else "model.safetensors"
    with safe_open(folder / name, framework="pt") as tensors:
        weight: Tensor = tensors.get_tensor(_HEAD)
    return weight
