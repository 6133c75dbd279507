"""Plans of writes and reads: pure functions, equal on all ranks.

Ranks exchange claims, the names and boxes that they hold, but no tensors. From the same claims
each rank computes the same plan, so that no plan is sent. A box that several ranks hold is
written by one of them, chosen so that all ranks write about the same number of bytes.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from mcore_ckpt.storage.boxes import Box, cover_problems, intersect
from mcore_ckpt.storage.index import DTYPE_BYTES, TensorEntry

_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Claim:
    """The boxes of one tensor that one rank holds."""

    shape: tuple[int, ...]
    """Global shape."""
    dtype: str
    """Safetensors' name, such as ``BF16``."""
    owner: bool
    """Whether this rank is the first holder of its boxes. The owners' boxes must cover the
    tensor exactly; other boxes are copies, and may be written if they equal an owner's box."""
    boxes: tuple[Box, ...]
    """Regions of the tensor."""

    def to_json(self) -> list[Any]:
        """Return the claim as lists."""
        return [self.shape, self.dtype, self.owner, self.boxes]

    @classmethod
    def from_json(cls, value: list[Any]) -> Claim:
        """Inverse of ``to_json``."""
        shape, dtype, owner, boxes = value
        return cls(tuple(shape), dtype, owner, tuple((tuple(o), tuple(n)) for o, n in boxes))


@dataclass(frozen=True, slots=True)
class Write:
    """One box that one rank writes to its file."""

    name: str
    """Name of the tensor."""
    box: Box
    """Region of the tensor."""

    @property
    def num_elements(self) -> int:
        """Number of elements of the region."""
        return prod(self.box[1])


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of a file, stacked from boxes of logical tensors."""

    key: str
    """Name in the file."""
    dtype: str
    """Safetensors' name of the dtype."""
    shape: tuple[int, ...]
    """Shape of the tensor in the file."""
    sections: tuple[Write, ...]
    """The boxes, stacked by rows."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Read:
    """One region that a rank reads from a chunk of a file."""

    chunk: int
    """Number of the chunk in the tensor's entry."""
    box: Box
    """Region of the tensor, inside the chunk."""


def plan_writes(claims: Sequence[Mapping[str, Claim]]) -> list[list[Write]]:
    """Assign each box to one of the ranks that hold it. Pure.

    Boxes with one holder are assigned first, then the others, the largest first, to the holder
    with the fewest bytes. In a file wide dtypes come first, so that every tensor is aligned.

    Returns:
        Each rank's writes in file order; every element of every tensor is in exactly one write.

    Raises:
        ValueError: with each tensor whose shapes or dtypes differ between ranks, or whose
            owners' boxes are out of bounds, overlap, or leave holes.
    """
    tensors = _merge(claims)
    holders: dict[Write, list[int]] = {}
    problems = []
    for name, (claim, ranks) in tensors.items():
        owned = {b for r in ranks if claims[r][name].owner for b in claims[r][name].boxes}
        problems += [f"{name}: {text}" for text in cover_problems(claim.shape, list(owned))]
        for rank in ranks:
            for box in dict.fromkeys(claims[rank][name].boxes):
                if box in owned:
                    holders.setdefault(Write(name, box), []).append(rank)
    if problems:
        raise ValueError("cannot save: " + list_problems(problems))
    return _balance(holders, {name: claim for name, (claim, _) in tensors.items()}, len(claims))


def _merge(claims: Sequence[Mapping[str, Claim]]) -> dict[str, tuple[Claim, list[int]]]:
    tensors: dict[str, tuple[Claim, list[int]]] = {}
    problems = []
    for rank, mine in enumerate(claims):
        for name, claim in mine.items():
            if claim.dtype not in DTYPE_BYTES:
                problems.append(f"{name}: files have no dtype {claim.dtype}")
            first, ranks = tensors.setdefault(name, (claim, []))
            ranks.append(rank)
            if (first.shape, first.dtype) != (claim.shape, claim.dtype):
                problems.append(
                    f"{name}: {first.dtype} {list(first.shape)} on rank {ranks[0]}, "
                    f"{claim.dtype} {list(claim.shape)} on rank {rank}"
                )
    if problems:
        raise ValueError("cannot save: " + list_problems(problems))
    return tensors


def _balance(
    holders: Mapping[Write, list[int]], tensors: Mapping[str, Claim], num_ranks: int
) -> list[list[Write]]:
    def size(write: Write) -> int:
        return write.num_elements * DTYPE_BYTES[tensors[write.name].dtype]

    load = [0] * num_ranks
    writes: list[list[Write]] = [[] for _ in range(num_ranks)]
    ordered = sorted(
        holders.items(), key=lambda item: (len(item[1]) > 1, -size(item[0]), *_key(item[0]))
    )
    for write, ranks in ordered:
        rank = min(ranks, key=lambda r: (load[r], r))
        load[rank] += size(write)
        writes[rank].append(write)
    for mine in writes:
        mine.sort(key=lambda w: (-DTYPE_BYTES[tensors[w.name].dtype], *_key(w)))
    return writes


