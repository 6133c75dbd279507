"""Lists the tensors of checkpoints of any format, verifies their bytes, compares two of them.

Checkpoints of different formats are compared by logical names.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from mcore_base.stores import as_path
from mcore_base.terminal import size_text
from mcore_ckpt.conversion.options import ConvertOptions
from mcore_ckpt.conversion.round_trip import fingerprint
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.formats.dcp import read_dcp_folder
from mcore_ckpt.formats.hf_folder import read_hf_folder
from mcore_ckpt.formats.peft_folder import TENSORS
from mcore_ckpt.formats.recognition import DCP_METADATA, folder_format
from mcore_ckpt.formats.sources import opened
from mcore_ckpt.mapping.row_streams import (
    Progress,
    Rows,
    Source,
    named_with_progress,
    same_bits,
    slabs,
)
from mcore_ckpt.storage.checksums import check_files
from mcore_ckpt.storage.files import Reader
from mcore_ckpt.storage.headers import read_header
from mcore_ckpt.storage.index import DTYPE_BYTES, TensorEntry, check_whole, read_index
from mcore_ckpt.storage.paths import (
    is_complete,
    is_peft_folder,
    latest_step,
    resolve_folder,
    step_folder,
)
from mcore_ckpt.storage.shard_plans import name_problems


@dataclass(frozen=True, slots=True)
class Contents:
    """Names, shapes and files of a checkpoint, without its values."""

    form: str
    """``mcore``, ``hf``, ``megatron`` or ``dcp``."""
    folder: Path
    """Folder of the tensors."""
    tensors: Mapping[str, tuple[str, tuple[int, ...], tuple[tuple[int, ...], ...]]]
    """Dtype, shape, and the offsets of the stored boxes, by name."""
    num_files: int
    """Files of tensors."""
    extra: Mapping[str, Any]
    """Description of the model and other facts that the folder records."""


def find_format(folder: str | Path) -> tuple[str, Path]:
    """Recognize a checkpoint's format.

    Returns:
        The format and the folder that holds the tensors; for a run folder, its latest step.
    """
    path = as_path(folder)
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder: give a run folder or a step folder.")
    step = latest_step(path)
    inside = path if step is None or is_complete(path) else step_folder(path, step)
    if form := folder_format(inside):
        return form, inside
    # resolve_folder's error lists what is missing and which steps exist.
    return "mcore", resolve_folder(path)


def native_step(folder: str | Path) -> Path:
    """Return the step of mcore in a run or step folder; ValueError for other formats."""
    form, step = find_format(folder)
    if form != "mcore":
        raise ValueError(
            f"{step} is a checkpoint in the format {form}, but mcore is required: convert it "
            f"with mcore-ckpt convert {form}-to-mcore. inspect, and verify with --fingerprint, "
            "take any format."
        )
    return step


def contents(folder: str | Path, config: str = "") -> Contents:
    """List the tensors of a checkpoint of any format.

    Raises:
        ValueError: if there is no checkpoint, or ``config`` has no effect.
        CheckpointError: if the checkpoint is damaged.
    """
    form, path = find_format(folder)
    if form == "megatron" and not (path / DCP_METADATA).is_file():
        with opened("megatron", path, ConvertOptions(config=config)) as checkpoint:
            model = {"model": checkpoint.description}
            return _of_entries(form, path, checkpoint.theirs.entries, model)
    if config:
        raise ValueError(
            f"--config {config} has no effect without --compare: {path} is listed without it. "
            "Leave it out."
        )
    if is_peft_folder(path):
        return _of_entries(form, path, read_header(path, TENSORS), {"model_type": "peft"})
    if form == "hf":
        hf = read_hf_folder(path)
        kind = {"model_type": hf.config.get("model_type")}
        return _of_entries(form, path, hf.tensors, kind)
    if (path / DCP_METADATA).is_file():
        dcp = read_dcp_folder(path)
        files = {
            location.file for tensor in dcp.tensors.values() for *_, location in tensor.boxes
        }
        tensors = {
            name: (tensor.dtype, tensor.shape, tuple(offsets for offsets, _, _ in tensor.boxes))
            for name, tensor in dcp.tensors.items()
        }
        return Contents(form, path, tensors, len(files), {"objects": sorted(dcp.objects)})
    index = read_index(path)
    return _of_entries(form, path, index.tensors, index.extra)


def _of_entries(
    form: str, path: Path, entries: Mapping[str, TensorEntry], extra: Mapping[str, Any]
) -> Contents:
    tensors = {
        name: (entry.dtype, entry.shape, tuple(chunk.offsets for chunk in entry.chunks))
        for name, entry in entries.items()
    }
    files = {chunk.file for entry in entries.values() for chunk in entry.chunks}
    return Contents(form, path, tensors, len(files), extra)


def rows(folder: str | Path, config: str = "") -> list[dict[str, Any]]:
    """Return a row for each tensor: name, dtype, shape, bytes, chunks and their layout.

    Arguments and errors are those of ``contents``.
    """
    return [
        {
            "name": name,
            "dtype": dtype,
            "shape": list(shape),
            "bytes": _num_bytes(dtype, shape),
            "chunks": len(boxes),
            "layout": layout(shape, boxes),
        }
        for name, (dtype, shape, boxes) in sorted(contents(folder, config).tensors.items())
    ]


def layout(shape: Sequence[int], boxes: Sequence[Sequence[int]]) -> str:
    """Describe how a tensor is split: ``2 x 1`` for two parts along rows, or ``whole``."""
    if len(boxes) <= 1 or not shape:
        return "whole"
    parts = [len({offsets[dim] for offsets in boxes}) for dim in range(len(shape))]
    text = " x ".join(map(str, parts))
    return text if prod(parts) == len(boxes) else f"{len(boxes)} boxes"


def describe(folder: str | Path, config: str = "") -> str:
    """Format a checkpoint as text; tensors that are alike in many layers share one line.

    Arguments and errors are those of ``contents``.
    """
    checkpoint = contents(folder, config)
    groups: dict[tuple[str, str, tuple[int, ...], str], int] = {}
    total = 0
    for name, (dtype, shape, boxes) in checkpoint.tensors.items():
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        key = (pattern, dtype, shape, layout(shape, boxes))
        groups[key] = groups.get(key, 0) + 1
        total += _num_bytes(dtype, shape)
    lines = [
        f"{checkpoint.folder} ({checkpoint.form})",
        f"{len(checkpoint.tensors)} tensors, {size_text(total)}, {checkpoint.num_files} files",
    ]
    for key, value in sorted(checkpoint.extra.items()):
        lines.append(f"extra.{key}: {value!s:.100}")
    width = max((len(pattern) for pattern, *_ in groups), default=0)
    for (pattern, dtype, shape, cut), count in sorted(groups.items(), key=lambda g: g[0][0]):
        size = size_text(count * _num_bytes(dtype, shape))
        lines.append(
            f"  {pattern:{width}}  x{count:<5d} {dtype:5} {list(shape)!s:18} {cut:10} "
            f"{size:>10}"
        )
    return "\n".join(lines)


def _num_bytes(dtype: str, shape: Sequence[int]) -> int:
    return DTYPE_BYTES[dtype] * prod(shape)


def check(folder: str | Path, on_progress: Progress | None = None) -> tuple[Path, int, int]:
    """Read every byte of a step, small files too, and compare checksums and digests.

    Returns:
        The step folder, the number of its tensors and their bytes.

    Raises:
        CheckpointError: naming the first tensor or file that is damaged.
        ValueError: if there is no checkpoint.
    """
    step = native_step(folder)
    index = read_index(step)
    check_whole(step, index)
    check_files(step, index)
    with Reader(step) as reader:
        source = Source(reader, index.tensors)
        sizes = {name: entry.num_bytes for name, entry in index.tensors.items()}
        for name in named_with_progress(sizes, on_progress, "reading"):
            for _ in slabs(source, name):
                pass
    return step, len(sizes), sum(sizes.values())


def check_fingerprint(
    folder: str | Path, wanted: str, on_progress: Progress | None = None
) -> tuple[Path, int, int]:
    """Read all weights of a checkpoint of any format and compare their fingerprint.

    The fingerprint, which ``convert`` prints, is a hash of the weights' logical names, dtypes,
    shapes and values, equal in all formats. It does not cover config.json, the tokenizer or an
    optimizer's state.

    Returns:
        As ``check``.

    Raises:
        ValueError: if ``wanted`` is not a fingerprint, or there is no checkpoint.
        CheckpointError: if the weights differ, or files are damaged.
    """
    if not re.fullmatch(r"[0-9a-f]{32}", wanted):
        raise ValueError(
            f"--fingerprint {wanted} is not a fingerprint: give the 32 digits and letters that "
            "convert printed."
        )
    form, path = find_format(folder)
    options = ConvertOptions(keep_unknown_config_fields=form == "hf")
    with opened(form, path, options) as checkpoint:
        actual = fingerprint(checkpoint.ours, on_progress, trusts_checksums=False)
        entries = checkpoint.ours.entries.values()
        num_bytes = sum(entry.num_bytes for entry in entries)
        if actual != wanted:
            raise CheckpointError(
                f"{path} has the fingerprint {actual}, not {wanted}: its weights differ from "
                "the converted ones. Copy the folder again, or convert again."
            )
        return path, len(entries), num_bytes


def differences(
    one: str | Path, other: str | Path, config: str = "", on_progress: Progress | None = None
) -> list[str]:
    """Compare two checkpoints of any layouts and formats.

    Two mcore steps are compared completely, including the optimizer; otherwise only weights.

    Args:
        one: a run or step folder, or a folder of another format.
        other: the folder to compare it with.
        config: config.json of the model, for checkpoints that do not name their model.
        on_progress: called for each tensor that both checkpoints hold.

    Returns:
        One message for each tensor that differs or is missing on one side; empty if none is.

    Raises:
        ValueError: if a folder holds no checkpoint, or neither names its model.
        CheckpointError: if files are damaged.
    """
    forms = [find_format(one), find_format(other)]
    is_ours = all(form == "mcore" for form, _ in forms)
    with ExitStack() as stack:
        sides: list[Rows] = []
        took_config = False
        for form, folder in forms:
            if is_ours:
                reader = stack.enter_context(Reader(folder))
                sides.append(Source(reader, read_index(folder).tensors))
            else:
                checkpoint = stack.enter_context(
                    opened(form, folder, ConvertOptions(config=config))
                )
                sides.append(checkpoint.ours)
                took_config |= checkpoint.took_config
        if config and not took_config:
            raise ValueError(
                f"--config {config} has no effect: both checkpoints themselves name their "
                "model. Leave it out."
            )
        return _differences([folder for _, folder in forms], sides, on_progress)


def _differences(
    folders: Sequence[Path], sides: Sequence[Rows], on_progress: Progress | None
) -> list[str]:
    a, b = sides
    missing, extra = name_problems(a.entries, b.entries)
    messages = [f"only in {folders[0]}: {text.split(' ')[0]}" for text in missing]
    messages += [f"only in {folders[1]}: {name}" for name in extra]
    both = sorted(a.entries.keys() & b.entries.keys())
    sizes = {name: a.entries[name].num_bytes for name in both}
    for name in named_with_progress(sizes, on_progress, "comparing"):
        x, y = a.entries[name], b.entries[name]
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            messages.append(f"{name}: {x.dtype} {list(x.shape)} and {y.dtype} {list(y.shape)}")
            continue
        pairs = zip(slabs(a, name), slabs(b, name), strict=True)
        if any(not same_bits(p, q) for p, q in pairs):
            messages.append(f"{name}: values differ")
    return messages
