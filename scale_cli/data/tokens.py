"""A corpus as token ids, tokenised once and then read from a memory map.

A folder of the cache is named after everything that decides its content (tokenizer, text, settings), so a change of any
of them makes another folder and nothing stale is ever read:

    tokens.bin      every document's ids, one after another: uint16, or uint32 for a large vocabulary
    offsets.npy     (documents + 1,) int64: where each document begins in tokens.bin
    num_bytes.npy   (documents,) int64: UTF-8 bytes of each document, for bits per byte
    ledger.json     what was read and what became of it
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from scale_cli.config.schema import TextSource
from scale_cli.data.documents import COMPRESSIONS, dataset_commit, read_documents, source_files
from scale_cli.errors import CorpusError, StorageError
from scale_cli.storage.atomic import MANIFEST, file_sha256, new_folder, read_json, write_json
from scale_cli.storage.tokenizer import tokenizer_sha256

_FORMAT_VERSION = 2
_DOCUMENTS_AT_ONCE = 512
_FILES = {"tokens.bin", "offsets.npy", "num_bytes.npy", "ledger.json"}

Ids = npt.NDArray[np.integer]


@dataclass(frozen=True)
class Boundaries:
    """The tokenizer's own marks around a document; None where it has none.

    Args:
        bos: stands before every document.
        eos: stands after every document.
    """

    bos: int | None
    eos: int | None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Boundaries:
        """Read them off a tokenizer."""
        return cls(tokenizer.bos_token_id, tokenizer.eos_token_id)

    @property
    def context(self) -> int | None:
        """What stands before a document's first token when it is scored: BOS, or else the EOS of the one before."""
        return self.eos if self.bos is None else self.bos

    def framed(self, ids: list[int]) -> list[int]:
        """Return a document's ids with its boundaries."""
        return [i for i in (self.bos,) if i is not None] + ids + [i for i in (self.eos,) if i is not None]


@dataclass(frozen=True)
class Ledger:
    """What became of everything that was read.

    Args:
        documents: read, empty ones included.
        empty_documents: dropped, since they hold no text.
        num_bytes: UTF-8 bytes of the documents kept.
        num_tokens: ids kept, boundaries included.
    """

    documents: int
    empty_documents: int
    num_bytes: int
    num_tokens: int


