"""Rewrites checkpoints as complete tensors without building a model: resharded or averaged.

Any step loads under any layout unchanged; resharding offline joins the boxes of a thousand
ranks, so that later reads are few and long. Tensors are streamed in slabs of rows.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_base.atomic_files import copy_durably
from mcore_base.stores import as_path
from mcore_ckpt.conversion.inspection import native_step
from mcore_ckpt.formats.hf_folder import TOKENIZER_FILES
from mcore_ckpt.mapping.row_streams import (
    Progress,
    Source,
    read_ahead,
    row_groups,
    slabs,
    with_progress,
)
from mcore_ckpt.save_load.hf_saving import HF_INDEX
from mcore_ckpt.storage.checksums import check_files, finalize_index
from mcore_ckpt.storage.files import DTYPES, Item, Reader, write_file
from mcore_ckpt.storage.index import DTYPE_BYTES, Index, StoredBox, TensorEntry, read_index
from mcore_ckpt.storage.outputs import check_place, check_room, check_run_folder, fresh_step
from mcore_ckpt.storage.paths import INDEX, RELEASE, commit
from mcore_ckpt.storage.shard_plans import list_problems, name_problems

KEPT_AVERAGE = "optimizer.average."
"""Prefix of the averaged weights that a run keeps in its optimizer's state."""


def write_whole(
    folder: Path, items: Sequence[Item], extra: Mapping[str, Any], num_files: int = 1
) -> Index:
    """Write complete tensors to files of similar size; return the index, not yet written."""
    tensors: dict[str, TensorEntry] = {}
    files = {}
    for number, mine in enumerate(_spread(items, num_files)):
        path = folder / f"rank_{number:05d}.safetensors"
        mine.sort(key=lambda item: -DTYPE_BYTES[item.dtype])
        written = write_file(path, mine)
        for item, one in zip(mine, written.sections, strict=True):
            zeros = (0,) * len(item.shape)
            chunk = StoredBox(path.name, one.offset, zeros, item.shape, one.checksums)
            # A tensor without elements is in the index only.
            chunks = (chunk,) if item.num_bytes else ()
            tensors[item.name] = TensorEntry(item.shape, item.dtype, chunks)
        files[path.name] = written.entry
    return Index(tensors, extra, files)


def reshard(
    source: str | Path,
    output: str | Path,
    *,
    num_files: int = 1,
    on_progress: Progress | None = None,
) -> Path:
    """Rewrite a step as complete tensors in few files, small files and ``extra`` included.

    Args:
        source: run folder (its latest step) or step folder.
        output: another run folder, which gets the step under the same name.
        num_files: files to spread the tensors over.
        on_progress: called for each slab written.

    Returns:
        The new step's folder.

    Raises:
        ValueError: if there is no checkpoint, ``num_files`` is below 1, or the output lies in
            the source or is a checkpoint of another format.
        CheckpointError: if files are damaged, the disk is full, or the output holds this step.
            Then the output is removed.
    """
    if num_files < 1:
        raise ValueError(f"--num-files {num_files} must be 1 or more.")
    output = as_path(output)
    ((step, index),) = native_steps(output, source)
    with Reader(step) as reader, ThreadPoolExecutor(1) as reading:
        tensors = Source(reader, index.tensors)
        items = [
            read_ahead(
                Item(name, entry.dtype, entry.shape, partial(slabs, tensors, name)), reading
            )
            for name, entry in index.tensors.items()
        ]
        items = with_progress(items, on_progress)
        return write_step(output, _step_of(step), items, index.extra, (step, index), num_files)


def average_checkpoints(
    sources: Sequence[str | Path], output: str | Path, *, on_progress: Progress | None = None
) -> Path:
    """Average the weights of several steps into a ``release``; optimizer states are dropped.

    Sums in float32 (float64 for float64 weights), in the order of ``sources``. Izmailov et al.
    2018, Averaging Weights Leads to Wider Optima, arXiv:1803.05407. A single step gives the
    average that its run kept (``--ema-decay``, Schedule-Free), in the dtype of the weights.

    Args:
        sources: run or step folders of one model.
        output: run folder that gets the release.
        on_progress: called for each slab written.

    Returns:
        The release's folder.

    Raises:
        ValueError: if a single source keeps no average, a source has no weights, sources hold
            different tensors, or the output is inside a source or is a checkpoint of another
            format.
        CheckpointError: if files are damaged, the disk is full, or the output holds a release.
            Then the output is removed.
    """
    output = as_path(output)
    steps_with_index = native_steps(output, *sources)
    steps, indices = zip(*steps_with_index, strict=True)
    weights = [
        {n: e for n, e in index.tensors.items() if n.startswith("model.")} for index in indices
    ]
    for step, mine in zip(steps, weights, strict=True):
        if not mine:
            raise ValueError(
                f"{step} holds no weights to average: none of its names begins with 'model.', "
                "as in steps of training and convert."
            )
    has_average = any(name.startswith(KEPT_AVERAGE) for name in indices[0].tensors)
    if len(steps) == 1 and not has_average:
        raise ValueError(
            f"{steps[0]} keeps no average of its weights: train with --ema-decay or "
            "--optimizer schedule_free, or give two checkpoints or more."
        )
    for step, other in zip(steps[1:], weights[1:], strict=True):
        check_alike(steps[0], weights[0], step, other)
    extra = {
        name: indices[0].extra[name] for name in ("model", "hf") if name in indices[0].extra
    }
    extra["averaged"] = [str(step) for step in steps]
    with ExitStack() as stack:
        readers = [stack.enter_context(Reader(step)) for step in steps]
        tensors = [
            Source(reader, index.tensors)
            for reader, index in zip(readers, indices, strict=True)
        ]
        slabs_of = _kept_slabs if len(steps) == 1 else _mean_slabs
        items = [
            Item(name, entry.dtype, entry.shape, partial(slabs_of, tensors, name))
            for name, entry in weights[0].items()
        ]
        items = with_progress(items, on_progress)
        return write_step(output, RELEASE, items, extra, steps_with_index[0])


