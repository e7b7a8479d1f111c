"""What a base knows of a text decides the method."""

import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from scale_cli.config.schema import ModelConfig
from scale_cli.data import corpora
from scale_cli.data.encoding import DocumentMarkers, Encoder
from scale_cli.starter.method_choice import choose_method
from scale_cli.starter.texts import look_into
from scale_cli.upscale.base_tokenizer import load_tokenizer


@torch.no_grad()
@pytest.mark.parametrize("base", ["ckpt-stories260K", "ckpt-eltec"])
def test_a_base_is_tried_on_the_text_behind_what_stands_before_every_document(
    base: str, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpora, "_TOKENS_SAMPLED", 5)  # so few that the first one counts
    folder = str(shared_data / base / "hf")
    tokenizer = load_tokenizer(ModelConfig(base=folder))
    source = {
        "name": "novels",
        "path": str(shared_data / "en-eltec/valid.txt.xz"),
        "language": "en",
    }
    text = look_into(source, Encoder(tokenizer, conversations=False), "--corpus")
    _, why = choose_method(
        ModelConfig(base=folder), AutoConfig.from_pretrained(folder), text, tokenizer, "no"
    )
    ((told, by_frequencies),) = re.findall(r"reads en at (\S+) bits/byte, .* alone ([\d.]+):", why)

    boundary = DocumentMarkers.of(tokenizer).context
    ids = [boundary, *tokenizer(text.sample, add_special_tokens=False, verbose=False).input_ids]
    has_bos = tokenizer.bos_token_id is not None
    ids_BT = torch.tensor([ids[: 5 if has_bos else 6]])  # else it is put before the five
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    nats = model(ids_BT, labels=ids_BT).loss.item()
    assert float(told) == pytest.approx(nats / math.log(2) * text.tokens_per_byte, abs=0.02)

    counts = Counter(ids[1:]).values()
    shares = [count / sum(counts) for count in counts]
    bits = -sum(share * math.log2(share) for share in shares)
    assert float(by_frequencies) == pytest.approx(bits * text.tokens_per_byte, abs=0.02)
