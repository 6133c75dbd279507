"""Convert between Hugging Face folders and ours, tensor by tensor in constant memory.

Rows stream from file to file in slabs; only transposed matrices are held whole, one at a
time. A conversion ends with its proof: the result is read back, turned the other way and
compared with the source, bit by bit.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from mcore_ckpt.families import family_for, family_of
from mcore_ckpt.families.decoder import CARRIED
from mcore_ckpt.files import Item, Reader
from mcore_ckpt.hf_folder import read_hf_folder, small_files, write_hf_folder
from mcore_ckpt.index import Index, TensorEntry, read_index
from mcore_ckpt.locking import FolderLock
from mcore_ckpt.paths import (
    RELEASE,
    commit,
    make_fresh,
    resolve_folder,
    step_folder,
    sync_folder,
    write_durably,
)
from mcore_ckpt.rewriting import write_whole
from mcore_ckpt.rules import Link, expand, match_ours, match_theirs, our_shape
from mcore_ckpt.streams import Source, compare_copy, our_slabs, prove, their_slabs

log = logging.getLogger(__name__)

DTYPE_WORDS = {"fp32": "F32", "float32": "F32", "fp16": "F16", "float16": "F16"} | {
    "bf16": "BF16",
    "bfloat16": "BF16",
}
"""Dtypes to cast to, by the words that users write."""

_PREFIX = "model."
_TORCH_WORDS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Progress = Callable[[int, int, str], None]
"""Told bytes done, bytes in all, and the tensor at hand."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a conversion did."""

    output: Path
    """The folder to open: a run folder, or a Hugging Face folder."""
    family: str
    """``model_type``."""
    num_tensors: int
    """Tensors of the Hugging Face side, each used exactly once."""
    num_bytes: int
    """Bytes of weights written."""
    is_proven: bool
    """Whether the result was read back and compared with the source."""


def hf_to_mcore(
    source: str | Path,
    output: str | Path,
    *,
    dtype: str = "",
    check: bool = True,
    on_progress: Progress | None = None,
) -> Report:
    """Convert a Hugging Face folder to a run folder with a ``release`` step.

    Args:
        source: folder with config.json and safetensors.
        output: run folder to make, or to add the release to.
        dtype: one of ``DTYPE_WORDS`` to cast to; empty: as in the source.
        check: read the result back and compare.
        on_progress: told about each slab written.

    Raises:
        ValueError: if the source cannot be represented; names what.
        RuntimeError: if files are damaged, the output exists, or the proof fails.
    """
    folder = read_hf_folder(source)
    model_type = folder.config.get("model_type", "")
    family = family_of(model_type)
    description = family.to_ours(folder.config)
    table = family.table(description)
    links = expand(table)
    copies = match_theirs(table, links, folder.tensors)
    tokenizer, generation = small_files(folder.path)
    cast = _dtype(dtype)
    extra = {
        "model": description,
        "hf": {
            "model_type": model_type,
            "config": {n: folder.config[n] for n in CARRIED if n in folder.config},
        },
    }
    with Reader(folder.path) as reader, FolderLock(output):
        theirs = Source(reader, folder.tensors, cast)
        for name in copies:
            compare_copy(theirs, name, table.copies[name])
        items = _with_progress(_our_items(links, theirs), on_progress)
        target = make_fresh(step_folder(output, RELEASE))
        index = write_whole(target, items, extra)
        for name, content in tokenizer.items():
            (target / "tokenizer").mkdir(exist_ok=True)
            write_durably(target / "tokenizer" / name, content)
        for name, content in generation.items():
            write_durably(target / name, content)
        if check:
            with Reader(target) as written:
                prove(links, theirs, Source(written, _weights(index)))
        commit(target, Path(output), RELEASE, index.to_bytes())
    return _report(Path(output), model_type, links, items, check)


