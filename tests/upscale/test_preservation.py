"""The texts that a base's logits are compared on."""

from pathlib import Path

import pytest

from scale_cli.config.schema import ModelConfig
from scale_cli.data.encoding import DocumentMarkers
from scale_cli.upscale import preservation
from scale_cli.upscale.base_tokenizer import load_tokenizer


@pytest.mark.parametrize("base", ["ckpt-stories260K", "ckpt-eltec"])
def test_every_text_begins_as_the_base_expects(base: str, shared_data: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig(base=str(shared_data / base / "hf")))
    boundary = DocumentMarkers.of(tokenizer).context
    prompts = preservation.sample_ids(tokenizer)
    assert boundary is not None
    for text, ids in zip(preservation.SAMPLE_TEXTS, prompts, strict=True):
        assert ids[0].tolist() == [boundary, *tokenizer(text, add_special_tokens=False).input_ids]
