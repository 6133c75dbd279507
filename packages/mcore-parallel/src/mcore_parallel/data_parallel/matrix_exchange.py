"""Exchanges flat ranges for whole matrices, which a ``MatrixRule`` needs, and back.

The unit of work is a logical matrix (q, k, v, gate, up, one expert), never a parameter or a
bucket. The ranks of a pipeline stage share the work: one rank, the owner, computes a matrix.
The owner receives the messages of all ranks that hold elements of the matrix, under any
sharding (tensor ranks, ZeRO, FSDP), and sends each holder the direction of its elements, both
in the rule's ``wire_dtype``. Owners are chosen by the cost of the matrices: the costliest
first, each to the rank with the least work so far (longest processing time first; Graham 1969).

Parameters are exchanged in chunks, which bounds the memory and overlaps the exchange of one
chunk with the computation of another. When the optimizer is built, ranks tell each other once
which boxes they own.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from mcore_parallel.collectives import gather_bytes, start_all_to_all, wait
from mcore_parallel.data_parallel.gradient_sync import OwnedRange, OwnedUnit
from mcore_parallel.mesh import Axis
from mcore_parallel.optimizers.update_rule import (
    MatrixRule,
    Shape,
    UpdateGroup,
    unless_applied,
)
from mcore_parallel.sharding import Box, NamedParameter, Piece, Shard, flat_pieces

CHUNK_ELEMENTS = 1 << 26
"""Elements on one rank at which a chunk is closed."""
BATCH_ELEMENTS = 1 << 26
"""Most elements of the matrices of one shape that a GPU computes together."""

TPMode = Literal["blockwise", "duplicated", "distributed"]
Groups = Mapping[nn.Parameter, UpdateGroup]


@dataclass(frozen=True, slots=True)
class _Part:
    """The matrix that contains one part of a parameter's layout."""

    key: str
    """Name of the matrix, equal on all ranks that hold elements of it."""
    shape: Shape
    """Shape of the matrix."""
    shift: tuple[int, ...]
    """Offset in the matrix minus offset in the logical tensor."""
    copy: str
    """Under ``duplicated``, suffix that names the computation whose results this rank gets."""


@dataclass(frozen=True, slots=True)
class _View:
    """A box of a matrix, with its offset and strides in a rank's flat tensor of a chunk."""

    task: "_Task"
    box: Box
    begin: int
    strides: tuple[int, ...]

    def of(self, flat: Tensor) -> Tensor:
        """Return the box's elements in a flat tensor."""
        return flat.as_strided(self.box[1], self.strides, self.begin)


@dataclass(slots=True, eq=False)
class _Task:
    """One computation of a matrix."""

    key: str
    shape: Shape
    rule: MatrixRule
    owner: int = 0
    candidates: list[int] = field(default_factory=list)
    """Ranks that may be the owner."""
    senders: dict[Box, int] = field(default_factory=dict)
    """The rank that sends the box to the owner, by box."""
    holders: dict[int, list[Box]] = field(default_factory=dict)
    """The boxes whose directions a rank receives, by rank."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Matrices of one shape that this rank computes together."""

    tasks: list[_Task]
    state: dict[str, Tensor]


@dataclass(slots=True)
class _Chunk:
    """Matrices that are exchanged together."""

    first_unit: int
    """Position of the first unit whose update needs the chunk's directions."""
    tasks: list[_Task]
    batches: list[_Batch] = field(default_factory=list)
    views: dict[tuple[str, Box], _View] = field(default_factory=dict)
    """This rank's boxes in its flat tensors, by matrix and box."""
    numel: int = 0
    """Elements of the rank's flat tensors."""
    in_flight: Tensor | None = None
    """Pending result of an all-to-all: messages to owners, later directions to holders."""


