"""Tokenising in a process of its own: its memory does not grow with the corpus, and killed it
leaves no other.
"""

import gzip
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from tests.data.corpus_files import as_jsonl, as_txt

SCRIPT = """
import json, os, re, sys
from pathlib import Path

if __name__ == "__main__":  # workers import this file too
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from scale_cli.config.sources import ReadingConfig, TextSource
    from scale_cli.data import encoding, tokens

    paths, words, num_workers = json.loads(sys.argv[1]), sys.argv[3:], int(sys.argv[2])
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, words[0]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=words[0])
    if num_workers > 1:
        tokens._TOKENS_BETWEEN_RECORDS, encoding._CHUNK_BYTES = 1_000, 10_000
    for path in paths:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here, without that of the imports
        cache = tokens.TokenCache(Path(path).parent, tokenizer, ReadingConfig(num_workers=num_workers))
        tokens.tokenise(TextSource(name="source", path=path, language="en"), cache, Path(path + ".tokens"))
        print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1], flush=True)
"""
WORDS = [f"{number:02}" + "w" * 598 for number in range(100)]  # each a document, and a token


def command_of(folder: Path, paths: list[Path], num_workers: int) -> list[str]:
    (folder / "script.py").write_text(SCRIPT)
    return [
        sys.executable,
        str(folder / "script.py"),
        json.dumps(list(map(str, paths))),
        str(num_workers),
        *WORDS,
    ]


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def is_gone(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_killed_by_the_system_it_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("\n\n".join(WORDS * 3000))
    killed = subprocess.Popen(command_of(tmp_path, [tmp_path / "x.txt"], 2))
    wait_until((tmp_path / ".x.txt.tokens.progress.json").exists)
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(killed.pid)], capture_output=True, text=True, check=True
    )
    children = [Path("/proc", pid) for pid in listed.stdout.split()]
    assert len(children) >= 2
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    wait_until(lambda: all(is_gone(child) for child in children))
    assert not (tmp_path / "x.txt.tokens").exists()


def as_one_row_group(texts: list[str]) -> bytes:
    sink = io.BytesIO()
    plainly = {"use_dictionary": False, "compression": "none"}
    pa.parquet.write_table(pa.table({"text": texts}), sink, row_group_size=len(texts), **plainly)
    return sink.getvalue()


WRITERS: dict[str, Callable[[list[str]], bytes]] = {
    "txt.gz": lambda texts: gzip.compress(as_txt(texts), 1),
    "jsonl": as_jsonl,
    "parquet": as_one_row_group,
}


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """Not with its text, and not with its number of documents."""
    lengths = (10_000, 60_000)  # the first fills the allocators' own caches
    paths = [tmp_path / f"{length}.{form}" for form in WRITERS for length in lengths]
    for path in paths:
        length, _, form = path.name.partition(".")
        path.write_bytes(WRITERS[form](WORDS * (int(length) // len(WORDS))))
    done = subprocess.run(
        command_of(tmp_path, paths, 1), capture_output=True, text=True, check=True
    )
    peaks_kib = list(map(int, done.stdout.split()))
    for small_kib, large_kib in zip(peaks_kib[::2], peaks_kib[1::2], strict=True):
        assert (large_kib - small_kib) * 1024 < 600 * (
            lengths[1] - lengths[0]
        ) / 4  # allocators keep some
