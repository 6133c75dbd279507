"""Opens a checkpoint of any format: the model's description and its logical tensors.

Headers, indices and configs are read on opening; tensors are read by rows when they are used.
The module of a format is imported when a checkpoint of that format is opened.
"""

from contextlib import AbstractContextManager
from pathlib import Path

from mcore_base.stores import as_path
from mcore_ckpt.conversion.options import ConvertOptions
from mcore_ckpt.formats.open_checkpoint import OpenCheckpoint
from mcore_ckpt.storage.paths import is_peft_folder

FORMATS = ("hf", "mcore", "megatron", "dcp")
"""Formats that a conversion reads and writes."""

_AS_STORED = ConvertOptions()


def opened(
    form: str, path: str | Path, options: ConvertOptions = _AS_STORED
) -> AbstractContextManager[OpenCheckpoint]:
    """Return a context that opens a checkpoint of a format, and closes its files at the end.

    Args:
        form: one of ``FORMATS``.
        path: folder of the checkpoint, or a run folder with a pointer to it.
        options: casts, vocabulary, and ``--config`` for a checkpoint without a description.

    Raises:
        ValueError: if the model cannot be represented, or its description is missing.
        CheckpointError: if files are damaged, or hold a pickle with names that are not allowed.
    """
    path = as_path(path)
    if form == "hf":
        from mcore_ckpt.formats.hf_checkpoint import open_hf, open_peft

        return open_peft(path, options) if is_peft_folder(path) else open_hf(path, options)
    if form == "mcore":
        from mcore_ckpt.formats.native_checkpoint import open_native

        return open_native(path, options)
    if form == "dcp":
        from mcore_ckpt.formats.dcp_checkpoint import open_dcp

        return open_dcp(path, options)
    from mcore_ckpt.formats.megatron.checkpoint import open_megatron

    return open_megatron(path, options)