def mcore_to_hf(
    source: str | Path,
    output: str | Path,
    *,
    dtype: str = "",
    max_shard_bytes: int = 5_000_000_000,
    model_type: str = "",
    check: bool = True,
    on_progress: Progress | None = None,
) -> Report:
    """Convert a step of ours to a Hugging Face folder.

    Args:
        source: run folder (its latest step) or step folder.
        output: folder to make; it must not exist or be empty.
        dtype: one of ``DTYPE_WORDS`` to cast to; empty: as in the source.
        max_shard_bytes: most bytes of tensors in one file.
        model_type: family to write; empty: the one that the checkpoint came from, or the
            first that can say the model.
        check: read the result back and compare.
        on_progress: told about each slab written.

    Raises:
        ValueError: if the family cannot say the model, or the output is in the way.
        RuntimeError: if files are damaged, or the proof fails.
    """
    output = Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists and is not empty: give a new folder.")
    step = resolve_folder(source)
    index = read_index(step)
    description = _description(step, index)
    kept = index.extra.get("hf", {})
    model_type = model_type or kept.get("model_type") or family_for(description)
    family = family_of(model_type)
    config = {**kept.get("config", {}), **family.to_theirs(description)}
    links = expand(family.table(description))
    tensors = _weights(index)
    match_ours(links, tensors)
    unfinished = output.with_name(f".{output.name}.partial.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        with Reader(step) as reader:
            ours = Source(reader, tensors, _dtype(dtype))
            items = _with_progress(_their_items(links, ours), on_progress)
            config |= _dtype_fields(items)
            write_hf_folder(unfinished, config, items, max_shard_bytes)
            _carry_back(step, unfinished)
            if check:
                folder = read_hf_folder(unfinished)
                with Reader(unfinished) as written:
                    prove(links, Source(written, folder.tensors), ours)
        if output.exists():
            output.rmdir()
        unfinished.rename(output)
        sync_folder(output.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return _report(output, model_type, links, items, check)


def _our_items(links: Sequence[Link], theirs: Source) -> list[Item]:
    items = []
    for link in links:
        their_shape = theirs.entries[link.theirs].shape
        shape = our_shape(their_shape, link.transposed)
        for number, (name, (first, stop)) in enumerate(
            zip(link.ours, link.rows(their_shape), strict=True)
        ):
            items.append(
                Item(
                    _PREFIX + name,
                    theirs.dtype(link.theirs),
                    (stop - first, *shape[1:]) if shape else (),
                    partial(our_slabs, link, number, theirs),
                )
            )
    return items


def _their_items(links: Sequence[Link], ours: Source) -> list[Item]:
    items = []
    for link in links:
        shapes = [ours.entries[name].shape for name in link.ours]
        stacked = (sum(s[0] for s in shapes), *shapes[0][1:]) if shapes[0] else ()
        items.append(
            Item(
                link.theirs,
                ours.dtype(link.ours[0]),
                our_shape(stacked, link.transposed),
                partial(their_slabs, link, ours),
            )
        )
    return items


def _with_progress(items: Sequence[Item], on_progress: Progress | None) -> list[Item]:
    """Tell about every slab that passes."""
    if on_progress is None:
        return list(items)
    total, done = sum(item.num_bytes for item in items), 0

    def watched(item: Item) -> Iterator[Tensor]:
        nonlocal done
        for slab in item.slabs():
            yield slab
            done += slab.numel() * slab.element_size()
            on_progress(done, total, item.name)

    return [Item(item.name, item.dtype, item.shape, partial(watched, item)) for item in items]


def _weights(index: Index) -> dict[str, TensorEntry]:
    """Return the entries of a checkpoint's weights by logical name."""
    return {
        name.removeprefix(_PREFIX): entry
        for name, entry in index.tensors.items()
        if name.startswith(_PREFIX)
    }


def _description(step: Path, index: Index) -> dict[str, Any]:
    description = index.extra.get("model")
    if not isinstance(description, dict) or description.get("family") != "gpt":
        raise ValueError(
            f"{step} does not say which model it holds (extra.model in its index): it was "
            "not saved by mcore-train or mcore-ckpt convert."
        )
    return description


def _dtype(word: str) -> str:
    if word and word not in DTYPE_WORDS:
        raise ValueError(f"--dtype {word} is not known: use {', '.join(DTYPE_WORDS)}.")
    return DTYPE_WORDS.get(word, "")


def _dtype_fields(items: Sequence[Item]) -> dict[str, str]:
    sizes: dict[str, int] = {}
    for item in items:
        sizes[item.dtype] = sizes.get(item.dtype, 0) + item.num_bytes
    word = _TORCH_WORDS.get(max(sizes, key=lambda name: sizes[name]), "float32")
    return {"torch_dtype": word, "dtype": word}


def _carry_back(step: Path, output: Path) -> None:
    tokenizer, _ = small_files(step / "tokenizer")
    _, generation = small_files(step)
    if "tokenizer.json" in tokenizer and "tokenizer_config.json" not in tokenizer:
        # Enough for AutoTokenizer to open a tokenizer that was trained here.
        plain = {"tokenizer_class": "PreTrainedTokenizerFast"}
        tokenizer["tokenizer_config.json"] = json.dumps(plain, indent=2).encode() + b"\n"
    for name, content in {**tokenizer, **generation}.items():
        write_durably(output / name, content)


def _report(
    output: Path, family: str, links: Sequence[Link], items: Sequence[Item], proven: bool
) -> Report:
    return Report(output, family, len(links), sum(i.num_bytes for i in items), proven)
