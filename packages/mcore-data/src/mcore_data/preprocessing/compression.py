"""Compressed files as byte streams: gzip, bzip2, xz, and Zstandard by its extra.

A compressed file consists of members (gzip), streams (bzip2, xz) or frames (Zstandard). The
libraries' own file classes, which fsspec uses too, end without an error at a damaged later
stream (bz2, lzma) and at an empty file (gzip), so the rest of the file would be lost. Here the
members are read one by one with the libraries' decompressors, and a file that does not end with
a complete member is an error.
"""

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, BinaryIO, cast

CODECS = {
    ".gz": "gzip",
    ".gzip": "gzip",
    ".bz2": "bzip2",
    ".xz": "xz",
    ".zst": "Zstandard",
    ".zstd": "Zstandard",
}
"""Codec of a file by the lower-case suffix of its name."""
DAMAGE = (EOFError, OSError)
"""Exceptions that reading a truncated or damaged file raises."""
_CHUNK = 1 << 16


def codec_of(path: str) -> str:
    """Return the codec of a file by its name, a value of ``CODECS``; "" for a plain file."""
    return CODECS.get(PurePath(path).suffix.lower(), "")


def open_compressed(raw: BinaryIO, codec: str) -> BinaryIO:
    """Return the decompressed stream of ``raw``; with an empty ``codec`` ``raw`` itself.

    Raises:
        ImportError: if Zstandard is read without the extra ``zstd``.
    """
    if not codec:
        return raw
    return cast(BinaryIO, io.BufferedReader(_Members(raw, codec), _CHUNK))


class _Members(io.RawIOBase):
    """Decompressed bytes of all members of a file, one member after the other."""

    def __init__(self, raw: BinaryIO, codec: str) -> None:
        self._raw = raw
        self._codec = codec
        self._new_member, self._errors = _decompressors(codec)
        self._member: Any = None
        self._num_members = 0
        self._rest = b""  # read from the file, not decompressed yet
        self._ready = memoryview(b"")  # decompressed, not handed out yet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` with decompressed bytes; 0 at the end of the file."""
        while not self._ready:
            if self._member is None and not self._begin_member():
                return 0
            self._ready = memoryview(self._decompress())
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _begin_member(self) -> bool:
        """Begin the next member; return False at the end of the file."""
        self._rest = self._rest or self._raw.read(_CHUNK)
        if self._codec == "xz" and self._num_members:
            self._skip_padding()
        if self._rest:
            self._member = self._new_member()
            self._num_members += 1
        elif not self._num_members:
            raise EOFError(f"the file is empty, which is not valid {self._codec}")
        return bool(self._rest)

    def _skip_padding(self) -> None:
        """Skip zeros after an xz stream, which the format allows in groups of four."""
        num_zeros = 0
        while self._rest:
            stripped = self._rest.lstrip(b"\0")
            num_zeros += len(self._rest) - len(stripped)
            self._rest = stripped or self._raw.read(_CHUNK)
            if stripped:
                break
        if num_zeros % 4:
            raise EOFError(
                f"{num_zeros} zero bytes follow an xz stream, which is not a multiple of 4"
            )

    def _decompress(self) -> bytes:
        # bz2 and lzma return at most _CHUNK bytes and may keep more for the next call; zlib and
        # zstandard return all bytes of the input.
        has_limit = hasattr(self._member, "needs_input")
        data = b""
        if not has_limit or self._member.needs_input:
            data, self._rest = self._rest or self._raw.read(_CHUNK), b""
            if not data:
                raise EOFError(f"the file ends within its {self._codec} data")
        try:
            out = self._member.decompress(data, *((_CHUNK,) if has_limit else ()))
        except self._errors as error:
            raise OSError(f"{self._codec}: {error}") from error
        if self._member.eof:
            self._rest = self._member.unused_data
            self._member = None
        return out


def _decompressors(codec: str) -> tuple[Callable[[], Any], tuple[type[Exception], ...]]:
    """Return a factory of decompressors of one member, and the errors that they raise."""
    if codec == "gzip":
        return lambda: zlib.decompressobj(wbits=31), (zlib.error,)
    if codec == "bzip2":
        return bz2.BZ2Decompressor, (OSError,)
    if codec == "xz":
        return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), (lzma.LZMAError,)
    try:
        import zstandard
    except ImportError:
        raise ImportError(
            "Zstandard files (.zst, .zstd) need the extra: pip install 'mcore-data[zstd]'."
        ) from None
    return lambda: zstandard.ZstdDecompressor().decompressobj(), (zstandard.ZstdError,)
