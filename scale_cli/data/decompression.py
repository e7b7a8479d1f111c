"""Compressed files as streams, read to their last byte: what is cut off or damaged says so."""

from __future__ import annotations

import gzip
import io
import lzma
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import pyarrow as pa

from scale_cli.data.files import SourceFile

_READ_AT_ONCE = 1 << 16
# No xz preset needs more than 65 MB to decompress; a header may ask for 4 GB.
_XZ_MEMORY_BYTES = 1 << 30
# What a file may unpack to on the disk: text shrinks to a tenth, a table of it seldom to a fiftieth.
_MAX_UNPACKING, _SMALL_BYTES = 200, 1 << 26


@contextmanager
def decompressed(file: SourceFile, raw: IO[bytes]) -> Iterator[IO[bytes]]:
    """Yield the content of an open file, decompressed where its name says so."""
    if not file.compression:
        yield raw
        return
    if file.size == 0:
        raise EOFError("an empty file is not a compressed one")  # gzip takes it for one without text
    if file.compression == ".gz":
        text: Any = gzip.GzipFile(fileobj=raw)  # buffered already: a second buffer would lose what comes before damage
        yield text
    elif file.compression == ".xz":
        yield io.BufferedReader(_XzStreams(raw), _READ_AT_ONCE)
    else:
        # Arrow's reader says that a stream was cut off; zstandard's ends there as if it were whole.
        stream: Any = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
        yield io.BufferedReader(stream)


class _XzStreams(io.RawIOBase):
    """The streams of an .xz file, one after another; Python's own reader drops a damaged one after the first."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._stream = lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            more = b""
            if self._stream.eof:
                more = self._stream.unused_data.lstrip(b"\0")  # zeros may pad it
                while not more:
                    if not (block := self._raw.read(_READ_AT_ONCE)):
                        return 0
                    more = block.lstrip(b"\0")
                self._stream = lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES)
            elif self._stream.needs_input and not (more := self._raw.read(_READ_AT_ONCE)):
                raise EOFError("compressed file ended before its end-of-stream marker")
            if data := self._stream.decompress(more, len(buffer)):
                buffer[: len(data)] = data
                return len(data)


@contextmanager
def unpacked(file: SourceFile, stream: IO[bytes]) -> Iterator[IO[bytes]]:
    """Yield a decompressed stream as a file that can be read from its end, in a temporary file."""
    limit = _SMALL_BYTES + _MAX_UNPACKING * file.size
    with tempfile.TemporaryFile() as whole:
        while block := stream.read(_READ_AT_ONCE):
            if whole.tell() + len(block) > limit:
                raise OSError(f"unpacks to more than {_MAX_UNPACKING} times its size")
            whole.write(block)
        whole.seek(0)
        yield whole
