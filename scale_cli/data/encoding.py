"""Turn text into framed token ids, in this process or in many.

Worker processes import this file. It needs only numpy and tokenizers, so that they start fast.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import re
import signal
import threading
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache, wraps
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from tokenizers import (
    Encoding,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from scale_cli.chat_turns import unspecial_marks
from scale_cli.errors import RunError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Bytes per call: large enough that passing it to a worker is cheap, small enough to keep all
# workers busy.
_CHUNK_BYTES = 1 << 19
_CHUNK_DOCUMENTS = 4096
# For fewer chunks than this, starting workers takes longer than the work.
_CHUNKS_FOR_WORKERS = 8
_LONGEST_EXAMPLE = 40
# Stands in a special token that is text, so that no tokenizer finds it. Unicode keeps it from being
# a character.
GUARD = "\ufdd0"
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # of a vocabulary with byte fallback

P = ParamSpec("P")
Found = TypeVar("Found")

Ids = npt.NDArray[np.integer]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Spans = tuple[tuple[int, int], ...]  # of characters, from and to


@dataclass(frozen=True)
class Document:
    """A text that can be tokenised."""

    text: str  # not only white space; a conversation has the marks between its turns
    num_bytes: int  # of its UTF-8 form
    place: str = ""  # file:line, or the row
    learned: Spans | None = None  # spans to learn; None: all of it


@dataclass(frozen=True)
class DocumentMarkers:
    """The tokenizer's markers around a document; None if it has none."""

    # Before every document. Also None if BOS and EOS are the same token, which then separates
    # documents.
    bos: int | None
    eos: int | None  # after every document

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> DocumentMarkers:
        bos = tokenizer.bos_token_id
        eos = tokenizer.eos_token_id
        return cls(None if bos == eos else bos, eos)

    @property
    def context(self) -> int | None:
        """The token before a document's first token when it is scored: BOS, or else the previous
        document's EOS.
        """
        return self.eos if self.bos is None else self.bos


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return a prompt's ids, after the token that precedes a document in training."""
    boundary = DocumentMarkers.of(tokenizer).context
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids if boundary is None else [boundary, *ids]


