"""A corpus as token ids, tokenised once and then read from a memory map.

A folder of the cache is named after everything that decides its content (tokenizer, text, settings), so a change of any
of them makes another folder and nothing stale is ever read:

    tokens.bin      every document's ids, one after another: uint16, or uint32 for a large vocabulary
    offsets.bin     (documents + 1,) int64: where each document begins in tokens.bin
    num_bytes.bin   (documents,) int64: UTF-8 bytes of each document, for bits per byte
    hashes.bin      (documents,) uint64: of each document's text, to find it in other corpora
    learned.bin     (tokens,) bool: of conversations, which ids are learned
    ledger.json     what was read and what became of it (data/ledger.py)
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from scale_cli.config.sources import ReadingConfig, TextSource
from scale_cli.data.documents import described
from scale_cli.data.encoding import Ids, TokenizerSpec
from scale_cli.data.files import SourceFile, SourceHashes, source_files
from scale_cli.data.hub import dataset_commit
from scale_cli.data.ledger import Ledger, check_bad_fraction, check_unknown_fraction
from scale_cli.data.tokenise import HASHES, LEARNED, NUM_BYTES, OFFSETS, TOKENS, is_tokenised, tokenise
from scale_cli.errors import BaseModelError, CorpusError
from scale_cli.storage.atomic import file_sha256, json_sha256, writing

_FORMAT_VERSION, _EARLIER_VERSION = 4, 3
# What the saved configuration says of how the tokenizer was loaded, not of how it tokenises.
_HOW_LOADED = ("is_local", "local_files_only", "name_or_path", "transformers_version")


@dataclass(frozen=True)
class DocumentMarkers:
    """The tokenizer's own marks around a document; None where it has none."""

    # stands before every document; None too where it is the EOS, which then stands between two documents once
    bos: int | None
    eos: int | None  # stands after every document

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> DocumentMarkers:
        """Read them off a tokenizer."""
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        return cls(None if bos == eos else bos, eos)

    @property
    def context(self) -> int | None:
        """What stands before a document's first token when it is scored: BOS, or else the EOS of the one before."""
        return self.eos if self.bos is None else self.bos


@dataclass(frozen=True)
class TokenisedCorpus:
    """A tokenised source, read from its memory map."""

    folder: Path  # where it lies
    ids: Ids  # (tokens,) all documents, framed by their markers
    offsets: npt.NDArray[np.int64]  # (documents + 1,)
    num_bytes: npt.NDArray[np.int64]  # (documents,)
    hashes: npt.NDArray[np.uint64] | None  # (documents,) of the texts; None where an earlier version made the folder
    ledger: Ledger  # what was read
    markers: DocumentMarkers  # the tokenizer's marks
    learned: npt.NDArray[np.bool_] | None = None  # (tokens,) which are targets; None: all
    earlier_name: str | None = None  # of the folder in which an earlier version had the same ids, if it made them so

    def __len__(self) -> int:
        return len(self.num_bytes)

    def document(self, index: int) -> Ids:
        """Return one document's ids, markers included."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]


def tokenised(
    source: TextSource,
    tokenizer: PreTrainedTokenizerBase,
    cache_dir: Path,
    *,
    show_progress: bool,
    reading: ReadingConfig | None = None,
) -> TokenisedCorpus:
    """Open a source's tokenised form, making it first where the cache does not hold it."""
    reading = reading or ReadingConfig()
    hashes = SourceHashes(cache_dir)
    name, earlier_name = _folder_names(source, tokenizer, hashes, reading)
    folder = cache_dir / name
    if not is_tokenised(folder):
        template_of = None if source.messages_field is None else tokenizer
        spec = _tokenizer_spec(tokenizer, conversations=template_of is not None)
        tokenise(source, spec, folder, reading, show_progress=show_progress, template_of=template_of)
    hashes.remember()
    corpus = replace(_opened(folder, tokenizer), earlier_name=earlier_name)
    check_bad_fraction(described(source), corpus.ledger, reading.max_bad_fraction)
    check_unknown_fraction(described(source), corpus.ledger, reading.max_unknown_fraction)
    return corpus


def content_name(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, cache_dir: Path, reading: ReadingConfig
) -> str:
    """Return a name for a source's text and settings as a tokenizer reads them: another for other content."""
    hashes = SourceHashes(cache_dir)
    name, _ = _folder_names(source, tokenizer, hashes, reading)
    hashes.remember()
    return name


def already_tokenised(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, cache_dir: Path, reading: ReadingConfig
) -> TokenisedCorpus | None:
    """Open a source's tokenised form where the cache holds it, or None; CorpusError where the source cannot be read."""
    name, _ = _folder_names(source, tokenizer, SourceHashes(cache_dir), reading)
    return _opened(cache_dir / name, tokenizer) if is_tokenised(cache_dir / name) else None


