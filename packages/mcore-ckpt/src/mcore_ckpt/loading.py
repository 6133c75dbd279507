"""Load logical tensors into whatever this rank holds, whoever saved them.

Each rank reads the index, finds which chunks its boxes lie in and reads those rows straight
into its memory. Names, shapes and dtypes are compared before anything is read, with every
difference listed; a fault on one rank is raised on all.
"""

import logging
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt.agreement import agreed, gather_json
from mcore_ckpt.boxes import shifted
from mcore_ckpt.config import StrictnessConfig
from mcore_ckpt.files import DTYPES, Reader
from mcore_ckpt.index import Index, TensorEntry, read_index
from mcore_ckpt.paths import INDEX, resolve_folder
from mcore_ckpt.planning import listed, load_differences, name_problems, plan_reads
from mcore_ckpt.saving import box_of, claims_of
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.sharding import Shard

log = logging.getLogger(__name__)

STRICT = StrictnessConfig()
"""Every difference is an error."""


def load(
    folder: str | Path,
    shards: Mapping[str, Shard],
    *,
    world: Axis = SINGLE,
    strictness: StrictnessConfig = STRICT,
    checksums: bool = True,
    cast: bool = False,
    ignore: Sequence[str] = (),
) -> Mapping[str, Any]:
    """Fill this rank's pieces from a checkpoint saved under any layout.

    Communicates over ``world``: all ranks call it, each with what it wants. If any rank
    fails, all raise; pieces may then be partly filled.

    Args:
        folder: a step folder, or a run folder for its latest step.
        shards: logical name to pieces, which are written in place.
        world: the ranks that load together.
        strictness: what to do about names, shapes and dtypes that differ; each kind is an
            error that lists them all, unless told otherwise.
        checksums: check the bytes that are read.
        cast: convert dtypes that differ, whatever ``strictness`` says of them.
        ignore: beginnings of names in the checkpoint that nobody need ask for, such as
            ``optimizer.``.

    Returns:
        ``extra`` as it was saved.

    Raises:
        ValueError: if there is no checkpoint, or names, shapes or dtypes differ.
        RuntimeError: if files are missing, cut short or damaged.
    """
    with agreed(world):
        folder = resolve_folder(folder)
        index = read_index(folder)
        wanted = claims_of(shards)
        fingerprint = zlib.crc32((folder / INDEX).read_bytes())
    told = gather_json([fingerprint, list(wanted)], world)
    if any(other != fingerprint for other, _ in told):
        raise RuntimeError(
            f"ranks read different indices in {folder}: is it one shared folder?"
        )
    names = {name for _, mine in told for name in mine}
    held = [n for n in index.tensors if n in names or not n.startswith(tuple(ignore))]
    missing, unasked = name_problems(names, held)
    problems = [
        *_answer(strictness.on_missing, "missing in the checkpoint", missing),
        *_answer(strictness.on_unasked, "in the checkpoint, unasked for", unasked),
    ]
    skipped: Mapping[str, str] = {}
    with agreed(world):
        found = load_differences(wanted, index.tensors)
        problems += found.faults
        if strictness.dist_ckpt_shape_mismatch == "skip":
            skipped = found.shapes
            _answer("log", "left as it is", list(skipped.values()))
        else:
            problems += found.shapes.values()
        if strictness.dist_ckpt_dtype_mismatch == "cast" and not cast:
            _answer("log", "cast", list(found.dtypes.values()))
        elif not cast:
            problems += found.dtypes.values()
        if problems:
            raise ValueError(f"cannot load {folder}: {listed(problems)}")
    with agreed(world):
        taken = {name: shard for name, shard in shards.items() if name not in skipped}
        _read(folder, taken, index.tensors, checksums=checksums)
    return index.extra


def _answer(level: str, kind: str, problems: Sequence[str]) -> list[str]:
    """Return what is an error, log what is to be logged."""
    told = [f"{kind}: {problem}" for problem in problems]
    if told and level == "log":
        log.warning("%s", listed(told))
    return told if level == "raise" else []


def read_tensor(
    folder: str | Path, name: str, *, checksums: bool = True, index: Index | None = None
) -> Tensor:
    """Read one whole tensor of a step folder onto the CPU.

    Args:
        folder: a step folder.
        name: logical name as saved, ``model.final_norm.weight``.
        checksums: check the bytes that are read.
        index: of the folder, if read before.

    Raises:
        ValueError: if the checkpoint has no such tensor; names the nearest.
    """
    tensors = (index or read_index(folder)).tensors
    if name not in tensors:
        raise ValueError(f"{folder} holds no {name_problems([name], tensors)[0][0]}")
    entry = tensors[name]
    whole = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    with Reader(Path(folder), checksums=checksums) as reader:
        for chunk in entry.chunks:
            box = (chunk.offsets, chunk.lengths)
            view = whole
            for dim, (offset, length) in enumerate(zip(*box, strict=True)):
                view = view.narrow(dim, offset, length)
            reader.read(name, entry, chunk, box, view)
    return whole


def _read(
    folder: Path,
    shards: Mapping[str, Shard],
    tensors: Mapping[str, TensorEntry],
    *,
    checksums: bool,
) -> None:
    with Reader(folder, checksums=checksums) as reader:
        jobs = []
        for name in shards.keys() & tensors.keys():
            entry = tensors[name]
            for piece in shards[name].pieces:
                if 0 in piece.lengths:
                    continue
                for read in plan_reads(entry, box_of(piece)):
                    chunk = entry.chunks[read.chunk]
                    jobs.append((chunk.file, chunk.offset, name, chunk, read.box, piece))
        # In file order, which disks and their read-ahead like best.
        for _, _, name, chunk, box, piece in sorted(jobs, key=lambda job: job[:2]):
            target = piece.data.detach()
            for dim, (offset, length) in enumerate(
                zip(*shifted(box, piece.offsets), strict=True)
            ):
                target = target.narrow(dim, offset, length)
            reader.read(name, tensors[name], chunk, box, target)