def forget_settings_of_calls(tokenizer: Tokenizer) -> None:
    """Remove the truncation, padding and dropout that a tokenizer.json may hold."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    model: Any = tokenizer.model
    if getattr(model, "dropout", None) is not None:
        model.dropout = None


def num_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of ids up to the largest; some between may belong to no token."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def id_dtype(tokenizer: PreTrainedTokenizerBase) -> str:
    return "uint16" if num_ids(tokenizer) <= 2**16 else "uint32"


@dataclass(frozen=True)
class RoundTrip:
    """How much of some texts is lost when they are encoded and decoded."""

    num_bytes: int = 0  # of the texts
    # of these bytes, in proportion to the letters, digits, punctuation and symbols that are lost
    num_lost: int = 0
    example: str = ""  # the first word that loses a character; empty: none does

    def __add__(self, later: RoundTrip) -> RoundTrip:
        num_bytes = self.num_bytes + later.num_bytes
        num_lost = self.num_lost + later.num_lost
        return RoundTrip(num_bytes, num_lost, self.example or later.example)

    @property
    def lost_fraction(self) -> float:
        return self.num_lost / max(self.num_bytes, 1)


@dataclass(frozen=True)
class Encoded:
    """Some consecutive documents as ids."""

    ids: Ids  # (tokens,) one document after another, markers included
    lengths: Integers  # (documents,) in tokens
    num_bytes: Integers  # (documents,) of each text
    hashes: npt.NDArray[np.uint64]  # (documents,) of each text, ignoring white space
    round_trip: RoundTrip  # of the texts
    learned: Flags | None = None  # (tokens,) whether each is learned; None: all are


class Encoder:
    """Everything that decides the ids of a text; worker processes get a copy."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, conversations: bool) -> None:
        markers = DocumentMarkers.of(tokenizer)
        # A template writes BOS itself.
        self._before = [] if markers.bos is None or conversations else [markers.bos]
        self._after = [] if markers.eos is None else [markers.eos]
        self._dtype = id_dtype(tokenizer)
        self._conversations = conversations
        described = json.loads(tokenizer.backend_tokenizer.to_str())
        unspecial = unspecial_marks(tokenizer)
        for token in described["added_tokens"]:
            token["special"] |= token["content"] in unspecial
        # It adds marks, which are not asked for, and may take spaces out of a token's place in the text.
        described["post_processor"] = None
        self._tokenizer = marks_as_text(described)
        self._guarded = marks_as_text(described, guarded=True) if conversations else None
        self._gives_all_back = gives_all_back(tokenizer.backend_tokenizer)
        # The token that the model puts in place of unknown text; a Unigram model gives it as an id.
        self._unknown = described["model"].get("unk_id")
        if (unknown := described["model"].get("unk_token")) is not None:
            self._unknown = self._tokenizer.token_to_id(unknown)

    def encodings(self, texts: Sequence[str]) -> list[Encoding]:
        """Tokenise texts, or conversations as `write_conversation` writes them, without markers."""
        if self._guarded is None:
            # A special token in a text is text. A copy of the tokenizer forgets this setting.
            self._tokenizer.encode_special_tokens = True
            # Gives no character offsets.
            return self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        readers = [self._guarded if GUARD in text else self._tokenizer for text in texts]
        return [
            reader.encode(text, add_special_tokens=False)
            for reader, text in zip(readers, texts, strict=True)
        ]

    def encode(self, documents: Sequence[Document]) -> Encoded:
        """Return the ids of some documents, each tokenised alone and framed by the tokenizer's
        markers.
        """
        texts = [document.text for document in documents]
        # Markers are added below, not by the tokenizer's template.
        encodings = self.encodings(texts)
        unframed = [encoding.ids for encoding in encodings]
        ids: list[int] = []
        lengths = []
        learned = []
        for document, encoding, own in zip(documents, encodings, unframed, strict=True):
            ends_itself = self._conversations and own[-1:] == self._after  # the template wrote EOS
            framed = own if ends_itself else [*self._before, *own, *self._after]
            ids += framed
            lengths.append(len(framed))
            if document.learned is not None:
                learned.append(
                    learned_tokens(document.text, document.learned, encoding.offsets, len(framed))
                )
        num_bytes = [document.num_bytes for document in documents]
        hashes = [
            hashlib.blake2b(" ".join(text.split()).encode(), digest_size=8).digest()
            for text in texts
        ]
        return Encoded(
            np.array(ids, self._dtype),
            np.array(lengths, np.int64),
            np.array(num_bytes, np.int64),
            np.frombuffer(b"".join(hashes), "<u8").astype(np.uint64),
            self._round_trip(texts, num_bytes, unframed),
            np.concatenate(learned) if learned else None,
        )

    def _round_trip(self, texts: list[str], sizes: list[int], ids: list[list[int]]) -> RoundTrip:
        if self._gives_all_back:  # decoding would take a fifth of the time
            return RoundTrip(sum(sizes))
        # The token for unknown text is dropped, so that the letters of its name do not count.
        known = [[token for token in own if token != self._unknown] for own in ids]
        decoded_texts = self._tokenizer.decode_batch(known, skip_special_tokens=False)
        num_lost = 0
        example = ""
        for text, num_bytes, decoded in zip(texts, sizes, decoded_texts, strict=True):
            if text == decoded:
                continue
            characters = _characters(text)
            lost = characters - _characters(decoded)
            if not lost:
                continue
            num_lost += math.ceil(num_bytes * lost.total() / characters.total())
            word = next(word for word in text.split() if _characters(word) & lost)
            example = example or word[:_LONGEST_EXAMPLE]
        return RoundTrip(sum(sizes), num_lost, example)


