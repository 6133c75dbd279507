"""Looking at a checkpoint: what it holds, whether it is sound, how two of them differ."""

import re
from pathlib import Path
from typing import Any

from mcore_ckpt.files import Reader
from mcore_ckpt.index import TensorEntry, read_index
from mcore_ckpt.paths import resolve_folder
from mcore_ckpt.planning import name_problems
from mcore_ckpt.streams import Source, same_bits, slabs


def rows(folder: str | Path) -> list[dict[str, Any]]:
    """List a checkpoint's tensors: name, dtype, shape, bytes, chunks."""
    return [
        {
            "name": name,
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "bytes": entry.num_bytes,
            "chunks": len(entry.chunks),
        }
        for name, entry in sorted(read_index(resolve_folder(folder)).tensors.items())
    ]


def describe(folder: str | Path) -> str:
    """Draw a checkpoint as text; equal tensors of many layers stand in one line."""
    step = resolve_folder(folder)
    index = read_index(step)
    groups: dict[tuple[str, str, tuple[int, ...]], list[TensorEntry]] = {}
    for name, entry in index.tensors.items():
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        groups.setdefault((pattern, entry.dtype, entry.shape), []).append(entry)
    total = sum(entry.num_bytes for entry in index.tensors.values())
    lines = [
        f"{step}",
        f"{len(index.tensors)} tensors, {total / 1e9:.3f} GB, {len(index.files)} files",
    ]
    for key, value in sorted(index.extra.items()):
        lines.append(f"extra.{key}: {value!s:.100}")
    width = max((len(pattern) for pattern, _, _ in groups), default=0)
    for (pattern, dtype, shape), entries in sorted(groups.items(), key=lambda g: g[0][0]):
        size = sum(entry.num_bytes for entry in entries) / 1e6
        lines.append(
            f"  {pattern:{width}}  x{len(entries):<5d} {dtype:5} {list(shape)!s:18} "
            f"{size:12.3f} MB"
        )
    return "\n".join(lines)


def check(folder: str | Path) -> tuple[Path, int, int]:
    """Read every byte and compare checksums.

    Returns:
        The step folder, how many tensors it holds and of how many bytes.

    Raises:
        RuntimeError: naming the first tensor that is damaged.
        ValueError: if there is no checkpoint.
    """
    step = resolve_folder(folder)
    index = read_index(step)
    with Reader(step) as reader:
        source = Source(reader, index.tensors)
        for name in index.tensors:
            for _ in slabs(source, name):
                pass
    total = sum(entry.num_bytes for entry in index.tensors.values())
    return step, len(index.tensors), total


def differences(one: str | Path, other: str | Path) -> list[str]:
    """Compare two checkpoints, whatever layouts they were saved under.

    Returns:
        One sentence a tensor that is missing in one or differs; empty if they are equal.
    """
    steps = [resolve_folder(one), resolve_folder(other)]
    first, second = (read_index(step).tensors for step in steps)
    missing, extra = name_problems(first, second)
    found = [f"only in {steps[0]}: {text.split(' ')[0]}" for text in missing]
    found += [f"only in {steps[1]}: {name}" for name in extra]
    with Reader(steps[0]) as reader, Reader(steps[1]) as second_reader:
        a, b = Source(reader, first), Source(second_reader, second)
        for name in sorted(first.keys() & second.keys()):
            x, y = first[name], second[name]
            if (x.dtype, x.shape) != (y.dtype, y.shape):
                found.append(f"{name}: {x.dtype} {list(x.shape)} and {y.dtype} {list(y.shape)}")
                continue
            pairs = zip(slabs(a, name), slabs(b, name), strict=True)
            if any(not same_bits(p, q) for p, q in pairs):
                found.append(f"{name}: values differ")
    return found