class MatrixExchange:
    """Assigns matrices of a pipeline stage to owners, exchanges messages and directions.

    Attributes:
        num_chunks: number of chunks, which are in the order of updates.
        chunk_of: number of the chunk of a parameter.
        wire_dtype: dtype of messages and directions in an exchange.
        wide_dtype: dtype of state, and of directions when they are applied.
    """

    def __init__(
        self,
        units: Sequence[OwnedUnit],
        groups: Groups,
        stage: Axis,
        device: torch.device,
        tp_mode: TPMode,
    ) -> None:
        """Choose owners and allocate their state; all-gathers over ``stage``.

        Args:
            units: units in the order of updates.
            groups: groups of all parameters; those with a ``MatrixRule`` take part.
            stage: all ranks of this pipeline stage.
            device: device of the state.
            tp_mode: see ``MuonConfig.muon_tp_mode``.

        Raises:
            RuntimeError: if ranks of the stage hold different parameters.
        """
        self._stage, self._device, self._tp_mode = stage, device, tp_mode
        self._groups = groups
        members = [
            (position, unit, named)
            for position, unit in enumerate(units)
            for named in unit.members
            if isinstance(groups[named.parameter].rule, MatrixRule)
        ]
        rules = list(dict.fromkeys(groups[named.parameter].rule for *_, named in members))
        self.wide_dtype = torch.float32
        for _, unit, _ in members:
            self.wide_dtype = torch.promote_types(self.wide_dtype, unit.dtype)
        self.wire_dtype = torch.bfloat16
        for rule in rules:
            assert isinstance(rule, MatrixRule)
            rule_dtype = rule.wire_dtype(self.wide_dtype)
            self.wire_dtype = torch.promote_types(self.wire_dtype, rule_dtype)
        # For each unit, the ranges of this rank by parameter.
        ranges: list[dict[nn.Parameter, list[OwnedRange]]] = [{} for _ in units]
        for unit, unit_ranges in zip(units, ranges, strict=True):
            for owned in unit.owned_ranges():
                unit_ranges.setdefault(owned.named.parameter, []).append(owned)
        # This rank's entry for each parameter; all ranks of the stage exchange their entries.
        entries = [
            {
                "unit": position,
                "rule": rules.index(groups[named.parameter].rule),
                "size": sum(prod(part.lengths) for part in named.layout.parts),
                "parts": [[p.key, p.shape, p.copy] for p in self._parts(named)],
                "boxes": [
                    [index, *box]
                    for owned in ranges[position].get(named.parameter, ())
                    for index, box, _ in self._boxes(owned)
                ],
            }
            for position, _, named in members
        ]
        ranks = [
            json.loads(content) for content in gather_bytes(json.dumps(entries).encode(), stage)
        ]
        if any([e["unit"] for e in each] != [e["unit"] for e in ranks[0]] for each in ranks):
            raise RuntimeError(
                f"ranks {list(stage.ranks)} of one pipeline stage hold different parameters: "
                "a matrix optimizer needs the same layers on all of them. Build the same model "
                "chunks on every rank of the stage."
            )
        self._tasks: dict[str, _Task] = {}
        self._chunks: list[_Chunk] = []
        self.chunk_of: dict[nn.Parameter, int] = {}
        loads = [0.0] * stage.size
        for indices in _chunk_members(ranks):
            tasks = _build_tasks([[each[i] for i in indices] for each in ranks], rules)
            _choose_owners(tasks, loads)
            chunk = _Chunk(members[indices[0]][0], list(tasks.values()))
            chunk.batches = self._build_batches(chunk.tasks)
            self._tasks |= tasks
            for index in indices:
                self.chunk_of[members[index][2].parameter] = len(self._chunks)
            self._chunks.append(chunk)

    @property
    def num_chunks(self) -> int:
        """Chunks, in the order of updates."""
        return len(self._chunks)

    def first_unit(self, chunk: int) -> int:
        """Return the position of a chunk's first unit, equal on all ranks of the stage."""
        return self._chunks[chunk].first_unit

    def place(
        self, chunk: int, ranges: Iterable[tuple[OwnedUnit, int, int, int]], numel: int
    ) -> None:
        """Set the layout of this rank's flat tensors of a chunk.

        Args:
            chunk: number of the chunk.
            ranges: for each range its unit, first and one-past-last element in this rank's part
                of the unit, and offset in the flat tensors.
            numel: elements of the flat tensors.
        """
        this_chunk = self._chunks[chunk]
        this_chunk.numel = numel
        for unit, first, stop, begin in ranges:
            for owned in unit.owned_ranges():
                if not first <= owned.offset < stop:
                    continue
                parts = self._parts(owned.named)
                for index, box, piece in self._boxes(owned):
                    task = self._tasks[parts[index].key + parts[index].copy]
                    # In the flat tensor: the range's offset, the parameter's offset in the
                    # range, the piece's offset in the parameter's range.
                    offset = begin + owned.offset - first + int(piece.data.storage_offset())
                    view = _View(task, box, offset, piece.data.stride())
                    this_chunk.views[task.key, box] = view

    def flat(self, chunk: int) -> Tensor:
        """Return zeros for the messages of a chunk."""
        size = self._chunks[chunk].numel
        return torch.zeros(size, dtype=self.wire_dtype, device=self._device)

    def send(self, chunk: int, messages: Tensor) -> None:
        """Launch the all-to-all of messages from holders to the owners of a chunk.

        Args:
            chunk: number of the chunk.
            messages: this rank's flat messages, in the layout set by ``place``.
        """
        this_chunk, own_rank = self._chunks[chunk], self._stage.rank
        packed, send = [], []
        # For each owner the boxes that this rank sends; two ranks list a message's boxes in the
        # same order, since tasks and boxes are built equally on all ranks.
        for rank in self._ranks():
            boxes = [
                this_chunk.views[task.key, box].of(messages)
                for task in this_chunk.tasks
                if task.owner == rank
                for box, sender in task.senders.items()
                if sender == own_rank
            ]
            packed += [box.reshape(-1) for box in boxes]
            send.append(sum(box.numel() for box in boxes))
        receive = [
            sum(prod(box[1]) for _, box in self._arriving(this_chunk, rank))
            for rank in self._ranks()
        ]
        this_chunk.in_flight = self._exchange(packed, send, receive)

    def compute(
        self, chunk: int, num_steps: int, is_applied: Bool[Tensor, ""] | None = None
    ) -> None:
        """Compute directions of this rank's matrices, launch the all-to-all to their holders.

        Args:
            chunk: number of the chunk, whose messages are in flight.
            num_steps: number of this update, counted from 1.
            is_applied: if false, the state does not change; None: the step is applied.
        """
        this_chunk, own_rank = self._chunks[chunk], self._stage.rank
        assert this_chunk.in_flight is not None
        received = wait(this_chunk.in_flight)
        # One stack of matrices for each batch; the received boxes are copied into it.
        stacks = [
            torch.empty(
                (len(batch.tasks), *batch.tasks[0].shape),
                dtype=self.wire_dtype,
                device=self._device,
            )
            for batch in this_chunk.batches
        ]
        matrices: dict[_Task, Tensor] = {}
        for batch, stack in zip(this_chunk.batches, stacks, strict=True):
            matrices |= zip(batch.tasks, stack.unbind(), strict=True)
        arriving = [each for rank in self._ranks() for each in self._arriving(this_chunk, rank)]
        if arriving:
            parts = received.split([prod(box[1]) for _, box in arriving])
            torch._foreach_copy_(
                [_cut(matrices[task], box) for task, box in arriving],
                [part.view(box[1]) for part, (_, box) in zip(parts, arriving, strict=True)],
            )
        directions: dict[_Task, Tensor] = {}
        for batch, stack in zip(this_chunk.batches, stacks, strict=True):
            rule = batch.tasks[0].rule
            with unless_applied(is_applied, batch.state.values()):
                computed = rule.direction(stack, batch.state, num_steps=num_steps)
            directions |= zip(batch.tasks, computed.to(self.wire_dtype).unbind(), strict=True)
        packed, send, receive = [], [], []
        for rank in self._ranks():
            boxes = [
                _cut(directions[task], box)
                for task in this_chunk.tasks
                if task.owner == own_rank
                for box in task.holders.get(rank, ())
            ]
            packed += [box.reshape(-1) for box in boxes]
            send.append(sum(box.numel() for box in boxes))
            receive.append(sum(prod(view.box[1]) for view in self._returning(this_chunk, rank)))
        this_chunk.in_flight = self._exchange(packed, send, receive)

    def receive(self, chunk: int) -> Tensor:
        """Wait for the directions of this rank's elements; return them flat, times factors."""
        this_chunk = self._chunks[chunk]
        assert this_chunk.in_flight is not None
        received, this_chunk.in_flight = wait(this_chunk.in_flight), None
        flat = torch.zeros(this_chunk.numel, dtype=self.wide_dtype, device=self._device)
        views = [view for rank in self._ranks() for view in self._returning(this_chunk, rank)]
        if views:
            targets = [view.of(flat) for view in views]
            parts = received.split([prod(view.box[1]) for view in views])
            sources = [part.view(view.box[1]) for part, view in zip(parts, views, strict=True)]
            torch._foreach_copy_(targets, sources)
            factors = [view.task.rule.factor(view.task.shape) for view in views]
            if any(factor != 1.0 for factor in factors):
                torch._foreach_mul_(targets, factors)
        return flat

    def named_shards(self) -> dict[str, Shard]:
        """Return the state of the matrices that this rank owns as ``<state>.<matrix>``."""
        shards = {}
        for batch in (batch for chunk in self._chunks for batch in chunk.batches):
            for name, stacked in batch.state.items():
                for task, state in zip(batch.tasks, stacked.unbind(), strict=True):
                    shape = tuple(state.shape)
                    piece = Piece((0,) * len(shape), shape, state)
                    shards[f"{name}.{task.key}"] = Shard(shape, state.dtype, (piece,))
        return shards

    def _ranks(self) -> range:
        return range(self._stage.size)

    def _arriving(self, chunk: _Chunk, rank: int) -> Iterator[tuple[_Task, Box]]:
        """Yield the boxes that a rank sends to this one, in the order of sending."""
        for task in chunk.tasks:
            if task.owner == self._stage.rank:
                yield from ((task, box) for box, s in task.senders.items() if s == rank)

    def _returning(self, chunk: _Chunk, rank: int) -> Iterator[_View]:
        """Yield this rank's boxes whose direction an owner sends, in the order of sending."""
        me = self._stage.rank
        for task in chunk.tasks:
            if task.owner == rank:
                yield from (chunk.views[task.key, box] for box in task.holders.get(me, ()))

    def _exchange(self, packed: list[Tensor], send: list[int], receive: list[int]) -> Tensor:
        nothing = torch.empty(0, dtype=self.wire_dtype, device=self._device)
        x = torch.cat(packed) if packed else nothing
        return start_all_to_all(x, self._stage, send, receive)

    def _build_batches(self, tasks: Sequence[_Task]) -> list[_Batch]:
        """Group the matrices that this rank owns, and allocate their state."""
        batches_by_shape: dict[tuple[Any, ...], list[list[_Task]]] = {}
        for task in (task for task in tasks if task.owner == self._stage.rank):
            # One matrix at a time on a CPU, where the last bits of a batched product depend on
            # the number of matrices.
            at_once = BATCH_ELEMENTS // prod(task.shape) if self._device.type == "cuda" else 1
            batches = batches_by_shape.setdefault((task.rule, task.shape), [[]])
            if len(batches[-1]) >= max(1, at_once):
                batches.append([])
            batches[-1].append(task)
        return [
            _Batch(
                batch,
                {
                    name: torch.zeros(
                        (len(batch), *size), dtype=self.wide_dtype, device=self._device
                    )
                    for name, size in rule.state_shapes(shape).items()
                },
            )
            for (rule, shape), batches in batches_by_shape.items()
            for batch in batches
        ]

    def _parts(self, named: NamedParameter) -> list[_Part]:
        """Return the matrix of each part of a parameter's layout."""
        # blockwise: each rank's block is a separate matrix. duplicated: each block has its own
        # computation of the whole matrix. distributed: one computation for all blocks.
        parts = named.layout.parts
        is_blockwise = self._tp_mode == "blockwise"
        shapes = [part.logical_lengths if is_blockwise else part.shape for part in parts]
        shifts = [tuple(-o * is_blockwise for o in part.offsets) for part in parts]
        blocks = ["@" + ",".join(map(str, part.offsets)) for part in parts]
        keys = [part.name for part in parts]
        if self._groups[named.parameter].joins_parts:
            # One matrix of the rows of all parts, those of the first part first.
            begins: dict[Any, int] = {}
            total = 0
            for index, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
                name = index if is_blockwise else part.name
                if name not in begins:
                    begins[name], total = total, total + shape[0]
                shifts[index] = (shifts[index][0] + begins[name], *shifts[index][1:])
            shapes = [(total, *shape[1:]) for shape in shapes]
            blocks, keys = ["".join(blocks)] * len(parts), [named.name] * len(parts)
        if is_blockwise:
            keys = [key + block for key, block in zip(keys, blocks, strict=True)]
        copies = blocks if self._tp_mode == "duplicated" else [""] * len(parts)
        return [_Part(*each) for each in zip(keys, shapes, shifts, copies, strict=True)]

    def _boxes(self, owned: OwnedRange) -> Iterator[tuple[int, Box, Piece]]:
        """Yield the pieces of a range: index of the part, box of its matrix, piece.

        The piece's data is a view of a flat tensor that begins with the range.
        """
        parts = self._parts(owned.named)
        flat = torch.empty(owned.stop - owned.first, device="meta")
        for index, part in enumerate(owned.named.layout.parts):
            for piece in flat_pieces(owned.named, part, owned.first, owned.stop, flat):
                if prod(piece.lengths):
                    shift = parts[index].shift
                    offsets = tuple(o + s for o, s in zip(piece.offsets, shift, strict=True))
                    yield index, (offsets, piece.lengths), piece