def once_a_tokenizer(
    function: Callable[Concatenate[PreTrainedTokenizerBase, P], Found],
) -> Callable[Concatenate[PreTrainedTokenizerBase, P], Found]:
    """Return a function of a loaded tokenizer, which never changes, that computes once.

    What it found goes with the tokenizer, of which a cache would keep some that nobody uses any more:
    one of 262,144 tokens takes a third of a gigabyte, and its encoder another.
    """
    found: WeakKeyDictionary[PreTrainedTokenizerBase, dict[object, Found]] = WeakKeyDictionary()

    @wraps(function)
    def remembered(
        tokenizer: PreTrainedTokenizerBase, /, *args: P.args, **options: P.kwargs
    ) -> Found:
        of_it = found.setdefault(tokenizer, {})
        asked = (args, *sorted(options.items()))
        if asked not in of_it:
            of_it[asked] = function(tokenizer, *args, **options)
        return of_it[asked]

    return remembered


@once_a_tokenizer  # its JSON form takes half a second
def encoder_of(tokenizer: PreTrainedTokenizerBase, *, conversations: bool) -> Encoder:
    return Encoder(tokenizer, conversations=conversations)


def break_pattern(strings: Iterable[str]) -> str:
    """Return a regular expression for the first character of each string where the rest follows it."""
    longest_first = sorted({text for text in strings if len(text) > 1}, key=len, reverse=True)
    parts = [f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in longest_first]
    return "|".join(parts) or "(?!)"


def marks_as_text(described: dict[str, Any], *, guarded: bool = False) -> Tokenizer:
    """Return a tokenizer whose model never sees a special token or a byte token spelt in a text.

    `encode_special_tokens` stops the search for special tokens ahead of the model. But a Unigram or
    word model finds every string of its vocabulary, `</s>` and `<0x0A>` too. So text is split
    within such strings, behind all other steps. Other text keeps its ids.

    Args:
        described: the tokenizer's JSON.
        guarded: whether GUARD is taken out of texts, after the search for special tokens.
    """
    tokenizer = Tokenizer.from_str(json.dumps(described))
    if guarded:
        # A normalized special token would be searched for without the guards.
        added = [
            token | {"normalized": token["normalized"] and not token["special"]}
            for token in described["added_tokens"]
        ]
        tokenizer = Tokenizer.from_str(json.dumps({**described, "added_tokens": added}))
        guards = normalizers.Replace(GUARD, "")
        before = tokenizer.normalizer
        tokenizer.normalizer = normalizers.Sequence([guards, before] if before else [guards])
    if found := _marks_in_reach(described):
        split = pre_tokenizers.Split(Regex(break_pattern(found)), "isolated")
        before = tokenizer.pre_tokenizer
        steps = [split] if before is None else [before, split]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


def _marks_in_reach(described: dict[str, Any]) -> list[str]:
    """Return the special tokens and byte tokens that a tokenizer's model can make of text that
    spells them.
    """
    model = described["model"]
    is_unigram = model["type"] == "Unigram"
    tokens = [piece for piece, _ in model["vocab"]] if is_unigram else list(model["vocab"])
    special = {token["content"] for token in described["added_tokens"] if token["special"]}
    if is_unigram and model["unk_id"] is not None:
        special.add(tokens[model["unk_id"]])
    found = [token for token in tokens if token in special or BYTE_TOKEN.fullmatch(token)]
    if model["type"] == "BPE" and not model.get("ignore_merges"):
        merged = {left + right for left, right in model["merges"]}
        return [token for token in found if token in merged]
    return found


def gives_all_back(tokenizer: Tokenizer) -> bool:
    """Return whether no text is ever lost: a byte-level tokenizer with all bytes, and no step that
    drops one.

    The vocabulary is not read as JSON: that takes half a second.
    """
    model = tokenizer.model
    if (
        not isinstance(model, models.BPE)
        or model.continuing_subword_prefix
        or model.end_of_word_suffix
        or tokenizer.normalizer is not None
        or tokenizer.pre_tokenizer is None
        or not isinstance(tokenizer.decoder, decoders.ByteLevel)
        or any(model.token_to_id(byte) is None for byte in pre_tokenizers.ByteLevel.alphabet())
    ):
        return False
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = tokenizer.pre_tokenizer
    first = json.loads(bare.to_str())["pre_tokenizer"]
    steps = first.get("pretokenizers", [first])
    kinds = [step["type"] for step in steps]
    return (
        kinds.count("ByteLevel") == 1
        and all(kind in ("ByteLevel", "Split", "Digits") for kind in kinds)
        and not any(step.get("behavior") == "Removed" for step in steps)
        # Others would be decoded as bytes.
        and all(added.content.isascii() for added in tokenizer.get_added_tokens_decoder().values())
    )


