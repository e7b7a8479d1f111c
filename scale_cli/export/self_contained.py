"""A widened model as a folder that holds its base, its blocks and its own code, and needs nothing of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from scale_cli.export.plain_folder import frame_prompts
from scale_cli.model.serving_scale import WidenedModel


def write_self_contained(model: WidenedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write weights, configuration, code and tokenizer; it loads with trust_remote_code=True, and here without."""
    # Not the base's own files: which class reads those may hang on the family, which this configuration does not name.
    tokenizer.save_pretrained(folder)
    frame_prompts(folder, tokenizer)
    # Registered here and not where the classes are defined: only this folder carries its own code.
    classes: tuple[Any, Any] = (type(model).config_class, type(model))
    classes[0].register_for_auto_class()
    classes[1].register_for_auto_class("AutoModelForCausalLM")
    try:
        model.save_pretrained(str(folder))
    finally:
        for registered in classes:
            registered._auto_class = None
