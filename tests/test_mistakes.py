"""Mistakes that come naturally on a first day: each is one line that says what to do.

Nothing is written then, but tokens.
"""

from pathlib import Path

import pytest

from tests.command_line import Scale
from tests.small_runs import held_out, write_config


@pytest.fixture
def config(tmp_path: Path, stories: Path) -> Path:
    """A config that runs, beside its text."""
    kept = held_out("held-out", tmp_path / "news.txt", "acquisition")
    return write_config(tmp_path, stories, evaluation={"perplexity": [kept]})


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.learning_rate=1e-3", "train.learning_rate: unknown key (did you mean lr?)"),
        ("train.seed=1", "train.seed: unknown key (did you mean seed, at the top?)"),
        (
            "train.max_length=512",
            "train.max_length: unknown key (did you mean corpus.sequence_length?)",
        ),
        ("lr=1e-3", "lr: unknown key (did you mean train.lr?)"),
        ("train.device=cuda:1", "train.device: unknown key (no key is needed: a GPU is used"),
        ("method=lora", "(did you mean method.variant?)"),
        ("output_dir=/proc/mine", "output_dir /proc/mine: /proc cannot be written to"),
        ("corpus.sources.0.path=nowhere/*.txt", "news: no file matches nowhere/*.txt"),
        (
            "corpus.sources.0.path=cp949.txt",
            "cp949.txt:3 (text is read as UTF-8",
        ),
        ("corpus.sources.0.path=utf16.txt", "iconv"),
        (
            "corpus.sources.0.path=other.jsonl",
            "(it has title, body; set text_field or messages_field",
        ),
        ("corpus.sources.0.skip_documents=9", "skip_documents skips all 2"),
    ],
)
def test_a_natural_mistake_is_one_line_that_says_what_to_do(
    config: Path, scale: Scale, monkeypatch: pytest.MonkeyPatch, override: str, told: str
) -> None:
    monkeypatch.chdir(config.parent)
    korean = "안녕하세요 여러분.\n\n다시 만나요 우리.\n"
    Path("cp949.txt").write_text(korean, encoding="cp949")
    Path("utf16.txt").write_text(korean, encoding="utf-16")
    Path("other.jsonl").write_text('{"title": "x", "body": "y"}\n')
    assert told in scale("run", config, override).error()
    assert not (config.parent / "run/upscaled").exists()
