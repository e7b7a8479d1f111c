"""A corpus as token ids, tokenised once and then read from a memory map.

A folder of the cache is named after everything that decides its content (tokenizer, text, settings), so a change of any
of them makes another folder and nothing stale is ever read:

    tokens.bin      every document's ids, one after another: uint16, or uint32 for a large vocabulary
    offsets.bin     (documents + 1,) int64: where each document begins in tokens.bin
    num_bytes.bin   (documents,) int64: UTF-8 bytes of each document, for bits per byte
    hashes.bin      (documents,) uint64: of each document's text, to find it in other corpora
    learned.bin     (tokens,) bool: of conversations, which ids are learned
    ledger.json     what was read and what became of it (data/ledger.py)

Many machines tokenise parts of a source's files, each to such a folder in `parts/`; who opens the source joins them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from scale_cli.config.sources import ReadingConfig, TextSource
from scale_cli.data.documents import CorpusReader
from scale_cli.data.encoding import Document, Encoder, Ids, TokenizerSpec
from scale_cli.data.files import SourceFile, content_hashes, dataset_builder, file_parts, source_files
from scale_cli.data.ledger import Ledger, check_bad_fraction, check_unknown_fraction
from scale_cli.data.tokenise import HASHES, LEARNED, NUM_BYTES, OFFSETS, TOKENS, is_tokenised, join_parts, tokenise
from scale_cli.errors import BaseModelError
from scale_cli.processes import ALONE, Share
from scale_cli.storage.atomic import file_sha256, json_sha256, sole_user, writing

PARTS = "parts"  # in a cache: sources that many machines tokenise, part by part
_FORMAT_VERSION = 5
_SAMPLE_RECORDS, _SAMPLE_CHARACTERS, _PLAINLY_LOST = 1 << 10, 1 << 17, 0.1
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
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        return cls(None if bos == eos else bos, eos)

    @property
    def context(self) -> int | None:
        """What stands before a document's first token when it is scored: BOS, or else the EOS of the one before."""
        return self.eos if self.bos is None else self.bos


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return a prompt's ids: the text, after what stands before a document in training."""
    boundary = DocumentMarkers.of(tokenizer).context
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids if boundary is None else [boundary, *ids]


@dataclass(frozen=True)
class TokenisedCorpus:
    """A tokenised source, read from its memory map."""

    folder: Path  # where it lies
    ids: Ids  # (tokens,) all documents, framed by their markers
    offsets: npt.NDArray[np.int64]  # (documents + 1,)
    num_bytes: npt.NDArray[np.int64]  # (documents,)
    hashes: npt.NDArray[np.uint64]  # (documents,) of the texts
    ledger: Ledger  # what was read
    markers: DocumentMarkers  # the tokenizer's marks
    learned: npt.NDArray[np.bool_] | None = None  # (tokens,) which are targets; None: all

    def __len__(self) -> int:
        return len(self.num_bytes)

    def document(self, index: int) -> Ids:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]


@dataclass(frozen=True)
class TokenCache:
    """A folder of tokenised sources, as one tokenizer and some settings of reading make them."""

    folder: Path
    tokenizer: PreTrainedTokenizerBase
    reading: ReadingConfig = field(default_factory=ReadingConfig)
    show_progress: bool = False

    def open(self, source: TextSource) -> TokenisedCorpus:
        """Open a source's tokenised form, making it first where the cache does not hold it."""
        folder, tokenizer = self.folder / self.name_of(source), self.tokenizer
        if not is_tokenised(folder):
            files = file_parts(source) if (self.folder / PARTS).is_dir() else []
            parts = [self._part_folder(source, part) for part in files]
            if any(map(is_tokenised, parts)):
                with sole_user(self.folder / PARTS):  # or another process makes anew what this one has joined
                    if not is_tokenised(folder):
                        self.tokenise_parts(source)  # what is missing
                        join_parts(source, _tokenizer_spec(source, tokenizer), parts, folder)
                    for part in parts:
                        shutil.rmtree(part, ignore_errors=True)
            else:
                self._tokenise(source, folder)
        corpus = _opened(folder, tokenizer)
        check_bad_fraction(source, corpus.ledger, self.reading.max_bad_fraction)
        check_unknown_fraction(source, corpus.ledger.round_trip, self.reading.max_unknown_fraction)
        return corpus

    def open_if_there(self, source: TextSource) -> TokenisedCorpus | None:
        """Open a source's tokenised form where the cache holds it; CorpusError where the source cannot be read."""
        if not any(self.folder.glob(f"{source.name}-*")):
            return None  # and no file has to be hashed
        folder = self.folder / self.name_of(source)
        return _opened(folder, self.tokenizer) if is_tokenised(folder) else None

    def tokenise_parts(self, source: TextSource, share: Share = ALONE) -> Ledger:
        """Tokenise a share of the parts of a source's files, for `open` to join; return the account of that share.

        Of the files only those of the share are read, to be hashed too.
        """
        account = Ledger()
        for part in file_parts(source)[share.index :: share.num_processes]:
            folder = self._part_folder(source, part)
            if not is_tokenised(folder):
                self._tokenise(source, folder, part)
            account.take(Ledger.load(folder))
        return account

    def _tokenise(self, source: TextSource, folder: Path, part: Sequence[SourceFile] | None = None) -> None:
        tokenise(
            source,
            _tokenizer_spec(source, self.tokenizer),
            folder,
            self.reading,
            show_progress=self.show_progress,
            template_of=self.tokenizer if source.messages_field else None,
            part=part,
        )

    def name_of(self, source: TextSource) -> str:
        """Return a name for a source's text and settings as the tokenizer reads them: another for other content."""
        settings = {"content": _content(source, self.folder), **self._settings(source)}
        return f"{source.name}-{json_sha256(settings)[:16]}"

    def _part_folder(self, source: TextSource, part: Sequence[SourceFile]) -> Path:
        """Return where a part of a source's files is tokenised; by their names too, which its ledger has."""
        files = [file.name for file in part]
        settings = {"files": files, "content": content_hashes(part, self.folder), **self._settings(source)}
        return self.folder / PARTS / f"{source.name}-{json_sha256(settings)[:16]}"

    def _settings(self, source: TextSource) -> dict[str, object]:
        # A new key of a source that decides its text has to be here, or a stale cache is read; and only where it is not
        # the default, or every cache that there is would be made again.
        return {
            "format": _FORMAT_VERSION,
            "text_field": source.text_field,
            "documents": source.documents,
            "max_documents": source.max_documents,
            **({"skip_documents": source.skip_documents} if source.skip_documents else {}),
            **({"messages_field": source.messages_field} if source.messages_field else {}),
            "max_document_bytes": self.reading.max_document_bytes,
            "tokenizer": tokenizer_sha256(self.tokenizer),
        }