def _key(write: Write) -> tuple[str, Box]:
    return write.name, write.box


@dataclass(frozen=True, slots=True)
class SharedBox:
    """A box that several ranks of a host need: one rank reads it and sends it to the others."""

    write: Write
    """The tensor and the box."""
    num_bytes: int
    """Bytes in the dtype of the ranks."""
    reader: int
    """Rank that reads the box."""
    others: tuple[int, ...]
    """Ranks that receive the box."""


def plan_sharing(
    claims: Sequence[Mapping[str, Claim]], hosts: Sequence[str], names: Collection[str]
) -> list[SharedBox]:
    """Assign boxes that several ranks of a host need to one reader each, balanced. Pure.

    Returns:
        The same list on all ranks.
    """
    holders: dict[tuple[str, str, Write], list[int]] = {}
    load = [0] * len(claims)
    for rank, mine in enumerate(claims):
        for name in names & mine.keys():
            for box in dict.fromkeys(mine[name].boxes):
                key = (hosts[rank], mine[name].dtype, Write(name, box))
                holders.setdefault(key, []).append(rank)
    for (_, dtype, write), ranks in holders.items():
        if len(ranks) == 1:
            load[ranks[0]] += write.num_elements * DTYPE_BYTES[dtype]
    shared = [(key, ranks) for key, ranks in holders.items() if len(ranks) > 1]
    plan = []
    for (_, dtype, write), ranks in sorted(
        shared, key=lambda one: (-one[0][2].num_elements, _key(one[0][2]), one[1])
    ):
        reader = min(ranks, key=lambda rank: (load[rank], rank))
        num_bytes = write.num_elements * DTYPE_BYTES[dtype]
        load[reader] += num_bytes
        others = tuple(rank for rank in ranks if rank != reader)
        plan.append(SharedBox(write, num_bytes, reader, others))
    return plan


def plan_reads(entry: TensorEntry, box: Box) -> list[Read]:
    """Return the regions of a tensor's chunks that make up a box.

    Raises:
        ValueError: if the chunks do not hold every element of the box, which is impossible
            for a valid index.
    """
    reads = []
    for number, chunk in enumerate(entry.chunks):
        shared = intersect((chunk.offsets, chunk.lengths), box)
        if shared is not None:
            reads.append(Read(number, shared))
    num_found = sum(prod(read.box[1]) for read in reads)
    if num_found != prod(box[1]):
        raise ValueError(
            f"the files hold only {num_found} of the {prod(box[1])} requested elements"
        )
    return reads


@dataclass(frozen=True, slots=True)
class Differences:
    """Differences of tensors that are in model and checkpoint, a message for each by name."""

    shapes: Mapping[str, str]
    """Tensors of another shape."""
    dtypes: Mapping[str, str]
    """Tensors of another dtype."""
    faults: Sequence[str]
    """Tensors that can never be loaded: chunks with holes, boxes out of bounds."""


def load_differences(
    wanted: Mapping[str, Claim], index: Mapping[str, TensorEntry]
) -> Differences:
    """Compare shapes, dtypes and chunks of tensors that are in model and checkpoint."""
    shapes, dtypes, faults = {}, {}, []
    for name, claim in wanted.items():
        entry = index.get(name)
        if entry is None:
            continue
        if claim.shape != entry.shape:
            shapes[name] = (
                f"{name}: shape {list(entry.shape)} in the checkpoint, "
                f"{list(claim.shape)} wanted"
            )
            continue
        if claim.dtype != entry.dtype:
            dtypes[name] = (
                f"{name}: dtype {entry.dtype} in the checkpoint, {claim.dtype} wanted"
            )
        chunks = [(chunk.offsets, chunk.lengths) for chunk in entry.chunks]
        faults += [f"{name}: {text}" for text in cover_problems(entry.shape, chunks)]
        for offsets, lengths in claim.boxes:
            outside = intersect((offsets, lengths), ((0,) * len(entry.shape), entry.shape))
            if outside != (offsets, lengths):
                faults.append(f"{name}: {offsets}+{lengths} lies outside {entry.shape}")
    return Differences(shapes, dtypes, faults)


def name_problems(wanted: Iterable[str], held: Iterable[str]) -> tuple[list[str], list[str]]:
    """Compare the names that are wanted with those that are held.

    Returns:
        The missing names, each with the most similar unexpected name, and the unexpected names.
    """
    wanted_set, held_set = set(wanted), set(held)
    unexpected = sorted(held_set - wanted_set)
    missing = []
    for count, name in enumerate(sorted(wanted_set - held_set)):
        # Similarity is slow on long lists, of which only the first entries are shown.
        near = difflib.get_close_matches(name, unexpected, n=1) if count < _SHOWN else []
        missing.append(f"{name} (nearest there: {near[0]})" if near else name)
    return missing, unexpected


def list_problems(problems: Sequence[str]) -> str:
    """Join problems, one for each line, at most a dozen of them."""
    shown = [f"\n  {problem}" for problem in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        shown.append(f"\n  and {len(problems) - _SHOWN} more")
    return "".join(shown)
