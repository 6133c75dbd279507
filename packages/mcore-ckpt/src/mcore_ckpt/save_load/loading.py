"""Loads logical tensors of a checkpoint into this rank's shards, under any layout.

Each rank reads the index, finds the chunks that intersect its boxes and reads those rows
directly into its memory. Names, shapes and dtypes are compared before anything is read, and all
differences are listed. An error on one rank is raised on all ranks.
"""

import json
import logging
import os
import socket
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mcore_base.stores import as_path
from mcore_ckpt.config import StrictnessConfig
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.families.common.shapes import check_description
from mcore_ckpt.save_load.claims import build_claims, piece_box
from mcore_ckpt.save_load.rank_agreement import gather_json, raise_on_all_ranks
from mcore_ckpt.save_load.tensor_exchange import Move, exchange, travel_device
from mcore_ckpt.storage.boxes import Box, shift_box
from mcore_ckpt.storage.checksums import check_files
from mcore_ckpt.storage.files import DTYPES, Reader, narrow_to_box
from mcore_ckpt.storage.index import Index, StoredBox, TensorEntry, read_index
from mcore_ckpt.storage.paths import INDEX, is_complete, resolve_folder
from mcore_ckpt.storage.shard_plans import (
    Claim,
    SharedBox,
    Write,
    list_problems,
    load_differences,
    name_problems,
    plan_reads,
    plan_sharing,
)
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.sharding import Piece, Shard

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
    share: Literal["auto", "always", "never"] = "auto",
    adapter_base: Path | None = None,
) -> Mapping[str, Any]:
    """Fill this rank's pieces from a checkpoint saved under any layout.

    Communicates over ``world``: all ranks call it, each with its own shards. If any rank
    fails, all raise; pieces may then be partly filled.

    Args:
        folder: a step folder, a run folder for its latest step, or a folder of another format,
            whose weights get the names ``model.<logical name>``.
        shards: logical name to pieces, which are written in place.
        world: the ranks that load together. A tensor of the checkpoint that none of them loads
            is an error. Default: this rank loads alone.
        strictness: treatment of names, shapes and dtypes that differ; by default all are
            errors, listed together.
        checksums: verify the bytes that are read, and all small files of the step.
        cast: convert dtypes that differ, regardless of ``strictness``.
        ignore: prefixes of names in the checkpoint that need not be loaded, such as
            ``optimizer.``.
        share: whether a box that several ranks of a host need is read by one of them and sent
            to the others over ``world``. auto: for tensors on a GPU; on the CPU the system's
            file cache is faster.
        adapter_base: Hugging Face folder of the base model of PEFT adapters; None: the folder
            named in the adapters' config.

    Returns:
        ``extra`` as saved; for another format the model's description.

    Raises:
        ValueError: if there is no checkpoint, or names, shapes or dtypes differ.
        CheckpointError: if files are missing, cut short or damaged.
    """
    with ExitStack() as stack:
        with raise_on_all_ranks(world):
            folder = resolve_folder(folder, takes_any=True)
            index, reader, fingerprint = stack.enter_context(
                opened_checkpoint(folder, checksums=checksums, adapter_base=adapter_base)
            )
            if checksums and index.files:  # folders of other formats list none
                check_files(folder, index, world.rank, world.size)
            claims = build_claims(shards)
        gathered = gather_json([fingerprint, list(claims)], world)
        if any(other != fingerprint for other, _ in gathered):
            raise CheckpointError(
                f"ranks read different indices in {folder}: give a folder that all hosts share."
            )
        names = {name for _, mine in gathered for name in mine}
        stored = [n for n in index.tensors if n in names or not n.startswith(tuple(ignore))]
        problems = name_problems(names, stored)
        with raise_on_all_ranks(world):
            skipped = _check_wanted(folder, index, claims, problems, strictness, cast=cast)
        loaded = {n: s for n, s in shards.items() if n in index.tensors and n not in skipped}
        if world.size == 1 or share == "never":
            with raise_on_all_ranks(world):
                _read(reader, loaded, index.tensors, ())
            return index.extra
        pieces = (piece.data for shard in shards.values() for piece in shard.pieces)
        device = travel_device(pieces, world)
        shared: list[SharedBox] = []
        if share == "always" or device.type != "cpu":
            shared = _plan_shared({name: claims[name] for name in loaded}, index, world)
        from_others = {one.write for one in shared if world.rank in one.others}
        with raise_on_all_ranks(world):
            _read(reader, loaded, index.tensors, from_others)
        _spread(shared, loaded, world, device)
        return index.extra