def _opened(folder: Path, tokenizer: PreTrainedTokenizerBase) -> TokenisedCorpus:
    ledger = Ledger.load(folder)
    ids = np.memmap(folder / TOKENS, dtype=_id_dtype(tokenizer), mode="r")
    offsets = np.memmap(folder / OFFSETS, dtype=np.int64, mode="r")
    num_bytes = np.memmap(folder / NUM_BYTES, dtype=np.int64, mode="r")
    hashes = np.memmap(folder / HASHES, dtype=np.uint64, mode="r") if (folder / HASHES).is_file() else None
    learned = np.memmap(folder / LEARNED, dtype=np.bool_, mode="r") if (folder / LEARNED).is_file() else None
    return TokenisedCorpus(folder, ids, offsets, num_bytes, hashes, ledger, DocumentMarkers.of(tokenizer), learned)


def _folder_names(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, hashes: SourceHashes, reading: ReadingConfig
) -> tuple[str, str | None]:
    """Return the name of a source's folder, and that of the same ids by an earlier version; None: it had others."""
    # A new key of a source that decides its text has to be here, or a stale cache is read; and only where it is not the
    # default, or every cache that there is would be made again.
    settings = {
        "content": _content(source, hashes),
        "text_field": source.text_field,
        "documents": source.documents,
        # Earlier versions counted what was read, kept or not.
        "max_documents": source.max_documents and {"kept": source.max_documents},
        **({"skip_documents": source.skip_documents} if source.skip_documents else {}),
        **({"messages_field": source.messages_field} if source.messages_field else {}),
        "max_document_bytes": reading.max_document_bytes,
        "tokenizer": tokenizer_sha256(tokenizer),
    }
    name, earlier_name = (
        f"{source.name}-{json_sha256(version | settings)[:16]}"
        for version in ({"format": _FORMAT_VERSION}, {"format": _EARLIER_VERSION})
    )
    framed_otherwise = tokenizer.bos_token_id is not None and tokenizer.bos_token_id == tokenizer.eos_token_id
    return name, None if framed_otherwise else earlier_name


def _content(source: TextSource, hashes: SourceHashes) -> list[object]:
    def content(file: SourceFile) -> str:
        try:
            return file.content(hashes)
        except OSError as error:
            raise CorpusError(f"{source.name}: {file} cannot be read ({error.strerror or error})") from None

    if source.dataset is None:
        return [(file.format + file.compression, content(file)) for file in source_files(source)]
    place = Path(source.dataset)
    if not place.is_dir():
        return [source.dataset, source.subset, source.split, dataset_commit(source)]
    files = sorted(file for file in place.rglob("*") if file.is_file())
    contents = [(str(file.relative_to(place)), content(SourceFile(str(file)))) for file in files]
    return [source.dataset, source.subset, source.split, contents]


def _id_dtype(tokenizer: PreTrainedTokenizerBase) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if len(tokenizer) <= 2**16 else np.uint32


def _tokenizer_spec(tokenizer: PreTrainedTokenizerBase, *, conversations: bool) -> TokenizerSpec:
    if not tokenizer.is_fast:
        raise BaseModelError(f"{tokenizer.name_or_path}: its tokenizer has no tokenizer.json form (a fast tokenizer)")
    markers = DocumentMarkers.of(tokenizer)
    tokenizer_json = tokenizer.backend_tokenizer.to_str()
    return TokenizerSpec(
        tokenizer_json=tokenizer_json,
        before=() if markers.bos is None or conversations else (markers.bos,),  # which a template writes itself
        after=() if markers.eos is None else (markers.eos,),
        dtype=_id_dtype(tokenizer).__name__,
        unknown=_unknown_id(tokenizer, tokenizer_json),
        conversations=conversations,
    )


def _unknown_id(tokenizer: PreTrainedTokenizerBase, tokenizer_json: str) -> int | None:
    """Return the id by which the tokenizer itself replaces what it does not know; not what transformers calls so."""
    model = json.loads(tokenizer_json)["model"]
    if model.get("unk_token") is None:
        unknown: int | None = model.get("unk_id")  # of a Unigram model
        return unknown
    found: int | None = tokenizer.backend_tokenizer.token_to_id(model["unk_token"])
    return found


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return one hash over the files that a tokenizer saves."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        with writing(Path(folder)):
            tokenizer.save_pretrained(folder)
        files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
        lines = "".join(f"{file.name} {_tokenizer_content(file)}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def _tokenizer_content(file: Path) -> str:
    if file.name != "tokenizer_config.json":
        return file_sha256(file)
    settings = json.loads(file.read_text(encoding="utf-8"))
    return json.dumps({key: value for key, value in settings.items() if key not in _HOW_LOADED}, sort_keys=True)
