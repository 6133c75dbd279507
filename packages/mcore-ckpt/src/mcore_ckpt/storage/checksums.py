"""Digests of a step, by which verify and load detect any byte that changed after a save.

The index ends with a digest of its own text. It holds the digest of each tensor file's header
and of each small file (config.json, recipe, tokenizer), and checksums of every block of tensor
data; together they cover the step. Files that are added later are not covered.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.storage.headers import read_header_bytes
from mcore_ckpt.storage.index import FileEntry, Index, digest
from mcore_ckpt.storage.paths import INDEX


def finalize_index(index: Index, folder: Path, rows: Mapping[str, str] | None = None) -> bytes:
    """Return the content of ``index.json`` for a step whose other files are all written.

    Args:
        index: index of the step, without digests of small files.
        folder: folder of the step.
        rows: as for ``Index.to_bytes``.
    """
    small_files = {
        str(path.relative_to(folder)): _entry(path)
        for path in _files_below(folder)
        if path.name != INDEX and str(path.relative_to(folder)) not in index.files
    }
    return replace(index, small_files=dict(sorted(small_files.items()))).to_bytes(rows)


def check_files(folder: Path, index: Index, part: int = 0, num_parts: int = 1) -> None:
    """Compare small files and headers of tensor files with their digests in the index.

    Args:
        folder: folder of the step.
        index: index of the step.
        part: number of the share of files to check; each rank checks another share.
        num_parts: number of shares.

    Raises:
        CheckpointError: with the first file that is missing or differs.
    """
    whole = [(name, entry, False) for name, entry in index.small_files.items()]
    headers = [(name, entry, True) for name, entry in index.files.items()]
    for name, entry, is_header in (whole + headers)[part::num_parts]:
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, but the index lists it. Restore it.")
        content = read_header_bytes(path) if is_header else path.read_bytes()
        if digest(content) != entry.digest:
            subject = "the header of " if is_header else ""
            raise CheckpointError(
                f"{subject}{path} is damaged: its content has changed. Restore it, or load "
                "another step."
            )


def _entry(path: Path) -> FileEntry:
    content = path.read_bytes()
    return FileEntry(len(content), digest(content))


def _files_below(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_file():
            yield path
        else:
            yield from _files_below(path)
