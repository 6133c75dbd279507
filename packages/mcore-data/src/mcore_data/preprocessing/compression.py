"""Compressed files as byte streams: gzip, bz2, xz, and Zstandard by its extra.

A file that ends in the middle is an error with every codec, never a short read.
"""

import bz2
import gzip
import io
import lzma
import zlib
from typing import Any, BinaryIO, cast

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
DAMAGE = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, OSError)
_CHUNK = 1 << 18


def open_compressed(raw: BinaryIO, suffix: str) -> BinaryIO:
    """Decompress a stream by the suffix of its file; no suffix returns it as it is.

    Raises:
        ImportError: if ``.zst`` is read without the extra ``zstd``.
    """
    if suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if suffix == ".bz2":
        return cast(BinaryIO, bz2.BZ2File(raw))
    if suffix == ".xz":
        return cast(BinaryIO, lzma.LZMAFile(raw))
    if suffix == ".zst":
        return cast(BinaryIO, io.BufferedReader(_ZstdStream(raw), _CHUNK))
    return raw


class _ZstdStream(io.RawIOBase):
    """Frames of a ``.zst`` file, one after the other; a cut last frame is an error."""

    def __init__(self, raw: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError:
            raise ImportError(
                "files ending in .zst need the extra: pip install 'mcore-data[zstd]'."
            ) from None
        self._raw = raw
        self._library = zstandard
        self._frame: Any = None
        self._rest = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` with what the next bytes decompress to."""
        while not self._ready:
            data = self._rest or self._raw.read(_CHUNK)
            self._rest = b""
            if not data:
                if self._frame is not None:
                    raise EOFError("the last frame is cut off")
                return 0
            self._ready = memoryview(self._decompress(data))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self, data: bytes) -> bytes:
        if self._frame is None:
            self._frame = self._library.ZstdDecompressor().decompressobj()
        try:
            out = self._frame.decompress(data)
        except self._library.ZstdError as error:
            raise OSError(str(error)) from error
        if self._frame.eof:
            self._rest = self._frame.unused_data
            self._frame = None
        return out
