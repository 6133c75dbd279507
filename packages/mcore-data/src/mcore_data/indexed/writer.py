"""Writes token sequences as Megatron's ``.bin``/``.idx`` pairs, in bounded memory.

Tokens, lengths and document borders are appended to ``.partial`` files. At the end the index is
composed from these files, and only complete files get their final names. ``position`` returns
the sizes of the files, from which another writer can continue after a crash.
"""

import hashlib
import os
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mcore_base.atomic_files import sync_file, sync_folder
from mcore_data.indexed.index_format import (
    CHUNK_ROWS,
    HEADER,
    MAGIC,
    VERSION,
    CorruptDatasetError,
    bin_path,
    dtype_code,
    idx_path,
    kept_path,
    origins_path,
    read_index,
)
from mcore_data.indexed.reader import IndexedDataset

_WRITEBACK_BYTES = 32 << 20
_OPTIONAL = {"origins": origins_path, "kept": kept_path}
_LONGEST = np.iinfo(np.int32).max


class IndexedWriter:
    """Appends sequences to a ``.bin``/``.idx`` pair.

    Data are written to ``<prefix>.{bin,lengths,borders,origins,kept,modes}.partial``;
    ``finalize`` composes the index and renames the files. Leaving a ``with`` block calls
    ``finalize`` if it was not called, or after an exception removes the partial files. Two
    writers must not write one prefix.

    Args:
        prefix: path without ``.bin`` or ``.idx``; its folder is created.
        dtype: one of the dtypes of the format, see ``token_dtype``.
        multimodal: store a mode for each sequence.
        resume_at: sizes that ``position`` returned; cut the partial files to them and append.
        checksum: compute the SHA-256 of the ``.bin`` while writing, for ``finalize``.
        index_only: write no ``.bin``: ``add_index`` copies no tokens, and ``finalize`` removes
            an existing ``.bin``.
        bin_from: with ``index_only``, a file of all tokens that ``finalize`` renames to the
            ``.bin``.

    Raises:
        ValueError: if the format has no such dtype.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: DTypeLike,
        *,
        multimodal: bool = False,
        resume_at: dict[str, int] | None = None,
        checksum: bool = False,
        index_only: bool = False,
        bin_from: Path | None = None,
    ) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.multimodal = multimodal
        self._index_only = index_only
        self._bin_from = bin_from
        self._code = dtype_code(self.dtype)
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        kinds = ["bin", "lengths", "borders", *_OPTIONAL] + (["modes"] if multimodal else [])
        finals = {"bin": bin_path(prefix)} | {k: path(prefix) for k, path in _OPTIONAL.items()}
        for kind, final in finals.items():
            if resume_at and not self._partial(kind).exists() and final.is_file():
                final.rename(self._partial(kind))  # killed within finalize
        with ExitStack() as opened:  # closes the others if one cannot be opened
            self._files: dict[str, BinaryIO] = {
                kind: opened.enter_context(
                    _open_partial(self._partial(kind), (resume_at or {}).get(kind))
                )
                for kind in kinds
            }
            opened.pop_all()
        self._flushed_bytes = self._files["bin"].tell()  # whose write-back was requested
        self._digest = None
        if checksum:
            with self._partial("bin").open("rb") as written:
                self._digest = hashlib.file_digest(written, "sha256")
        self.num_sequences = self._files["lengths"].tell() // 4
        if self._files["borders"].tell() == 0:
            self._files["borders"].write(np.int64(0).tobytes())

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Finalize, or after an exception remove the partial files."""
        if kind is None:
            if not self._files["bin"].closed:
                self.finalize()
        else:
            self.abandon()

    def position(self) -> dict[str, int]:
        """Flush the partial files, and return their sizes for ``resume_at``."""
        for file in self._files.values():
            file.flush()
        return {kind: file.tell() for kind, file in self._files.items()}

    def sync(self) -> None:
        """Write the partial files to the disk, so that they survive a power failure."""
        for file in self._files.values():
            sync_file(file)

    def add_item(self, tokens: Sequence[int] | NDArray[Any], mode: int = 0) -> None:
        """Append one sequence without closing the document."""
        self._append(np.asarray(tokens), np.array([len(tokens)]), [mode])

    def end_document(self) -> None:
        """End a document that consists of all sequences since the last border."""
        self._files["borders"].write(struct.pack("<q", self.num_sequences))

    def add_document(
        self,
        tokens: Sequence[int] | NDArray[Any],
        lengths: Sequence[int] | None = None,
        modes: Sequence[int] | None = None,
    ) -> None:
        """Append one complete document.

        Args:
            tokens: tokens of all its sequences, concatenated.
            lengths: tokens of each sequence; None means that the document is one sequence.
            modes: mode of each sequence, for multimodal files.
        """
        parts = np.asarray([len(tokens)] if lengths is None else lengths)
        self._append(np.asarray(tokens), parts, modes)
        self.end_document()

    def add_documents(
        self,
        tokens: NDArray[Any],
        lengths: NDArray[np.integer],
        sequences_per_document: NDArray[np.integer] | None = None,
    ) -> None:
        """Append many documents at once.

        Args:
            tokens: tokens of all sequences, concatenated.
            lengths: tokens of each sequence.
            sequences_per_document: sequences of each document; None means one each.
        """
        first = self.num_sequences
        self._append(tokens, lengths, None)
        counts = (
            np.ones(len(lengths), np.int64)
            if sequences_per_document is None
            else np.asarray(sequences_per_document, np.int64)
        )
        if int(counts.sum()) != len(lengths):
            raise ValueError(
                f"{int(counts.sum())} sequences in the documents, but {len(lengths)} lengths."
            )
        self._files["borders"].write((first + np.cumsum(counts)).astype("<i8").tobytes())

    def add_origins(self, rows: NDArray[np.int64]) -> None:
        """Append the origins of the documents that are added next.

        Args:
            rows: [N, 3] as in ``origins.py``; document 0 is the next document to be added.
                A pair without rows has no ``.origins`` file.
        """
        num_documents = self._files["borders"].tell() // 8 - 1
        numbered = rows + np.array([num_documents, 0, 0])
        self._files["origins"].write(numbered.astype("<i8").tobytes())

    def add_kept(self, lines: bytes) -> None:
        """Append the kept values of the documents that are added next, a JSON line for each.

        A pair without lines has no ``.kept`` file.
        """
        self._files["kept"].write(lines)

    def add_index(self, prefix: str | Path) -> None:
        """Append all documents of another pair of the same dtype and kind.

        Raises:
            ValueError: if dtypes differ or only one of both pairs is multimodal.
        """
        index = read_index(idx_path(prefix))
        if index.dtype != self.dtype or (index.modes is not None) != self.multimodal:
            raise ValueError(
                f"{prefix} ({_describe(index.dtype, index.modes is not None)}) cannot be "
                f"appended to {self.prefix} ({_describe(self.dtype, self.multimodal)})."
            )
        first = self.num_sequences
        for tokens in () if self._index_only else IndexedDataset(prefix).chunks():
            self._write_tokens(tokens.data)
        for start in range(0, len(index.lengths), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            self._files["lengths"].write(index.lengths[rows].tobytes())
            if index.modes is not None:
                self._files["modes"].write(index.modes[rows].tobytes())
        for start in range(1, len(index.documents), CHUNK_ROWS):
            borders = index.documents[start : start + CHUNK_ROWS] + first
            self._files["borders"].write(borders.astype("<i8").tobytes())
        if kept_path(prefix).is_file():
            _copy(kept_path(prefix), self._files["kept"])
        self.num_sequences += len(index.lengths)

    def finalize(self) -> str:
        """Compose the index and rename all files to their final names, the index last.

        Returns:
            SHA-256 of the ``.bin`` if the writer was made with ``checksum``, else "".
        """
        num_borders = self._files["borders"].tell() // 8
        self._close()
        with self._partial("idx").open("wb") as idx:
            idx.write(HEADER.pack(MAGIC, VERSION, self._code, self.num_sequences, num_borders))
            _copy(self._partial("lengths"), idx)
            _write_pointers(self._partial("lengths"), self.dtype.itemsize, idx)
            _copy(self._partial("borders"), idx)
            if self.multimodal:
                _copy(self._partial("modes"), idx)
            sync_file(idx)
        for kind in ("bin", *_OPTIONAL):
            with self._partial(kind).open("rb") as file:
                os.fsync(file.fileno())
        idx_path(self.prefix).unlink(missing_ok=True)
        for kind, path in _OPTIONAL.items():
            if self._partial(kind).stat().st_size:
                self._partial(kind).replace(path(self.prefix))
            else:
                path(self.prefix).unlink(missing_ok=True)
        if self._bin_from is not None:
            self._bin_from.replace(bin_path(self.prefix))
        elif self._index_only:
            bin_path(self.prefix).unlink(missing_ok=True)
        else:
            self._partial("bin").replace(bin_path(self.prefix))
        # The folder is synced between the renames: after a power failure an .idx on the disk
        # implies that its .bin is there too.
        folder = Path(self.prefix).parent
        sync_folder(folder)
        self._partial("idx").replace(idx_path(self.prefix))
        sync_folder(folder)
        self._remove_partials()
        return self._digest.hexdigest() if self._digest else ""

    def suspend(self) -> dict[str, int]:
        """Close and keep the partial files; return the value for ``resume_at``."""
        position = self.position()
        self._close()
        return position

    def abandon(self) -> None:
        """Close and remove the partial files; final files of an earlier run are kept."""
        self._close()
        self._remove_partials()

    def _append(
        self, tokens: NDArray[Any], lengths: NDArray[np.integer], modes: Sequence[int] | None
    ) -> None:
        total = int(lengths.sum()) if len(lengths) else 0
        if total != len(tokens):
            raise ValueError(f"{len(tokens)} tokens given, but the lengths sum to {total}.")
        if len(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= _LONGEST:
            raise ValueError(
                f"a sequence has {int(lengths.max())} tokens; the format takes 0 to {_LONGEST}."
            )
        if modes is not None and any(modes) and not self.multimodal:
            raise ValueError("modes need IndexedWriter(..., multimodal=True).")
        self._write_tokens(_cast_exactly(tokens, self.dtype).data)
        self._files["lengths"].write(lengths.astype("<i4").tobytes())
        if self.multimodal:
            filled = np.zeros(len(lengths), "i1") if modes is None else np.array(modes, "i1")
            self._files["modes"].write(filled.tobytes())
        self.num_sequences += len(lengths)

    def _write_tokens(self, data: bytes | memoryview) -> None:
        file = self._files["bin"]
        file.write(data)
        if self._digest:
            self._digest.update(data)
        if (size := file.tell() - self._flushed_bytes) >= _WRITEBACK_BYTES:
            _start_writeback(file, self._flushed_bytes, size)
            self._flushed_bytes += size

    def _partial(self, kind: str) -> Path:
        return Path(f"{self.prefix}.{kind}.partial")

    def _close(self) -> None:
        for file in self._files.values():
            file.close()

    def _remove_partials(self) -> None:
        for kind in ("bin", "idx", "lengths", "borders", *_OPTIONAL, "modes"):
            self._partial(kind).unlink(missing_ok=True)


def _cast_exactly(tokens: NDArray[Any], dtype: np.dtype) -> NDArray[Any]:
    """Cast tokens to the stored dtype; raise ``ValueError`` if an id does not fit it."""
    if tokens.dtype == dtype:
        return np.ascontiguousarray(tokens)
    if len(tokens) and dtype.kind in "iu":
        low, high = tokens.min(), tokens.max()
        info = np.iinfo(dtype)
        if low < info.min or high > info.max:
            raise ValueError(
                f"token ids {low} to {high} do not fit {dtype.name}; choose the dtype with "
                "token_dtype(vocab_size)."
            )
    return np.ascontiguousarray(tokens, dtype)


def _open_partial(path: Path, resume_bytes: int | None) -> BinaryIO:
    """Open an empty file for writing, or cut an existing one to ``resume_bytes`` and append."""
    if resume_bytes is None:
        return path.open("wb")
    if not path.is_file() or path.stat().st_size < resume_bytes:
        raise CorruptDatasetError(
            f"{path} is shorter than the {resume_bytes} bytes that were written to it; remove "
            "the .partial files and start again."
        )
    file = path.open("r+b")
    file.truncate(resume_bytes)
    file.seek(resume_bytes)
    return file


def _start_writeback(file: BinaryIO, start: int, size: int) -> None:
    """Start the write-back of a range of the file, so that ``fsync`` takes less time later.

    ``POSIX_FADV_DONTNEED`` starts the write of the range's dirty pages and drops clean ones.
    """
    if hasattr(os, "posix_fadvise"):
        file.flush()
        os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_DONTNEED)


def _write_pointers(lengths: Path, itemsize: int, out: BinaryIO) -> None:
    """Write the exclusive running sum of the lengths, in bytes."""
    offset = 0
    with lengths.open("rb") as source:
        while block := source.read(4 * CHUNK_ROWS):
            sizes = np.frombuffer(block, "<i4").astype(np.int64) * itemsize
            ends = offset + np.cumsum(sizes)
            out.write((ends - sizes).astype("<i8").tobytes())
            offset = int(ends[-1])


def _copy(path: Path, out: BinaryIO) -> None:
    with path.open("rb") as source:
        while block := source.read(1 << 24):
            out.write(block)


def _describe(dtype: np.dtype, multimodal: bool) -> str:
    return dtype.name + (", multimodal" if multimodal else "")
