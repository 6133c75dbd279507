"""Saves logical tensors as one step: each box is written once, by one rank.

1. ``begin``: ranks exchange the boxes that they hold (their claims) and compute the same plan,
   which assigns each box to one writer. Rank 0 locks the run folder and makes the step folder.
2. ``write``: each rank writes and flushes its safetensors files; no communication.
3. ``commit_step``, on rank 0: writes ``index.json``, then the pointer to the newest step.

A step is complete once its index exists, and the index is renamed into place after all files
are durable: a kill at any moment leaves the previous checkpoint intact. ``save`` calls the
three parts in turn; a background save runs the second in a thread. Ranks exchange JSON as
bytes over tensor collectives.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from mcore_base.atomic_files import copy_durably, write_durably
from mcore_base.stores import as_path
from mcore_ckpt.config import RetentionConfig
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.save_load.attachments import Attachments
from mcore_ckpt.save_load.claims import piece_box
from mcore_ckpt.save_load.hf_saving import HFView, assemble, plan_hf, put_tokenizer_at_root
from mcore_ckpt.save_load.plan_cache import PlanCache
from mcore_ckpt.save_load.rank_agreement import gather_json, raise_on_all_ranks
from mcore_ckpt.save_load.retention import prune
from mcore_ckpt.save_load.tensor_exchange import travel_device
from mcore_ckpt.storage.checksums import finalize_index
from mcore_ckpt.storage.files import Item, cut_slabs, write_file
from mcore_ckpt.storage.folder_lock import FolderLock
from mcore_ckpt.storage.index import (
    DTYPE_BYTES,
    FileEntry,
    Index,
    StoredBox,
    chunk_text,
    row_text,
)
from mcore_ckpt.storage.paths import commit, make_fresh, step_folder
from mcore_ckpt.storage.shard_plans import Claim, PlannedTensor, Write
from mcore_parallel.mesh import Axis
from mcore_parallel.sharding import Shard

log = logging.getLogger(__name__)

KEEP_ALL = RetentionConfig()
"""Retention that deletes nothing."""


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """A planned save, whose empty folder exists."""

    run_folder: Path
    """Folder with the pointer."""
    step: int | str
    """Iteration, or ``release``."""
    folder: Path
    """Folder to write files to; not always the step's final name."""
    lock: FolderLock
    """Taken by rank 0; the caller releases it."""
    claims: Sequence[Mapping[str, Claim]]
    """Claims of each rank."""
    outputs: Mapping[str, Sequence[PlannedTensor]]
    """Entries of this rank's files, by file name."""
    memory: list[Tensor]
    """Tensor of each section of each entry, in the order of ``outputs``; read in place."""
    hf_files: Mapping[str, bytes]
    """Small files that make the step a Hugging Face folder; empty: a native checkpoint."""
    attachments: Attachments
    """JSON, small files and folders of the step."""


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
    hf: HFView | None = None,
    retention: RetentionConfig = KEEP_ALL,
    plans: PlanCache | None = None,
) -> Path:
    """Save the shards of all ranks as one step; returns when it is durable.

    Communicates over ``world`` several times: all ranks call it, each with its own shards. If
    any rank fails, all raise and the previous checkpoint stays.

    Args:
        run_folder: one folder that all ranks share, on every host.
        step: iteration, or ``"release"``.
        shards: logical name to this rank's shard; pieces are read in place. Pieces of shards
            whose ``is_owner`` is true must cover each tensor exactly, counted over all ranks;
            equal boxes count once, and must hold equal numbers.
        world: the ranks that save together; one rank needs no process group.
        extra: JSON kept in the index; taken from rank 0.
        files: small files of the step by name, such as ``recipe.toml``; taken from rank 0.
        folders: folders to copy into the step by name, such as ``tokenizer``; from rank 0.
        replace: replace a complete checkpoint of this step instead of refusing.
        hf: make the step a Hugging Face folder too, of the shards named ``model.``; None: no.
        retention: which older steps are deleted once this one is durable.
        plans: kept by the caller between saves, so that unchanged ranks plan and compare
            replicas only once; None: plan and compare in this call.

    Returns:
        The step's folder.

    Raises:
        ValueError: before anything is written, if shards contradict their pieces or each
            other, leave holes or overlap, replicas differ, or ``extra``, ``files`` or
            ``folders`` are invalid.
        CheckpointError: if the step exists, another job writes to the run folder, or the ranks
            do not see one folder.
    """
    lock = FolderLock(run_folder)
    attachments = Attachments(extra=extra or {}, files=files or {}, folders=folders or {})
    try:
        planned = begin(
            run_folder,
            step,
            shards,
            lock,
            world=world,
            replace=replace,
            attachments=attachments,
            hf=hf,
            plans=plans,
        )
        chunks: dict[str, Any] = {}
        with raise_on_all_ranks(world):
            chunks = write(planned, [[tensor] for tensor in planned.memory])
        reports = gather_json(chunks, world)
        with raise_on_all_ranks(world):
            if world.rank == 0:
                commit_step(planned, reports, retention)
    finally:
        lock.release()
    return step_folder(run_folder, step)


