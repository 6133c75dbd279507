"""Opens steps of mcore run folders for conversions: weights, and the optimizer if requested."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mcore_base.stores import as_path
from mcore_ckpt.conversion.options import ConvertOptions
from mcore_ckpt.families.common.shapes import check_description
from mcore_ckpt.formats.hf_checkpoint import open_hf
from mcore_ckpt.formats.hf_folder import small_files
from mcore_ckpt.formats.open_checkpoint import (
    PREFIX,
    OpenCheckpoint,
    cast_rows,
    open_rows,
    with_state,
)
from mcore_ckpt.mapping.adapters import MergedTensors, find_base
from mcore_ckpt.mapping.optimizer_state import read_native
from mcore_ckpt.mapping.row_streams import Rows, Source
from mcore_ckpt.mapping.rules import Link
from mcore_ckpt.storage.checksums import check_files
from mcore_ckpt.storage.files import Reader
from mcore_ckpt.storage.index import ADAPTER, Index, check_whole, read_index
from mcore_ckpt.storage.paths import is_hf_folder, resolve_folder


@contextmanager
def open_native(path: Path, options: ConvertOptions) -> Iterator[OpenCheckpoint]:
    """Open a step of mcore; see ``sources.opened``."""
    step = resolve_folder(path)
    index = read_index(step)
    check_whole(step, index)
    check_files(step, index)
    description = _description(step, index)
    tensors = {
        name.removeprefix(PREFIX): entry
        for name, entry in index.tensors.items()
        if name.startswith(PREFIX)
    }
    tokenizer, _ = small_files(step / "tokenizer")
    _, generation = small_files(step)
    with ExitStack() as stack:
        reader = stack.enter_context(Reader(step))
        stored: Rows = Source(reader, tensors)
        hf = dict(index.extra.get("hf", {}))
        if adapter := index.extra.get(ADAPTER):
            stored, hf = stack.enter_context(_merged(step, stored, adapter))
        links = [Link((name,), name) for name in stored.entries]
        theirs = cast_rows(stored, options)
        checkpoint = open_rows(
            description,
            links,
            theirs,
            options,
            hf=hf,
            tokenizer=tokenizer,
            generation=generation,
            left_behind=len(index.tensors) - len(tensors),
        )
        if options.optimizer:
            checkpoint = with_state(
                checkpoint, read_native(index, reader, theirs, str(step)), options
            )
        yield checkpoint


@contextmanager
def _merged(
    step: Path, stored: Rows, adapter: Mapping[str, Any]
) -> Iterator[tuple[Rows, dict[str, Any]]]:
    """Yield the base model with a step's adapters merged, and the base's ``hf`` entry."""
    if not adapter["base"]:  # the step holds base and adapters
        yield MergedTensors(stored, stored, adapter), {}
        return
    base = as_path(find_base(step, adapter))
    open_base = open_hf if is_hf_folder(base) else open_native
    with open_base(base, ConvertOptions()) as opened:
        yield MergedTensors(opened.ours, stored, adapter), opened.hf


def _description(step: Path, index: Index) -> dict[str, Any]:
    """Return the model's description in a step's index.

    Raises:
        ValueError: if the index has no description.
    """
    description = index.extra.get("model")
    if not isinstance(description, dict) or "family" not in description:
        raise ValueError(
            f"{step} does not describe its model (extra.model in its index): give a checkpoint "
            "of mcore-train or mcore-ckpt convert."
        )
    check_description(description, (one.shape for one in index.tensors.values()), str(step))
    return description