def _spread(items: Sequence[Item], num_files: int) -> list[list[Item]]:
    """Assign items to files, largest first, each to the least loaded; omits empty files."""
    if num_files == 1:
        return [list(items)]
    num_files = min(num_files, len(items))
    heap: list[tuple[int, int]] = [(0, number) for number in range(num_files)]
    files: list[list[Item]] = [[] for _ in range(num_files)]
    for item in sorted(items, key=lambda item: (-item.num_bytes, item.name)):
        load, number = heapq.heappop(heap)
        files[number].append(item)
        heapq.heappush(heap, (load + item.num_bytes, number))
    return [mine for mine in files if mine]


def _kept_slabs(sources: Sequence[Source], name: str) -> Iterator[Tensor]:
    (source,) = sources
    entry, average_name = source.entries[name], name.replace("model.", KEPT_AVERAGE, 1)
    # Biases of routers have no average: their current value is written.
    stored_name = average_name if average_name in source.entries else name
    for begin, stop in row_groups(entry.shape):
        yield source.rows(stored_name, begin, stop).to(DTYPES[entry.dtype])


def _mean_slabs(sources: Sequence[Source], name: str) -> Iterator[Tensor]:
    entry = sources[0].entries[name]
    dtype = DTYPES[entry.dtype]
    for begin, stop in row_groups(entry.shape):
        parts = [source.rows(name, begin, stop) for source in sources]
        if not dtype.is_floating_point:
            if any(not torch.equal(part, parts[0]) for part in parts):
                raise ValueError(
                    f"{name} holds integers that differ, which cannot be averaged."
                )
            yield parts[0]
            continue
        wide = torch.promote_types(dtype, torch.float32)
        total = parts[0].to(wide, copy=True)
        for part in parts[1:]:
            total += part
        yield (total / len(parts)).to(dtype)


def check_alike(
    one: Path, first: Mapping[str, TensorEntry], other: Path, second: Mapping[str, TensorEntry]
) -> None:
    """Raise ValueError, naming tensors, unless two checkpoints have the same tensors."""
    missing, extra = name_problems(first, second)
    problems = [f"only in {one}: {text}" for text in missing]
    problems += [f"only in {other}: {name}" for name in extra]
    problems += [
        f"{name}: {first[name].dtype} {list(first[name].shape)} in {one}, "
        f"{second[name].dtype} {list(second[name].shape)} in {other}"
        for name in sorted(first.keys() & second.keys())
        if (first[name].dtype, first[name].shape) != (second[name].dtype, second[name].shape)
    ]
    if problems:
        raise ValueError(f"these are not checkpoints of one model: {list_problems(problems)}")


def _step_of(folder: Path) -> int | str:
    digits = folder.name.removeprefix("iter_")
    return int(digits) if digits.isdecimal() else RELEASE


def native_steps(output: Path, *sources: str | Path) -> list[tuple[Path, Index]]:
    """Return the steps to read, with their files checked; ValueError for a wrong output."""
    steps = [native_step(source) for source in sources]
    check_place(output, *steps)
    check_run_folder(output)
    steps_with_index = [(step, read_index(step)) for step in steps]
    for step, index in steps_with_index:
        check_files(step, index)
    return steps_with_index


def write_step(
    output: Path,
    number: int | str,
    items: Sequence[Item],
    extra: Mapping[str, Any],
    origin: tuple[Path, Index],
    num_files: int = 1,
) -> Path:
    """Write a step of complete tensors with another step's small files; return its path."""
    check_room(output, sum(item.num_bytes for item in items))
    with fresh_step(output, number) as target:
        new = write_whole(target, items, extra, num_files)
        _copy_small_files(origin[0], target, origin[1])
        return commit(target, output, number, finalize_index(new, target))


def _copy_small_files(step: Path, target: Path, index: Index) -> None:
    """Copy all files that are not tensors from one step's folder to another's."""
    # Files that make a step a Hugging Face folder too, which the copy is not.
    skipped = {INDEX, HF_INDEX, "config.json", *index.files}
    if (step / "tokenizer").is_dir():
        skipped.update(TOKENIZER_FILES)  # copied to the root for the Hugging Face folder
    for entry in sorted(step.iterdir()):
        if entry.name not in skipped:
            copy_durably(entry, target / entry.name)
