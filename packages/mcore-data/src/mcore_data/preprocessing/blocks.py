"""Input sources, and blocks of whole records of a source.

A block has some megabytes: several fit in memory, and sending one to another process costs
little in comparison to its work. A block of a plain local file holds a byte range that the
receiving process reads; every other block holds its bytes. Reading can continue at the start of
any block.
"""

import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from mcore_data.preprocessing.compression import codec_of
from mcore_data.preprocessing.records import Kind, ParsedRecords, parse_records
from mcore_data.preprocessing.remote import open_remote

BLOCK_BYTES = 2 << 20
STDIN = "-"
GIVE_AGAIN = (
    "No output has its final name. Repeat the command when the file is complete: it then "
    "starts from the beginning."
)


@dataclass(frozen=True, slots=True)
class InputSource:
    """One input.

    Attributes:
        path: file, URL, or ``-`` for standard input.
        kind: format of the records.
        size: stored bytes; 0 if unknown.
        stamp: modification time, or the object store's ETag.
        start: first stored byte of a part of the file (``entries.py``); 0 for a whole file.
        stop: first stored byte of the next part; 0 reads to the end.
        is_stream: standard input, a named pipe or ``lines``, which can be read only once.
        lines: lines of a source that is generated while it is read.
    """

    path: str
    kind: Kind
    size: int
    stamp: str
    start: int = 0
    stop: int = 0
    is_stream: bool = False
    lines: Iterable[bytes] | None = None

    @property
    def codec(self) -> str:
        """Codec of a compressed file, by its name; empty for a plain file."""
        return codec_of(self.path)

    @property
    def is_local(self) -> bool:
        """Whether any process of this machine can open the source, any number of times."""
        return not self.is_stream and "://" not in self.path

    @property
    def is_divisible(self) -> bool:
        """Whether the source can be read from any line on."""
        return self.is_local and self.kind in ("lines", "text_lines") and not self.codec

    @property
    def num_bytes(self) -> int:
        """Stored bytes to read."""
        return (self.stop or self.size) - self.start


@dataclass(frozen=True, slots=True)
class Block:
    """Whole records of one source.

    Attributes:
        path: path of the source.
        kind: format of the records.
        start: first byte of a plain file, of a compressed part's records, or first row of a
            table's part.
        end: start of the next block.
        done_bytes: stored bytes of the source's part up to the end of this block.
        data: the bytes, or None to read them from the local file.
    """

    path: str
    kind: Kind
    start: int
    end: int
    done_bytes: int
    data: bytes | None

    def parse(self, json_keys: Sequence[str], keep_keys: Sequence[str] = ()) -> ParsedRecords:
        """Read the texts of the block's records.

        Raises:
            RuntimeError: if the file was truncated or removed after the block was cut.
        """
        data = self.data
        if data is None:
            with open_local(self.path) as file:
                file.seek(self.start)
                data = file.read(self.end - self.start)
            if len(data) < self.end - self.start:
                raise RuntimeError(f"{self.path} was truncated while it was read. {GIVE_AGAIN}")
        return parse_records(self.kind, data, json_keys, keep_keys)


def open_raw(source: InputSource) -> BinaryIO:
    """Open the stored bytes of a source."""
    if source.lines is not None:
        return cast(BinaryIO, io.BufferedReader(IteratorBytes(source.lines)))
    if source.path == STDIN:
        return sys.stdin.buffer
    if source.is_local or source.is_stream:
        return open_local(source.path)
    return open_remote(source.path)


class IteratorBytes(io.RawIOBase):
    """Readable stream of the bytes that an iterator yields."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._rest = b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` with the next bytes; 0 at the end."""
        self._rest = self._rest or next(self._pieces, b"")
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def open_local(path: str) -> BinaryIO:
    """Open a local input for reading.

    Raises:
        RuntimeError: if the file was removed after the inputs were listed.
    """
    try:
        return open(path, "rb")
    except FileNotFoundError as error:
        raise RuntimeError(
            f"{path} was removed after the inputs were listed: restore it and repeat the "
            "command."
        ) from error


def describe(path: str, kind: Kind, number: int) -> str:
    """Return the file and line or row of a record, for messages."""
    name = "standard input" if path == STDIN else path
    if kind == "text":
        return name
    unit = {"table": "row", "wet": "page"}.get(kind, "line")
    return f"{name}, {unit} {number}"
