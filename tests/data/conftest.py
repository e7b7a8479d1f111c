from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase


@pytest.fixture(scope="module")
def tokenizer(request: pytest.FixtureRequest, shared_data: Path) -> PreTrainedTokenizerBase:
    """A checkpoint's tokenizer, which tests do not change."""
    checkpoint = getattr(request, "param", "ckpt-stories260K")
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(shared_data / checkpoint / "hf")
    return loaded
