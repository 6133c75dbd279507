"""A step whose index points into the files of a Hugging Face folder: no weight is written.

The files are linked into the step, so that it is whole on its own: hard links where the disk
allows them, else symbolic ones. They are read once, for their checksums.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_ckpt.formats.open_checkpoint import OpenCheckpoint
from mcore_ckpt.formats.sources import PREFIX
from mcore_ckpt.mapping.row_streams import Progress, Source, named_with_progress, slabs
from mcore_ckpt.save_load.foreign_loading import pointers
from mcore_ckpt.storage.files import Checksums, Reader, memory
from mcore_ckpt.storage.headers import read_header_bytes
from mcore_ckpt.storage.index import FileEntry, Index, TensorEntry, digest


def link_step(
    folder: Path,
    source: Path,
    found: OpenCheckpoint,
    extra: Mapping[str, Any],
    on_progress: Progress | None = None,
) -> Index:
    """Link a Hugging Face folder's files into a fresh step; the caller commits the index.

    Raises:
        ValueError: if a tensor does not stand in the files as we hold it.
    """
    entries = pointers(found)
    odd = [name for name, entry in entries.items() if any(not c.file for c in entry.chunks)]
    if odd:
        raise ValueError(
            f"--link needs files that hold tensors as they are, and {odd[0]} is transposed, "
            "interleaved or quantized there: leave it out."
        )
    files = {}
    used = sorted({chunk.file for entry in entries.values() for chunk in entry.chunks})
    if pickles := [name for name in used if not name.endswith(".safetensors")]:
        raise ValueError(f"--link needs safetensors, not {pickles[0]}: leave it out.")
    for name in used:
        there = (source / name).resolve()
        try:
            os.link(there, folder / name)
        except OSError:
            (folder / name).symlink_to(there)
        files[name] = FileEntry(there.stat().st_size, digest(read_header_bytes(there)))
    tensors: dict[str, TensorEntry] = {}
    sizes = {name: entry.num_bytes for name, entry in entries.items()}
    with Reader(folder) as reader:
        rows = Source(reader, entries)
        for name in named_with_progress(sizes, on_progress, "summing"):
            checksums = Checksums()
            for slab in slabs(rows, name):
                checksums.update(memory(slab))
            entry = entries[name]
            sums = checksums.finish()
            chunks = tuple(replace(chunk, checksums=sums) for chunk in entry.chunks)
            tensors[PREFIX + name] = replace(entry, chunks=chunks)
    return Index(tensors, extra, files)