def check_sample(source: TextSource, tokenizer: PreTrainedTokenizerBase, reading: ReadingConfig) -> None:
    """Hold a tokenizer to giving back the first text of every path of a source; what lies elsewhere is not fetched."""
    elsewhere = source.dataset is not None and not Path(source.dataset).is_dir()
    if elsewhere or any("://" in path for path in source.paths):
        return
    template_of = None if source.messages_field is None else tokenizer
    encoder = Encoder(_tokenizer_spec(source, tokenizer))
    ledger, is_whole = Ledger(), True
    parts = [source.model_copy(update={"path": path}) for path in source.paths] or [source]
    for part in parts:
        reader = CorpusReader(part, reading.max_document_bytes, template_of, ledger)
        room, sample = _SAMPLE_CHARACTERS, []
        for record in islice(reader, _SAMPLE_RECORDS):
            if isinstance(record, Document):
                text = record.text[:room]
                sample.append(Document(text, len(text.encode())))
                room -= len(text)
            if not room:
                break
        is_whole = is_whole and room > 0 and ledger.read.documents < _SAMPLE_RECORDS
        ledger.round_trip += encoder.encode(sample).round_trip
    all_skipped = ledger.num_skipped > 0 and len(parts) == 1
    if not ledger.kept.documents and (all_skipped or ledger.bad_fraction > reading.max_bad_fraction):
        check_bad_fraction(source, ledger, reading.max_bad_fraction)
    # Of a part of the text the share is not known to a hundredth, but a script that is lost is seen in it.
    least = 0.0 if is_whole else _PLAINLY_LOST
    check_unknown_fraction(source, ledger.round_trip, max(least, reading.max_unknown_fraction))


def _content(source: TextSource, cache_dir: Path) -> list[object]:
    """Return what decides a source's records, with a hash for every file."""
    if source.dataset is None:
        files = source_files(source)
        kinds = [file.format + file.compression for file in files]
        return list(zip(kinds, content_hashes(files, cache_dir), strict=True))
    place = Path(source.dataset)
    if not place.is_dir():
        return [source.dataset, source.subset, source.split, dataset_builder(source).hash]
    files = [SourceFile(str(file), 0) for file in sorted(place.rglob("*")) if file.is_file()]
    names = [str(Path(file.name).relative_to(place)) for file in files]
    contents = list(zip(names, content_hashes(files, cache_dir), strict=True))
    return [source.dataset, source.subset, source.split, contents]


def _opened(folder: Path, tokenizer: PreTrainedTokenizerBase) -> TokenisedCorpus:
    ledger = Ledger.load(folder)
    ids = np.memmap(folder / TOKENS, dtype=_id_dtype(tokenizer), mode="r")
    offsets = np.memmap(folder / OFFSETS, dtype=np.int64, mode="r")
    num_bytes = np.memmap(folder / NUM_BYTES, dtype=np.int64, mode="r")
    hashes = np.memmap(folder / HASHES, dtype=np.uint64, mode="r")
    learned = np.memmap(folder / LEARNED, dtype=np.bool_, mode="r") if (folder / LEARNED).is_file() else None
    return TokenisedCorpus(folder, ids, offsets, num_bytes, hashes, ledger, DocumentMarkers.of(tokenizer), learned)


def _id_dtype(tokenizer: PreTrainedTokenizerBase) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if len(tokenizer) <= 2**16 else np.uint32


def _tokenizer_spec(source: TextSource, tokenizer: PreTrainedTokenizerBase) -> TokenizerSpec:
    if not tokenizer.is_fast:
        raise BaseModelError(f"{tokenizer.name_or_path}: its tokenizer has no tokenizer.json form (a fast tokenizer)")
    markers, conversations = DocumentMarkers.of(tokenizer), source.messages_field is not None
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


@lru_cache(maxsize=4)  # nobody changes a tokenizer that is loaded, and every source is named by it
def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
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