def begin(
    run_folder: str | Path,
    step: int | str,
    shards: Mapping[str, Shard],
    lock: FolderLock,
    *,
    world: Axis,
    replace: bool,
    attachments: Attachments,
    hf: HFView | None = None,
    plans: PlanCache | None = None,
) -> PlannedSave:
    """Plan a save and make its folder; the first part of ``save``, with its arguments.

    Communicates over ``world``; rank 0 takes ``lock``, which the caller releases.
    """
    run_folder = as_path(run_folder)
    plans = plans or PlanCache()
    with raise_on_all_ranks(world):
        final = step_folder(run_folder, step)
        own_claims = plans.claims(shards)
        attachments = attachments.kept() if world.rank == 0 else Attachments()
    claims, writes = plans.plan(own_claims, world)
    plans.compare(shards, world)
    hf_plan = None if hf is None else plan_hf(hf.links, claims, writes)
    # Rank 0 makes the folder; the other ranks get its path, which may be a temporary name.
    fresh_folder = ""
    with raise_on_all_ranks(world):
        if world.rank == 0:
            lock.acquire()
            fresh_folder = str(make_fresh(final, replace=replace))
    folder = as_path(gather_json(fresh_folder, world)[0])
    own_writes = writes[world.rank]
    memory = [_memory(write, shards[write.name]) for write in own_writes]
    entries: Sequence[PlannedTensor] = plans.entries()
    outputs: dict[str, Sequence[PlannedTensor]] = {}
    hf_files: dict[str, bytes] = {}
    hf_memory: list[Tensor] = []
    if hf is not None and hf_plan is not None:
        memory_of = dict(zip(own_writes, memory, strict=True))
        # Tensors of the Hugging Face files are exchanged; the rest stays in this rank's file.
        entry_of = dict(zip(own_writes, entries, strict=True))
        entries = [entry_of[write] for write in hf_plan.rest[world.rank]]
        memory = [memory_of[write] for write in hf_plan.rest[world.rank]]
        device = travel_device(memory_of.values(), world)
        hf_memory = assemble(hf_plan, memory_of, world=world, device=device)
        hf_files = hf_plan.small_files(hf.config)
    if entries:
        outputs[f"rank_{world.rank:05d}.safetensors"] = entries
    if hf_plan is not None and hf_plan.names[world.rank]:
        outputs[hf_plan.names[world.rank]] = hf_plan.entries[world.rank]
    memory += hf_memory
    return PlannedSave(
        run_folder, step, folder, lock, claims, outputs, memory, hf_files, attachments
    )