@contextmanager
def opened_checkpoint(
    folder: Path, *, checksums: bool = True, adapter_base: Path | None = None
) -> Iterator[tuple[Index, Reader, int]]:
    """Open a step of mcore, or a folder of another format as one.

    Yields:
        The index, a reader of its chunks, and a hash that is equal on ranks that see the same
        folder.

    Raises:
        ValueError: as ``read_index``, or if no family here can express the folder's model.
        CheckpointError: if files are missing or damaged.
    """
    if is_complete(folder):
        fingerprint = zlib.crc32((folder / INDEX).read_bytes())
        index = read_index(folder)
        shapes = (entry.shape for entry in index.tensors.values())
        check_description(index.extra.get("model") or {}, shapes, str(folder))
        with Reader(folder, checksums=checksums) as reader:
            yield index, reader, fingerprint
        return
    from mcore_ckpt.save_load.foreign_loading import opened_foreign

    with opened_foreign(folder, adapter_base) as (index, reader):
        names = {name: entry.shape for name, entry in index.tensors.items()}
        digest_text = json.dumps([index.extra, names], sort_keys=True)
        yield index, reader, zlib.crc32(digest_text.encode())


def num_file_threads() -> int:
    """Return the number of threads that read or write files: one for each core, 4 to 16.

    Without CPU affinity each rank of a host counts all cores. A core computes checksums of
    1 to 2 GB/s, less than memory and most disks deliver, so threads run in parallel. With few
    cores, one thread waits for the disk while others compute and copy.
    """
    has_affinity = hasattr(os, "sched_getaffinity")  # macOS lacks it
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return min(16, max(4, num_cores))


def describe_checkpoint(folder: str | Path, adapter_base: Path | None = None) -> Index:
    """Return the index of a step, or an equivalent index of a folder of another format.

    Args:
        folder: a run folder, a step folder, or a folder of another format.
        adapter_base: see ``load``.

    Raises:
        ValueError: if there is no checkpoint.
        CheckpointError: if files are missing or damaged.
    """
    step = resolve_folder(folder, takes_any=True)
    with opened_checkpoint(step, adapter_base=adapter_base) as (index, _, _):
        return index


def _check_wanted(
    folder: Path,
    index: Index,
    wanted: Mapping[str, Claim],
    names: tuple[list[str], list[str]],
    strictness: StrictnessConfig,
    *,
    cast: bool,
) -> Mapping[str, str]:
    """Compare this rank's claims with the index.

    Returns:
        A message for each tensor that is skipped because its shape differs, by name.
    """
    missing, unexpected = names
    problems = [
        *_answer(strictness.on_missing, "missing in the checkpoint", missing),
        *_answer(strictness.on_unexpected, "in the checkpoint, not in the model", unexpected),
    ]
    remedies = ["--dist-ckpt-strictness log_all"] * bool(problems)
    skipped: Mapping[str, str] = {}
    differences = load_differences(wanted, index.tensors)
    problems += differences.faults
    if strictness.dist_ckpt_shape_mismatch == "skip":
        skipped = differences.shapes
        _answer("log", "not loaded", list(skipped.values()))
    else:
        problems += differences.shapes.values()
        remedies += ["--dist-ckpt-shape-mismatch skip"] * bool(differences.shapes)
    if strictness.dist_ckpt_dtype_mismatch == "cast" and not cast:
        _answer("log", "cast", list(differences.dtypes.values()))
    elif not cast:
        problems += differences.dtypes.values()
        remedies += ["--dist-ckpt-dtype-mismatch cast"] * bool(differences.dtypes)
    if problems:
        advice = (
            f"\nEverything else is loaded with {' and '.join(remedies)}." if remedies else ""
        )
        raise ValueError(f"cannot load {folder}: {list_problems(problems)}{advice}")
    return skipped