@dataclass(frozen=True)
class TokenisedCorpus:
    """A tokenised source, read from its memory map.

    Args:
        folder: where it lies.
        ids: (tokens,) all documents, framed by their boundaries.
        offsets: (documents + 1,).
        num_bytes: (documents,).
        ledger: what was read.
        boundaries: the tokenizer's marks.
    """

    folder: Path
    ids: Ids
    offsets: npt.NDArray[np.int64]
    num_bytes: npt.NDArray[np.int64]
    ledger: Ledger
    boundaries: Boundaries

    def __len__(self) -> int:
        return len(self.num_bytes)

    def document(self, index: int) -> Ids:
        """Return one document's ids, boundaries included."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]


def tokenised(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, cache_dir: Path, *, show_progress: bool
) -> TokenisedCorpus:
    """Open a source's tokenised form, making it first where the cache does not hold it.

    Raises:
        CorpusError: the source cannot be read, or holds no text.
    """
    folder = _cache_folder(source, tokenizer, cache_dir)
    if not _is_whole(folder):
        shutil.rmtree(folder, ignore_errors=True)  # by its name it is ours, and a damaged one
        _tokenise(source, tokenizer, folder, show_progress)
    return _opened(folder, tokenizer)


def already_tokenised(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, cache_dir: Path
) -> TokenisedCorpus | None:
    """Open a source's tokenised form where the cache holds it; None where it does not.

    Raises:
        CorpusError: the source cannot be read.
    """
    folder = _cache_folder(source, tokenizer, cache_dir)
    return _opened(folder, tokenizer) if _is_whole(folder) else None


def _cache_folder(source: TextSource, tokenizer: PreTrainedTokenizerBase, cache_dir: Path) -> Path:
    return cache_dir / f"{source.name}-{_content_key(source, tokenizer)[:16]}"


def _opened(folder: Path, tokenizer: PreTrainedTokenizerBase) -> TokenisedCorpus:
    offsets = np.load(folder / "offsets.npy")
    ids = np.memmap(folder / "tokens.bin", dtype=_id_dtype(tokenizer), mode="r")
    ledger = Ledger(**read_json(folder / "ledger.json"))
    num_bytes = np.load(folder / "num_bytes.npy")
    return TokenisedCorpus(folder, ids, offsets, num_bytes, ledger, Boundaries.of(tokenizer))


def _is_whole(folder: Path) -> bool:
    # Sizes only: hashing a corpus of hundreds of gigabytes at every start would cost more than it saves.
    try:
        sizes = {name: entry["bytes"] for name, entry in read_json(folder / MANIFEST)["files"].items()}
    except (StorageError, KeyError, TypeError, AttributeError):
        return False
    whole = all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items())
    return whole and sizes.keys() >= _FILES


def _content_key(source: TextSource, tokenizer: PreTrainedTokenizerBase) -> str:
    described = {
        "format": _FORMAT_VERSION,
        "content": _file_content(source) if source.dataset is None else _dataset_content(source),
        "text_field": source.text_field,
        "max_documents": source.max_documents,
        "tokenizer": tokenizer_sha256(tokenizer),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _file_content(source: TextSource) -> list[tuple[str, str]]:
    return [(_reader_suffixes(file), file_sha256(file)) for file in source_files(source)]


def _dataset_content(source: TextSource) -> list[object]:
    assert source.dataset is not None
    place = Path(source.dataset)
    if place.is_dir():
        files = sorted(file for file in place.rglob("*") if file.is_file())
        commit: object = [(str(file.relative_to(place)), file_sha256(file)) for file in files]
    else:
        commit = dataset_commit(source)
    return [source.dataset, source.subset, source.split, commit]


def _reader_suffixes(file: Path) -> str:
    return "".join(file.suffixes[-2:] if file.suffix in COMPRESSIONS else file.suffixes[-1:])


def _id_dtype(tokenizer: PreTrainedTokenizerBase) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if len(tokenizer) <= 2**16 else np.uint32


def _tokenise(source: TextSource, tokenizer: PreTrainedTokenizerBase, folder: Path, show_progress: bool) -> None:
    boundaries, dtype = Boundaries.of(tokenizer), _id_dtype(tokenizer)
    num_read = empty = 0
    lengths: list[int] = []
    num_bytes: list[int] = []
    documents = islice(read_documents(source), source.max_documents)
    progress = tqdm(documents, desc=f"tokenising {source.name}", unit=" docs", disable=not show_progress, leave=False)
    with new_folder(folder) as partial:
        with (partial / "tokens.bin").open("wb") as file:
            for texts in _groups(progress):
                kept = [text for text in texts if text.strip()]
                num_read, empty = num_read + len(texts), empty + len(texts) - len(kept)
                for text, ids in zip(kept, _encode(tokenizer, kept), strict=True):
                    framed = np.asarray(boundaries.framed(ids), dtype=dtype)
                    file.write(framed.tobytes())
                    lengths.append(len(framed))
                    num_bytes.append(len(text.encode()))
        if sum(lengths) < 2:
            raise CorpusError(f"{source.name}: no document with text in {source.path or source.dataset}")
        np.save(partial / "offsets.npy", np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
        np.save(partial / "num_bytes.npy", np.asarray(num_bytes, dtype=np.int64))
        write_json(partial / "ledger.json", asdict(Ledger(num_read, empty, sum(num_bytes), sum(lengths))))


def _groups(documents: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(documents)
    while group := list(islice(iterator, _DOCUMENTS_AT_ONCE)):
        yield group


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    if not texts:
        return []
    # Boundaries are added here, once, whatever the tokenizer's template would add, and a "</s>" in a text is text;
    # verbose would warn of long texts.
    encoded = tokenizer(
        texts, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
    )
    ids: list[list[int]] = encoded["input_ids"]
    return ids
