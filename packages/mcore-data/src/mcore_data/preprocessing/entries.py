"""Finds places inside a file from which its records can be read without those before.

These are lines of a plain file, frames of a Zstandard file, members of a gzip file and row
groups of a Parquet file; all places are byte offsets of the stored file. A part of a file
reaches from one such place to another one.

A frame or member may begin in the middle of a line. A line therefore belongs to the part in
which the byte before it is, and the line that begins where the part ends belongs to it too.
"""

import re
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from mcore_data.preprocessing.blocks import InputSource, open_local
from mcore_data.preprocessing.compression import open_compressed
from mcore_data.preprocessing.tables import is_parquet, row_group_starts

_GZIP_MAGIC = re.compile(rb"\x1f\x8b\x08[\x00-\x1f]")
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPABLE_MAGIC = b"\x2a\x4d\x18"  # behind a byte of 0x50 to 0x5f
_SEARCHED_BYTES = 8 << 20
_LONGEST_MEMBER = 64 << 20
_CHUNK = 1 << 20


def next_entry(source: InputSource, at: int, start: int) -> int:
    """Return the first byte at or after ``at`` from which a file can be read.

    Only the size of the file is returned if there is no such byte, if the file is in an object
    store, or if its format has no entries. In a gzip file a member is looked for in 8 MiB.
    ``start`` is an entry before ``at``, or 0.
    """
    if at <= 0 or at >= source.size:
        return min(max(at, 0), source.size)
    if source.is_divisible:
        with open_local(source.path) as file:
            file.seek(at - 1)
            file.readline()
            return file.tell()
    if not source.is_local or source.kind == "text":
        return source.size
    if source.kind == "table":
        starts = row_group_starts(source.path) if is_parquet(source) else []
        return next((one for one in starts if one >= at), source.size)
    if source.codec not in ("Zstandard", "gzip"):
        return source.size
    with open_local(source.path) as file:
        found = _frames(file, start) if source.codec == "Zstandard" else _members(file, at)
        later = (one for one in found if one >= at and _is_border(source, one))
        return next(later, source.size)


def open_part(source: InputSource, raw: BinaryIO) -> Iterator[bytes]:
    """Yield the decompressed bytes of the records of a part, from and up to an entry.

    Args:
        source: a compressed file of lines or pages, or the first lines of a plain one.
        raw: the whole stored file.
    """
    cuts_lines = bool(source.codec) and source.kind != "wet"
    raw.seek(source.start)
    stored = _Range(raw, (source.stop or source.size) - source.start)
    stream = open_compressed(stored, source.codec)  # pyrefly: ignore[bad-argument-type]
    if cuts_lines and source.start:
        # The line that the entry is in, or that begins there, belongs to the part before.
        while (piece := stream.readline(_CHUNK)) and not piece.endswith(b"\n"):
            pass
        if not piece:
            return
    while data := stream.read(_CHUNK):
        yield data
    if cuts_lines and source.stop:
        raw.seek(source.stop)
        yield open_compressed(raw, source.codec).readline()


class _Range:
    """The next bytes of a file, up to a number of them."""

    def __init__(self, raw: BinaryIO, num_bytes: int) -> None:
        self._raw = raw
        self._left = num_bytes

    def read(self, num_bytes: int) -> bytes:
        data = self._raw.read(min(num_bytes, self._left))
        self._left -= len(data)
        return data


def _frames(file: BinaryIO, at: int) -> Iterator[int]:
    """Yield the starts of Zstandard frames from one on, by the sizes in their block headers.

    Reference:
        RFC 8878, section 3.1: a frame's header, blocks of 3 bytes and a size, and a checksum.
    """
    import zstandard

    while len(head := _bytes_at(file, at, 18)) >= 8:
        if head[0] >> 4 == 5 and head[1:4] == _SKIPPABLE_MAGIC:
            at += 8 + int.from_bytes(head[4:8], "little")
            continue
        if head[:4] != _ZSTD_MAGIC:
            return  # damaged, which the reader reports
        yield at
        at += zstandard.frame_header_size(head)
        is_last = False
        while not is_last:
            data = _bytes_at(file, at, 3)
            if len(data) < 3:
                return
            block = int.from_bytes(data, "little")
            is_last, kind, size = bool(block & 1), block >> 1 & 3, block >> 3
            at += 3 + (1 if kind == 1 else size)  # 1: a byte that is repeated
        at += 4 * zstandard.get_frame_parameters(head).has_checksum


def _bytes_at(file: BinaryIO, at: int, num_bytes: int) -> bytes:
    file.seek(at)
    return file.read(num_bytes)


def _members(file: BinaryIO, at: int) -> Iterator[int]:
    """Yield the starts of gzip members among the bytes from ``at`` on.

    Nothing in the format leads to a later member, so its first bytes are looked for. They are
    taken for a member only if all that follows up to a checksum is one.
    """
    head = _bytes_at(file, at, _SEARCHED_BYTES + 4)
    for found in _GZIP_MAGIC.finditer(head):
        start = at + found.start()
        if _is_member(file, start):
            yield start


def _is_member(file: BinaryIO, start: int) -> bool:
    file.seek(start)
    member: Any = zlib.decompressobj(wbits=31)
    while not member.eof:
        data = file.read(1 << 16)
        if not data or file.tell() - start > _LONGEST_MEMBER:
            return False
        try:
            while data and not member.eof:
                member.decompress(data, _CHUNK)
                data = member.unconsumed_tail
        except zlib.error:
            return False
    return True


def _is_border(source: InputSource, start: int) -> bool:
    """Whether a part may begin at a member: one of pages only where a page begins."""
    if source.kind != "wet":
        return True
    with open_local(source.path) as file:
        file.seek(start)
        return open_compressed(file, source.codec).read(5) == b"WARC/"
