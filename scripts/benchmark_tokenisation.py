"""Measure the speed of `scale prepare` against `tokenizers` alone and `datasets.map(batched=True)`.

    python scripts/benchmark_tokenisation.py TOKENIZER FILE... [--num-workers 2] [--rounds 5]

All three use the same tokenizer and documents: in memory (tokenizers), as Arrow (datasets) and as .jsonl (scale). They
run in turns, so that other work on the machine affects all alike. Only `encode_batch_fast` is timed for tokenizers, in
one process, and only `map` for datasets. For scale everything is timed, from opening its file to the finished folder:
reading, decoding, ledger, hashing and syncing. Processor seconds are summed over all processes. Prints a JSON line per
round, and the ratios of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DOCUMENTS_AT_ONCE = 64

# Slow imports are inside functions, since the workers import this file too.


@dataclass(frozen=True)
class Timed:
    """The time that one run took."""

    elapsed_s: float
    processor_s: float


def timed(work: Callable[[], Any]) -> tuple[Timed, Any]:
    """Run a function, and return its time and its result."""
    started_s, processor_s = time.perf_counter(), _processor_s()
    result = work()
    return Timed(time.perf_counter() - started_s, _processor_s() - processor_s), result


def _processor_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def write_corpus(files: list[str], folder: Path) -> Any:
    """Write the documents of corpus files as corpus.jsonl, and return them as a dataset on disk."""
    import datasets

    from scale_cli.config.sources import ReadingConfig, TextSource
    from scale_cli.data.documents import CorpusReader
    from scale_cli.data.encoding import Document

    texts: list[str] = []
    for index, name in enumerate(files):
        source = TextSource(name=f"source-{index}", path=name, language="en")
        reader = CorpusReader(source, ReadingConfig().max_document_bytes)
        texts += [record.text for record in reader if isinstance(record, Document)]
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(folder / "arrow")
    return datasets.load_from_disk(folder / "arrow")


def encode_alone(texts: list[str], tokenizer: Any) -> int:
    """Tokenise with tokenizers, and return the number of tokens."""
    encode, num_tokens = tokenizer.backend_tokenizer.encode_batch_fast, 0
    for start in range(0, len(texts), _DOCUMENTS_AT_ONCE):
        batch = encode(texts[start : start + _DOCUMENTS_AT_ONCE], add_special_tokens=False)
        num_tokens += sum(len(encoding.ids) for encoding in batch)
    return num_tokens


def map_dataset(dataset: Any, tokenizer: Any, num_workers: int) -> Any:
    """Tokenise with datasets."""

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        encoded = tokenizer(
            batch["text"], add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        return {"input_ids": encoded["input_ids"]}

    options = {"batched": True, "remove_columns": ["text"], "load_from_cache_file": False}
    return dataset.map(encode, num_proc=num_workers, **options)


def prepare(folder: Path, tokenizer: Any, num_workers: int) -> int:
    """Tokenise with scale into an empty cache; return the number of tokens without markers."""
    from scale_cli.config.sources import ReadingConfig, TextSource
    from scale_cli.data.tokens import TokenCache

    source = TextSource(name="corpus", path=str(folder / "corpus.jsonl"), language="en")
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        reading = ReadingConfig(num_workers=num_workers)
        corpus = TokenCache(Path(cache), tokenizer, reading).open(source)
        markers = sum(marker is not None for marker in (corpus.markers.bos, corpus.markers.eos))
        return corpus.ledger.num_tokens - markers * len(corpus)


def main() -> None:
    """Run the rounds."""
    import datasets
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokenizer")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    datasets.disable_progress_bars()
    os.environ["TOKENIZERS_PARALLELISM"] = (
        "false"  # parallelism comes from processes only, for datasets as for scale
    )
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    rounds = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        dataset = write_corpus(arguments.files, folder)
        texts = dataset["text"][:]
        num_bytes = sum(len(text.encode()) for text in texts)
        for _ in range(arguments.rounds):
            alone, num_alone = timed(lambda: encode_alone(texts, tokenizer))
            theirs, mapped = timed(lambda: map_dataset(dataset, tokenizer, arguments.num_workers))
            ours, num_tokens = timed(lambda: prepare(folder, tokenizer, arguments.num_workers))
            num_mapped = sum(len(ids) for batch in mapped.iter(1000) for ids in batch["input_ids"])
            assert num_alone == num_mapped == num_tokens
            rounds.append({"tokenizers": alone, "datasets": theirs, "scale": ours})
            times = {name: vars(run) for name, run in rounds[-1].items()}
            print(
                json.dumps({**times, "num_tokens": num_tokens, "num_bytes": num_bytes}), flush=True
            )
    for what in ("elapsed_s", "processor_s"):
        medians = {
            name: statistics.median(getattr(run[name], what) for run in rounds)
            for name in rounds[0]
        }
        for name, median_s in medians.items():
            ratio = median_s / medians["scale"]
            print(
                f"{what}: {name} {median_s:.2f}, {num_bytes / 1e6 / median_s:.2f} MB/s; scale is {ratio:.2f} times that"
            )


if __name__ == "__main__":
    main()
