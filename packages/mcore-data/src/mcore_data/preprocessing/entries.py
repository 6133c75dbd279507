"""Finds entries of a file: bytes from which records can be read without the bytes before.

Entries are the starts of lines of a plain file, of frames of a Zstandard file, of members of a
gzip file and of row groups of a Parquet file, as byte offsets of the stored file. A part of a
file is the range between two entries.

A frame or member may begin within a line. A line therefore belongs to the part that contains
the byte before the line. So a line that begins exactly at the end of a part belongs to that
part, not to the next.
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
_SKIPPABLE_MAGIC = b"\x2a\x4d\x18"  # after a byte of 0x50 to 0x5f
_SEARCHED_BYTES = 8 << 20
_LONGEST_MEMBER = 64 << 20
_CHUNK = 1 << 20


def next_entry(source: InputSource, offset: int, start: int) -> int:
    """Return the first entry of a file at or after ``offset``.

    The size of the file is returned if no entry follows, if the file is in an object store, or
    if its format has no entries. In a gzip file the next 8 MiB are searched.

    Args:
        source: the file.
        offset: stored byte at which the search begins.
        start: an entry before ``offset``, or 0.
    """
    if offset <= 0 or offset >= source.size:
        return min(max(offset, 0), source.size)
    if source.is_divisible:
        with open_local(source.path) as file:
            file.seek(offset - 1)
            file.readline()
            return file.tell()
    if not source.is_local or source.kind == "text":
        return source.size
    if source.kind == "table":
        starts = row_group_starts(source.path) if is_parquet(source) else []
        return next((start for start in starts if start >= offset), source.size)
    if source.codec not in ("Zstandard", "gzip"):
        return source.size
    with open_local(source.path) as file:
        if source.codec == "Zstandard":
            entries = _frames(file, start)
        else:
            entries = _members(file, offset)
        later = (entry for entry in entries if entry >= offset and _is_border(source, entry))
        return next(later, source.size)


def open_part(source: InputSource, raw: BinaryIO) -> Iterator[bytes]:
    """Yield the decompressed bytes of the records of a part, as ``source`` describes it.

    Args:
        source: part of a compressed file of lines or pages, or the first lines of a plain file.
        raw: the whole stored file.
    """
    cuts_lines = bool(source.codec) and source.kind != "wet"
    raw.seek(source.start)
    stored = _Range(raw, (source.stop or source.size) - source.start)
    stream = open_compressed(stored, source.codec)  # pyrefly: ignore[bad-argument-type]
    if cuts_lines and source.start:
        # The line that contains the entry, or begins at it, belongs to the previous part.
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
    """At most ``num_bytes`` bytes of a file, from its current position."""

    def __init__(self, raw: BinaryIO, num_bytes: int) -> None:
        self._raw = raw
        self._remaining = num_bytes

    def read(self, num_bytes: int) -> bytes:
        data = self._raw.read(min(num_bytes, self._remaining))
        self._remaining -= len(data)
        return data


def _frames(file: BinaryIO, start: int) -> Iterator[int]:
    """Yield the starts of the Zstandard frames from the frame at ``start`` on.

    Only headers are read: of frames, and of blocks, which contain the blocks' sizes.

    Reference:
        RFC 8878, section 3.1: a frame's header, blocks of 3 bytes and a size, and a checksum.
    """
    import zstandard

    position = start
    while len(head := _bytes_at(file, position, 18)) >= 8:
        if head[0] >> 4 == 5 and head[1:4] == _SKIPPABLE_MAGIC:  # 0x50 to 0x5f, then the magic
            position += 8 + int.from_bytes(head[4:8], "little")
            continue
        if head[:4] != _ZSTD_MAGIC:
            return  # damaged; the reader raises the error
        yield position
        position += zstandard.frame_header_size(head)
        is_last = False
        while not is_last:
            data = _bytes_at(file, position, 3)
            if len(data) < 3:
                return
            # A block header of 24 bits: last block (1 bit), type (2 bits), size (21 bits).
            block = int.from_bytes(data, "little")
            is_last, kind, size = bool(block & 1), block >> 1 & 3, block >> 3
            position += 3 + (1 if kind == 1 else size)  # kind 1: one byte, repeated size times
        position += 4 * zstandard.get_frame_parameters(head).has_checksum


def _bytes_at(file: BinaryIO, offset: int, num_bytes: int) -> bytes:
    file.seek(offset)
    return file.read(num_bytes)


def _members(file: BinaryIO, start: int) -> Iterator[int]:
    """Yield the starts of gzip members among the 8 MiB from ``start`` on.

    The format has no size of a member, so members are found by their first bytes. A match
    counts only if it can be decompressed up to its checksum.
    """
    head = _bytes_at(file, start, _SEARCHED_BYTES + 4)
    for match in _GZIP_MAGIC.finditer(head):
        if _is_member(file, start + match.start()):
            yield start + match.start()


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
    """Whether a part may begin at a member; in WET files the member must begin with a page."""
    if source.kind != "wet":
        return True
    with open_local(source.path) as file:
        file.seek(start)
        return open_compressed(file, source.codec).read(5) == b"WARC/"
