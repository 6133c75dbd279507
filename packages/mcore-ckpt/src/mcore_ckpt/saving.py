"""Save logical tensors: each byte once, spread over the ranks, whole or not at all.

Every rank says what it holds, all compute the same plan, each writes one safetensors file.
When all files are durable, rank 0 writes the index and then moves the pointer: a kill at any
moment leaves the last checkpoint as it was. Ranks talk JSON over tensor collectives.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from mcore_ckpt.agreement import agreed, gather_json
from mcore_ckpt.boxes import Box
from mcore_ckpt.files import DTYPE_NAMES, Item, slabs_of, write_file
from mcore_ckpt.index import Chunk, Index, TensorEntry
from mcore_ckpt.locking import FolderLock
from mcore_ckpt.paths import commit, copy_durably, make_fresh, step_folder, write_durably
from mcore_ckpt.planning import Claim, Write, plan_writes
from mcore_parallel.mesh import Axis
from mcore_parallel.sharding import Piece, Shard

log = logging.getLogger(__name__)


def save(
    run_folder: str | Path,
    step: int | str,
    shards: Mapping[str, Shard],
    *,
    world: Axis,
    extra: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    folders: Mapping[str, Path] | None = None,
    replace: bool = False,
) -> Path:
    """Save what all ranks hold together as one step; returns when it is durable.

    Communicates over ``world`` several times: all ranks call it, each with what it holds.
    If any rank fails, all raise and the previous checkpoint stands.

    Args:
        run_folder: must be one folder for all ranks, on every host.
        step: iteration, or ``"release"``.
        shards: logical name to what this rank holds; pieces are read in place. Pieces of
            shards whose ``is_owner`` is true must cover each tensor exactly, counted over all
            ranks; equal boxes count once.
        world: the ranks that save together; one rank needs no process group.
        extra: JSON kept in the index; rank 0's counts.
        files: small files of the step by name, such as ``recipe.toml``; rank 0's count.
        folders: folders to copy into the step by name, such as ``tokenizer``; rank 0's count.
        replace: take the place of a complete checkpoint of this step instead of refusing.

    Returns:
        The step's folder.

    Raises:
        ValueError: if shards contradict their pieces or each other, leave holes or overlap.
        RuntimeError: if the step exists, another job writes to the run folder, or the ranks
            do not see one folder.
    """
    lock = FolderLock(run_folder)
    try:
        begun = begin(run_folder, step, shards, lock, world=world, replace=replace)
        chunks: dict[str, Any] = {}
        with agreed(world):
            chunks = write(begun, world.rank, begun.memory)
        return finish(begun, chunks, world=world, extra=extra, files=files, folders=folders)
    finally:
        lock.release()


@dataclass(frozen=True, slots=True)
class Begun:
    """A save that is planned, and whose empty folder is there."""

    run_folder: Path
    """Holds the pointer."""
    step: int | str
    """What is saved."""
    folder: Path
    """Where files go; not always the step's final name."""
    claims: list[Any]
    """What each rank holds, as JSON."""
    writes: list[Write]
    """This rank's part, in file order."""
    memory: list[Tensor]
    """The memory of each write."""


def begin(
    run_folder: str | Path,
    step: int | str,
    shards: Mapping[str, Shard],
    lock: FolderLock,
    *,
    world: Axis,
    replace: bool,
) -> Begun:
    """Plan a save and make its folder; the first part of ``save``, with its arguments.

    Communicates over ``world``; rank 0 takes ``lock``, which the caller releases.
    """
    run_folder = Path(run_folder)
    with agreed(world):
        final = step_folder(run_folder, step)
        mine = claims_of(shards)
    claims = gather_json({name: claim.to_json() for name, claim in mine.items()}, world)
    writes = plan_writes([_claims(told) for told in claims])[world.rank]
    made = ""
    with agreed(world):
        if world.rank == 0:
            lock.acquire()
            made = str(make_fresh(final, replace=replace))
    folder = Path(gather_json(made, world)[0])
    memory = [_memory(write, shards[write.name]) for write in writes]
    return Begun(run_folder, step, folder, claims, writes, memory)