def _plan_shared(wanted: Mapping[str, Claim], index: Index, world: Axis) -> list[SharedBox]:
    """Return the boxes that one rank of a host reads for others; all-gathers over ``world``."""
    table = {name: claim.to_json() for name, claim in wanted.items()}
    gathered = gather_json([socket.gethostname(), table], world)
    claims = [{n: Claim.from_json(v) for n, v in mine.items()} for _, mine in gathered]
    return plan_sharing(claims, [host for host, _ in gathered], index.tensors.keys())


def _spread(
    shared: Sequence[SharedBox], shards: Mapping[str, Shard], world: Axis, device: torch.device
) -> None:
    """Send the shared boxes from the ranks that read them to the ranks that need them."""
    live = {
        Write(name, piece_box(piece)): piece.data
        for name, shard in shards.items()
        for piece in shard.pieces
    }
    moves = [
        Move(one.reader, other, one.num_bytes, one.write)
        for one in shared
        for other in one.others
    ]

    def take(one: Write, data: Tensor) -> None:
        target = live[one].detach()
        target.copy_(data.view(target.dtype).view(target.shape))

    exchange(moves, lambda one: live[one], take, world=world, device=device)


def _answer(level: str, kind: str, problems: Sequence[str]) -> list[str]:
    """Return the problems if ``level`` is raise; log the problems if it is log."""
    sentences = [f"{kind}: {problem}" for problem in problems]
    if sentences and level == "log":
        log.warning("%s", list_problems(sentences))
    return sentences if level == "raise" else []


def read_tensor(
    folder: str | Path, name: str, *, checksums: bool = True, index: Index | None = None
) -> Tensor:
    """Read one complete tensor of a step folder to the CPU.

    Args:
        folder: a step folder.
        name: logical name as saved, ``model.final_norm.weight``.
        checksums: verify the bytes that are read.
        index: index of the folder if the caller has read it, else None.

    Raises:
        ValueError: if the checkpoint has no such tensor; names similar ones.
    """
    tensors = (index or read_index(folder)).tensors
    if name not in tensors:
        raise ValueError(f"{folder} does not hold {name_problems([name], tensors)[0][0]}")
    entry = tensors[name]
    whole = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    with Reader(as_path(folder), checksums=checksums) as reader:
        for chunk in entry.chunks:
            box = (chunk.offsets, chunk.lengths)
            reader.read(name, entry, chunk, box, narrow_to_box(whole, box))
    return whole


def _read(
    reader: Reader,
    shards: Mapping[str, Shard],
    tensors: Mapping[str, TensorEntry],
    from_others: Collection[Write],
) -> None:
    jobs: list[tuple[str, StoredBox, Box, Piece]] = []
    for name, shard in shards.items():
        entry = tensors[name]
        for piece in shard.pieces:
            if 0 in piece.lengths or Write(name, piece_box(piece)) in from_others:
                continue
            reads = plan_reads(entry, piece_box(piece))
            jobs += [(name, entry.chunks[read.chunk], read.box, piece) for read in reads]

    def read_one(name: str, chunk: StoredBox, box: Box, piece: Piece) -> None:
        target = narrow_to_box(piece.data.detach(), shift_box(box, piece.offsets))
        reader.read(name, tensors[name], chunk, box, target)

    # Reads in file order are the fastest for disks and their read-ahead.
    jobs.sort(key=lambda job: (job[1].file, job[1].offset))
    with ThreadPoolExecutor(num_file_threads()) as pool:
        waiting = [pool.submit(read_one, *job) for job in jobs]
        try:
            for one in waiting:
                one.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