def write(planned: PlannedSave, memory: Sequence[Iterable[Tensor]]) -> dict[str, Any]:
    """Write this rank's files; no communication, so that it can run in a thread.

    Args:
        planned: result of ``begin``.
        memory: for each section, tensors whose concatenated bytes are the section.

    Returns:
        Sizes of the files and index rows of the chunks as JSON, for ``commit_step``.
    """
    files: dict[str, list[Any]] = {}
    rows: list[list[Any]] = []
    rest = iter(memory)
    for name, entries in planned.outputs.items():
        path = planned.folder / name
        path.unlink(missing_ok=True)
        items = []
        for entry in entries:
            parts = [next(rest) for _ in entry.sections]
            size = DTYPE_BYTES[entry.dtype]
            sections = tuple(prod(section.box[1]) * size for section in entry.sections)
            items.append(
                Item(entry.key, entry.dtype, entry.shape, partial(_slabs, parts), sections)
            )
        written = write_file(path, items)
        files[name] = [written.entry.num_bytes, written.entry.digest]
        sections_of_file = [section for entry in entries for section in entry.sections]
        rows += [
            [
                section.name,
                chunk_text(StoredBox(name, place.offset, *section.box, place.checksums)),
            ]
            for section, place in zip(sections_of_file, written.sections, strict=True)
        ]
    return {"files": files, "chunks": rows}


def commit_step(
    planned: PlannedSave,
    reports: Sequence[Mapping[str, Any]],
    retention: RetentionConfig = KEEP_ALL,
) -> Path:
    """Make a written step the newest, then delete old steps; for rank 0 alone.

    Raises:
        CheckpointError: if another job took over the run folder, or files are not visible.
    """
    planned.lock.check()
    # _files fails if rank 0 does not see a file of another rank: the folder is not shared.
    index = Index({}, planned.attachments.extra, _files(planned.folder, reports))
    rows = _rows(planned.claims, reports)
    for name, source in planned.attachments.folders.items():
        copy_durably(Path(source), planned.folder / name)
    for name, content in planned.attachments.files.items():
        write_durably(planned.folder / name, content)
    for name, content in planned.hf_files.items():
        write_durably(planned.folder / name, content)
    if planned.hf_files:
        put_tokenizer_at_root(planned.folder)
    # Everything in the folder is durable: now the index, then the pointer.
    final = commit(
        planned.folder,
        planned.run_folder,
        planned.step,
        finalize_index(index, planned.folder, rows),
    )
    log.info("saved step %s to %s", planned.step, final)
    if retention != KEEP_ALL:
        prune(planned.run_folder, retention)
    return final


def _memory(write: Write, shard: Shard) -> Tensor:
    if len(shard.pieces) == 1:
        return shard.pieces[0].data
    return next(piece.data for piece in shard.pieces if piece_box(piece) == write.box)


def _slabs(sections: Sequence[Iterable[Tensor]]) -> Iterator[Tensor]:
    for section in sections:
        for tensor in section:
            yield from cut_slabs(tensor)


def _files(folder: Path, reports: Sequence[Mapping[str, Any]]) -> dict[str, FileEntry]:
    files: dict[str, FileEntry] = {}
    for rank, report in enumerate(reports):
        for name, (size, header) in report["files"].items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != size:
                raise CheckpointError(
                    f"rank {rank} wrote {size} bytes to {path}, which rank 0 cannot see: the "
                    "folder to save to must be shared by all hosts."
                )
            files[name] = FileEntry(size, header)
    return files


def _rows(
    claims: Sequence[Mapping[str, Claim]], reports: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """Return the index row of each tensor, joined from texts of its writers."""
    chunks: dict[str, list[str]] = {name: [] for claimed in claims for name in claimed}
    for report in reports:
        for name, text in report["chunks"]:
            chunks[name].append(text)
    return {
        name: row_text(claim.dtype, claim.shape, chunks[name])
        for claimed in claims
        for name, claim in claimed.items()
    }