def _chunk_members(ranks: list[list[dict[str, Any]]]) -> Iterator[list[int]]:
    """Yield the indices of the parameters of each chunk, equal on all ranks."""
    chunk: list[int] = []
    numel = 0
    for index in range(len(ranks[0])):
        entries = [each[index] for each in ranks]
        owned = [sum(prod(box[2]) for box in entry["boxes"]) for entry in entries]
        # If data ranks share a unit, its first parameters are on one rank and its last ones on
        # another: such a unit is never divided, so that all ranks send in each exchange.
        is_whole = owned == [entry["size"] for entry in entries]
        is_new_unit = index == 0 or entries[0]["unit"] != ranks[0][index - 1]["unit"]
        if chunk and numel >= CHUNK_ELEMENTS and (is_whole or is_new_unit):
            yield chunk
            chunk, numel = [], 0
        chunk.append(index)
        numel += max(owned)
    if chunk:
        yield chunk


def _build_tasks(ranks: list[list[dict[str, Any]]], rules: Sequence[Any]) -> dict[str, _Task]:
    """Build the computations of a chunk from all ranks' entries; equal on all ranks."""
    tasks: dict[str, _Task] = {}
    copies: dict[str, list[_Task]] = {}  # computations of each matrix
    by_rank = [(rank, entry) for rank, entries in enumerate(ranks) for entry in entries]
    for rank, entry in by_rank:
        for key, shape, copy in entry["parts"]:
            if key + copy not in tasks:
                tasks[key + copy] = _Task(key, tuple(shape), rules[entry["rule"]])
                copies.setdefault(key, []).append(tasks[key + copy])
            if rank not in tasks[key + copy].candidates:
                tasks[key + copy].candidates.append(rank)
    for rank, entry in by_rank:
        for index, offsets, lengths in entry["boxes"]:
            key, _, copy = entry["parts"][index]
            box = tuple(offsets), tuple(lengths)
            tasks[key + copy].holders.setdefault(rank, []).append(box)
            for task in copies[key]:
                task.senders.setdefault(box, rank)
    return tasks


def _choose_owners(tasks: Mapping[str, _Task], loads: list[float]) -> None:
    """Set each matrix's owner to the rank with the least work, the costliest matrix first.

    Args:
        tasks: computations of one chunk, changed in place.
        loads: work of each rank so far; the work of the chunk is added in place.
    """
    costs = {name: task.rule.cost(task.shape) for name, task in tasks.items()}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        task = tasks[name]
        task.owner = min(task.candidates, key=lambda rank: (loads[rank], rank))
        loads[task.owner] += costs[name]
        for box in task.holders.get(task.owner, ()):
            # The owner uses its own copy of a box that it holds; no other rank sends it.
            task.senders[box] = task.owner


def _cut(matrix: Tensor, box: Box) -> Tensor:
    """Return the view of a box of a matrix."""
    for dim, (begin, length) in enumerate(zip(*box, strict=True)):
        matrix = matrix.narrow(dim, begin, length)
    return matrix
