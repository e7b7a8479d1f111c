"""The method that fits a base and a text, by what the base knows of the text."""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedTokenizerBase

from scale_cli import errors
from scale_cli.config.schema import MethodConfig, ModelConfig
from scale_cli.data.corpora import beginning_to_learn
from scale_cli.data.encoding import Document, DocumentMarkers, Encoder
from scale_cli.errors import BaseModelError
from scale_cli.methods.starts.knowledge import measure_knowledge
from scale_cli.planning.step import step_cost
from scale_cli.processes import computes_in_bfloat16, device, move_to_device
from scale_cli.starter.fitting import check_room
from scale_cli.starter.texts import Text
from scale_cli.upscale.base import load_base
from scale_cli.upscale.base_files import looks_local

_ADAPTER = "lora"
_EXPANSION = "route"


def choose_method(
    model: ModelConfig,
    base_config: Any,
    text: Text,
    tokenizer: PreTrainedTokenizerBase,
    mixed_precision: str,
) -> tuple[str, str]:
    """Return a method and why: an adapter where the base knows some of a text, else an expansion.

    Of a base on the hub whose weights are not to be had, the first is assumed.

    Raises:
        ConfigError: not even an adapter's training fits the memory; the base is not loaded then.
        BaseModelError: the weights in the base's folder cannot be loaded.
    """
    # Without PEFT there is no adapter to count.
    least = MethodConfig(variant=_ADAPTER if errors.is_installed("peft") else _EXPANSION)
    check_room(step_cost(base_config, least, mixed_precision), least, device().type)
    language = text.source["language"]
    dtype = "bfloat16" if computes_in_bfloat16() else "float32"
    try:
        base = move_to_device(load_base(model.model_copy(update={"dtype": dtype})))
    except BaseModelError as error:
        if looks_local(model.base):
            raise
        return (
            _ADAPTER,
            f"what the base knows was not measured ({error}); taken to know some of {language}, "
            f"so method.variant {_ADAPTER}; if it never saw it, --method {_EXPANSION}",
        )

    encoder = Encoder(tokenizer, conversations=False)
    encoded = encoder.encode([Document(text.sample, len(text.sample.encode()))])
    boundary = DocumentMarkers.of(tokenizer).context
    knowledge = measure_knowledge(
        base, beginning_to_learn(encoded.ids, boundary, base_config.vocab_size)
    )
    by_base, by_frequencies = (
        nats * text.tokens_per_byte / math.log(2)
        for nats in (knowledge.by_base, knowledge.by_frequencies)
    )
    knows = "knows some" if knowledge.is_some else "does not know it"
    variant = _ADAPTER if knowledge.is_some else _EXPANSION
    return (
        variant,
        f"the base reads {language} at {by_base:.2f} bits/byte, by the tokens' frequencies alone "
        f"{by_frequencies:.2f}: it {knows}, so method.variant {variant}",
    )