def write(begun: Begun, rank: int, memory: Sequence[Tensor]) -> dict[str, Any]:
    """Write this rank's file; talks to nobody, so that a thread may do it.

    Args:
        begun: what ``begin`` gave.
        rank: in the world of the save.
        memory: of each write: its own, or a copy.

    Returns:
        The file's name, size and chunks as JSON, for ``finish``.
    """
    if not begun.writes:
        return {}
    path = begun.folder / f"rank_{rank:05d}.safetensors"
    shapes = {name: value[0] for name, value in begun.claims[rank].items()}
    items = [
        Item(
            _key(one, tuple(shapes[one.name])),
            DTYPE_NAMES[data.dtype],
            one.box[1],
            partial(slabs_of, data),
        )
        for one, data in zip(begun.writes, memory, strict=True)
    ]
    written = write_file(path, items)
    rows = [
        [one.name, *one.box, place.offset, place.checksums]
        for one, place in zip(begun.writes, written, strict=True)
    ]
    return {"file": path.name, "bytes": path.stat().st_size, "chunks": rows}


def finish(
    begun: Begun,
    chunks: Mapping[str, Any],
    *,
    world: Axis,
    extra: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    folders: Mapping[str, Path] | None = None,
) -> Path:
    """Make a written step the newest; the last part of ``save``, with its arguments.

    Communicates over ``world``; ``chunks`` is what ``write`` gave on this rank.
    """
    told = gather_json(chunks, world)
    with agreed(world):
        if world.rank == 0:
            index = _index(begun.folder, begun.claims, told, extra or {})
            for name, source in (folders or {}).items():
                copy_durably(Path(source), begun.folder / name)
            for name, content in (files or {}).items():
                write_durably(begun.folder / name, content)
            commit(begun.folder, begun.run_folder, begun.step, index.to_bytes())
    final = step_folder(begun.run_folder, begun.step)
    log.info("saved step %s to %s", begun.step, final)
    return final


def claims_of(shards: Mapping[str, Shard]) -> dict[str, Claim]:
    """Describe what this rank holds; pieces without elements are left out.

    Raises:
        ValueError: if a piece's memory has not the shape or dtype that its shard says, or
            files have no such dtype.
    """
    claims = {}
    for name, shard in shards.items():
        for piece in shard.pieces:
            if tuple(piece.data.shape) != tuple(piece.lengths):
                raise ValueError(
                    f"{name}: a piece of lengths {tuple(piece.lengths)} has memory of shape "
                    f"{tuple(piece.data.shape)}"
                )
            if piece.data.dtype != shard.dtype:
                raise ValueError(
                    f"{name}: a {shard.dtype} shard has a piece of {piece.data.dtype}"
                )
        if shard.dtype not in DTYPE_NAMES:
            raise ValueError(f"{name}: safetensors files have no {shard.dtype}")
        boxes = tuple(box_of(piece) for piece in shard.pieces if 0 not in piece.lengths)
        claims[name] = Claim(
            tuple(shard.shape), DTYPE_NAMES[shard.dtype], shard.is_owner, boxes
        )
    return claims


def box_of(piece: Piece) -> Box:
    """Return the region of a piece."""
    return tuple(piece.offsets), tuple(piece.lengths)


def _claims(told: Mapping[str, Any]) -> dict[str, Claim]:
    return {name: Claim.from_json(value) for name, value in told.items()}


def _memory(write: Write, shard: Shard) -> Tensor:
    return next(piece.data for piece in shard.pieces if box_of(piece) == write.box)


def _key(write: Write, shape: tuple[int, ...]) -> str:
    offsets, lengths = write.box
    if lengths == tuple(shape):
        return write.name
    cuts = ",".join(f"{o}:{o + n}" for o, n in zip(offsets, lengths, strict=True))
    return f"{write.name}[{cuts}]"


def _index(folder: Path, claims: list[Any], told: list[Any], extra: Mapping[str, Any]) -> Index:
    files: dict[str, int] = {}
    chunks: dict[str, list[Chunk]] = {name: [] for mine in claims for name in mine}
    for rank, answer in enumerate(told):
        if not answer:
            continue
        name, size = answer["file"], answer["bytes"]
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise RuntimeError(
                f"rank {rank} wrote {size} bytes to {path}, which rank 0 does not see: the "
                "folder to save to must be shared by all hosts."
            )
        files[name] = size
        for tensor, offsets, lengths, offset, checksums in answer["chunks"]:
            chunks[tensor].append(
                Chunk(name, offset, tuple(offsets), tuple(lengths), tuple(checksums))
            )
    tensors = {}
    for mine in claims:
        for name, value in mine.items():
            claim = Claim.from_json(value)
            tensors[name] = TensorEntry(claim.shape, claim.dtype, tuple(chunks[name]))
    return Index(tensors, extra, files)
