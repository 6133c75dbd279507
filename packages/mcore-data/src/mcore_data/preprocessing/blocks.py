"""What is read: a source, and a block of whole records of it.

A block is some megabytes, small enough to hold and large enough to be worth sending to
another process. Blocks of a plain local file name a byte range, which the receiver reads
itself; all others carry their bytes. Where a block starts is enough to go on from it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from mcore_data.preprocessing.compression import codec_of
from mcore_data.preprocessing.records import Kind, ParsedRecords, parse_records
from mcore_data.preprocessing.remote import open_remote

BLOCK_BYTES = 2 << 20
STDIN = "-"
GIVE_AGAIN = (
    "No output has its final name. Give the same command again once the file is whole: it "
    "then begins anew."
)


@dataclass(frozen=True, slots=True)
class InputSource:
    """One input.

    Attributes:
        path: file, URL, or ``-`` for standard input.
        kind: what its records are.
        size: bytes as stored; 0 if unknown.
        stamp: changes when the content does.
        start: first byte to take; only plain local lines start elsewhere than at 0.
        stop: lines that start from this byte on belong to another part; 0 means none do.
        is_stream: standard input or a named pipe, which is read once.
    """

    path: str
    kind: Kind
    size: int
    stamp: str
    start: int = 0
    stop: int = 0
    is_stream: bool = False

    @property
    def codec(self) -> str:
        """Codec of a compressed file, by its name; empty for a plain one."""
        return codec_of(self.path)

    @property
    def is_local(self) -> bool:
        """Whether any process of this machine may open it, any number of times."""
        return not self.is_stream and "://" not in self.path

    @property
    def is_divisible(self) -> bool:
        """Whether it can be read from any line on."""
        return self.is_local and self.kind in ("lines", "text_lines") and not self.codec

    @property
    def num_bytes(self) -> int:
        """Stored bytes that are to be read."""
        return (self.stop or self.size) - self.start


@dataclass(frozen=True, slots=True)
class Block:
    """Whole records of one source.

    Attributes:
        path: of the source.
        kind: what the records are.
        start: first byte, counted in the decompressed file, or first row of a table.
        end: where the next block starts.
        done_bytes: stored bytes of the source that are read once this block is.
        data: the bytes, or None if they are to be read from the local file.
    """

    path: str
    kind: Kind
    start: int
    end: int
    done_bytes: int
    data: bytes | None

    def parse(self, json_keys: Sequence[str]) -> ParsedRecords:
        """Read the records.

        Raises:
            RuntimeError: if the file has become shorter since the block was cut, or is gone.
        """
        data = self.data
        if data is None:
            with open_local(self.path) as file:
                file.seek(self.start)
                data = file.read(self.end - self.start)
            if len(data) < self.end - self.start:
                raise RuntimeError(
                    f"{self.path} became shorter while it was read. {GIVE_AGAIN}"
                )
        return parse_records(self.kind, data, json_keys)


def open_raw(source: InputSource) -> BinaryIO:
    """Open the stored bytes of a source."""
    if source.path == STDIN:
        return sys.stdin.buffer
    if source.is_local or source.is_stream:
        return open_local(source.path)
    return open_remote(source.path)


def open_local(path: str) -> BinaryIO:
    """Open a file that was there when the inputs were listed.

    Raises:
        RuntimeError: if it is gone.
    """
    try:
        return open(path, "rb")
    except FileNotFoundError as error:
        raise RuntimeError(f"{path} is gone since the inputs were listed.") from error


def describe(path: str, kind: Kind, number: int) -> str:
    """Where a record is, for people: file and line or row."""
    name = "standard input" if path == STDIN else path
    if kind == "text":
        return name
    return f"{name}, {'row' if kind == 'table' else 'line'} {number}"