def _characters(text: str) -> Counter[str]:
    """Count a text's letters, digits, punctuation and symbols, independently of the tokenizer's
    normal form.
    """
    counts: Counter[str] = Counter()
    for character, number in Counter(text).items():
        for plain in _plain(character):
            counts[plain] += number
    return counts


@lru_cache(maxsize=1 << 17)
def _plain(character: str) -> str:
    """Return a character without case, accents and width, Hangul as its letters, and "" for spaces
    and controls.
    """
    # Twice: the other case of an accent may be a letter, and that of a letter may have an accent.
    for _ in range(2):
        parts = unicodedata.normalize("NFKD", character)
        kept = (part for part in parts if unicodedata.category(part)[0] in "LNPS")
        character = "".join(kept).casefold()
    return character


def learned_tokens(
    text: str, spans: Spans, offsets: list[tuple[int, int]], num_tokens: int
) -> Flags:
    """Return (tokens,): whether any character of each token is learned; tokens after the text are
    not.
    """
    before = np.zeros(len(text) + 1, np.int64)  # learned characters before each place
    for start, end in spans:
        before[start + 1 : end + 1] = 1
    before = before.cumsum()
    starts, ends = np.array(offsets).T
    learned = np.zeros(num_tokens, np.bool_)
    learned[: len(offsets)] = before[ends] > before[starts]
    return learned


def encode_all(
    documents: Iterator[Document], encoder: Encoder, num_workers: int
) -> Iterator[Encoded]:
    """Yield the ids of all documents in order; documents are read as needed, at most a few chunks
    ahead.

    The ids do not depend on `num_workers`. With 1 worker, or for few documents, this process works
    alone.
    """
    chunks = _chunks(documents)
    first = list(islice(chunks, _CHUNKS_FOR_WORKERS))
    chunks = chain(first, chunks)
    if num_workers == 1 or len(first) < _CHUNKS_FOR_WORKERS:
        yield from map(encoder.encode, chunks)
        return
    # Not by fork: this process has threads, such as torch's.
    context = multiprocessing.get_context("spawn")
    workers = ProcessPoolExecutor(
        num_workers, context, initializer=_start_worker, initargs=(encoder,)
    )
    pending: deque[Future[Encoded]] = deque()
    try:
        for chunk in chunks:
            pending.append(workers.submit(_encode_in_worker, chunk))
            if len(pending) > 2 * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise RunError(
            "a tokenising process died, perhaps because memory ran out; to continue, run the command "
            "again with a smaller corpus.num_workers or corpus.max_document_bytes"
        ) from None
    finally:
        workers.shutdown(wait=True, cancel_futures=True)


def _chunks(documents: Iterator[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += document.num_bytes
        if size >= _CHUNK_BYTES or len(chunk) == _CHUNK_DOCUMENTS:
            yield chunk
            chunk = []
            size = 0
    if chunk:
        yield chunk


_worker_encoder: Encoder | None = None  # in each worker process


def _start_worker(encoder: Encoder) -> None:
    global _worker_encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and stops its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _worker_encoder = encoder


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # a killed parent cannot stop its workers, which would wait forever


def _encode_in_worker(documents: list[Document]) -> Encoded:
    assert _worker_encoder is not None
    try:
        return _worker_encoder.encode(documents)
    except BaseException as error:  # a Rust panic is not an Exception, and may not be picklable
        raise RunError(f"tokenising failed: {type(error).__name__}: {error}") from None
