"""Logical tensors: which part of the model a local parameter holds, for any rank grid.

A parameter may be fused, stacked or padded for speed. Checkpoints, gradient clipping,
initialisation, conversion, comparison and counting work on logical tensors instead (q, k, v,
gate, up, expert 7, the true vocabulary). A layer whose parameters are split, fused or padded
has a method ``layouts() -> dict[str, ParamLayout]`` by local parameter name;
``named_shards`` walks a model and turns these layouts into ``Shard``s.

A logical name is the module path plus the part's name. Paths contain global layer numbers:
``blocks.7`` is layer 7 of the model on every pipeline stage.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor, nn

from mcore_parallel.mesh import SINGLE, Axis

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and lengths of a rectangular region."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a local parameter, and the box of a logical tensor that it stores.

    ``lengths`` has as many entries as the local parameter has dimensions. If the logical tensor
    has fewer dimensions (an expert inside a stack), the leading lengths are 1 and are dropped.
    """

    name: str
    """Logical name below the module's path; empty: the parameter's own name."""
    shape: tuple[int, ...]
    """Global shape of the logical tensor."""
    offsets: tuple[int, ...]
    """First element of the box in the logical tensor."""
    local_offsets: tuple[int, ...]
    """First element of the box in the local parameter."""
    lengths: tuple[int, ...]
    """Size of the box in the local parameter's dimensions."""
    replicas: Axis = SINGLE
    """Model-parallel ranks that hold the same box (tp for a norm, a KV block of tp)."""
    partial: Axis = SINGLE
    """Ranks whose gradients of this box are parts of a sum, which ``finish`` adds up."""

    @property
    def logical_lengths(self) -> tuple[int, ...]:
        """Size of the box in the logical tensor's dimensions."""
        return self.lengths[len(self.lengths) - len(self.shape) :]

    def view(self, local: Tensor) -> Tensor:
        """Return the box of a tensor with the parameter's shape, in logical dimensions."""
        for dim, (begin, length) in enumerate(
            zip(self.local_offsets, self.lengths, strict=True)
        ):
            local = local.narrow(dim, begin, length)
        for _ in range(len(self.lengths) - len(self.shape)):
            local = local.squeeze(0)
        return local


@dataclass(frozen=True, slots=True)
class ParamLayout:
    """The logical tensors inside one local parameter, and the ranks that replicate them."""

    parts: tuple[Part, ...]
    """Disjoint boxes of the parameter. Elements outside every part are padding, always zero."""
    data: str = "dense"
    """Which data ranks replicate the parameter: ``dense`` (dp_cp) or ``expert`` (expert_dp)."""
    tied: Axis = SINGLE
    """Pipeline ranks that hold a copy (tied embedding), over which gradients are summed."""


def held_share(layout: ParamLayout) -> float:
    """Return the mean over a parameter's elements of 1 / (ranks that hold the element).

    Counts model-parallel ranks. Squares of local tensors with this weight add up over the ranks
    as if each logical element were counted once.
    """
    sizes = [prod(part.lengths) for part in layout.parts]
    pairs = zip(sizes, layout.parts, strict=True)
    return sum(size / part.replicas.size for size, part in pairs) / max(1, sum(sizes))


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a logical tensor and the local memory that holds it."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    data: Tensor
    """Local view of shape ``lengths``; writing to the view writes to the parameter's memory."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Shard:
    """This rank's pieces of one logical tensor; there may be none.

    Supports weak references, by which a saver recognises shards that it has saved before.
    """

    shape: tuple[int, ...]
    """Global shape."""
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    replicas: tuple[Axis, ...] = field(default=())
    """Axes along which other ranks hold these same pieces."""

    @property
    def is_owner(self) -> bool:
        """Whether this rank is the first of all replicas, the one that writes the pieces."""
        return all(axis.rank == 0 for axis in self.replicas)


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter of a model with its path and layout."""

    name: str
    """Path of the local parameter, ``blocks.7.attention.qkv.weight``."""
    parameter: nn.Parameter
    layout: ParamLayout
    """Layout whose parts have full logical names, module path included."""


def whole_layout(
    name: str, shape: tuple[int, ...], replicas: Axis = SINGLE, partial: Axis = SINGLE
) -> ParamLayout:
    """Build the ``ParamLayout`` of a parameter that every rank of ``replicas`` holds in full.

    Args:
        name: logical name below the module; empty: the parameter's own name.
        shape: shape of the parameter.
        replicas: ranks that hold the parameter.
        partial: ranks whose gradients must be summed (tp under sequence parallelism).
    """
    zeros = (0,) * len(shape)
    return ParamLayout((Part(name, shape, zeros, zeros, shape, replicas, partial),))


def replicated(module: nn.Module, axis: Axis, *, partial: bool = False) -> nn.Module:
    """Declare in place that all ranks of an axis replicate a plain module; return the module.

    The replicas must start with equal parameters, so seed torch equally before the module is
    built. The first ``DataParallel.finish`` checks this, and that ``partial`` is right.

    Args:
        module: a module of plain torch, such as ``LayerNorm``. The module and its submodules
            get a method ``layouts``, unless they have one.
        axis: tensor ranks.
        partial: whether each rank's gradient comes from that rank's tokens only (sequence
            parallelism), so that the gradients must be summed.
    """
    for owner in module.modules():
        if not hasattr(owner, "layouts"):
            layouts = _whole_parameters(owner, axis, axis if partial else SINGLE)
            owner.layouts = layouts.copy  # pyrefly: ignore
    return module


def _whole_parameters(module: nn.Module, axis: Axis, partial: Axis) -> dict[str, ParamLayout]:
    return {
        name: whole_layout("", tuple(parameter.shape), axis, partial)
        for name, parameter in module.named_parameters(recurse=False)
    }


def undeclared_parameters(module: nn.Module) -> list[str]:
    """List the paths of parameters for which no module declares a ``ParamLayout``."""
    undeclared = []
    for path, owner in module.named_modules():
        layouts = getattr(owner, "layouts", dict)()
        names = (name for name, _ in owner.named_parameters(recurse=False))
        undeclared += [_join(path, name) for name in names if name not in layouts]
    return undeclared


def sliced_layout(
    name: str,
    shape: tuple[int, ...],
    dim: int,
    axis: Axis,
    local: tuple[int, ...] | None = None,
) -> ParamLayout:
    """Build the ``ParamLayout`` of a parameter split evenly along ``dim`` over ``axis``.

    Args:
        name: logical name below the module; empty: the parameter's own name.
        shape: global shape without padding.
        dim: the dimension that is split.
        axis: ranks that split the parameter; each holds ``local[dim]`` rows.
        local: local shape, which may include padding at the global end of ``dim``.

    Raises:
        ValueError: if the axis does not divide ``dim`` and ``local`` is not given.
    """
    if local is None:
        if shape[dim] % axis.size:
            raise ValueError(
                f"dimension {dim} of {shape} does not divide over axis {axis.name} of "
                f"{axis.size} ranks"
            )
        local = (*shape[:dim], shape[dim] // axis.size, *shape[dim + 1 :])
    # Rows at or beyond shape[dim] are padding: the last ranks may hold a shorter part, or none.
    begin = min(axis.rank * local[dim], shape[dim])
    length = min(local[dim], shape[dim] - begin)
    offsets = tuple(begin if i == dim else 0 for i in range(len(shape)))
    lengths = tuple(length if i == dim else n for i, n in enumerate(shape))
    return ParamLayout((Part(name, shape, offsets, (0,) * len(shape), lengths),))


def layer_stacks(chunk: nn.Module) -> list[list[nn.Module]]:
    """List the layers of each stack of a model chunk, in forward order.

    A stack is a container named ``blocks``, in the chunk or in a submodule such as an encoder.
    """
    return [
        list(module.children())
        for name, module in chunk.named_modules()
        if name.rpartition(".")[2] == "blocks"
        and isinstance(module, nn.ModuleDict | nn.ModuleList)
    ]


def named_parameters(module: nn.Module) -> Iterator[NamedParameter]:
    """Yield every parameter once, with its path and its layout under full logical names.

    A parameter without a declared layout counts as a full tensor that no other rank holds, so
    plain torch modules work on one rank. A parameter registered under two paths is yielded
    once, under the first.
    """
    seen: set[int] = set()
    for path, owner in module.named_modules():
        get_layouts: Callable[[], dict[str, ParamLayout]] = getattr(owner, "layouts", dict)
        layouts = get_layouts()
        for own_name, parameter in owner.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            layout = layouts.get(own_name) or whole_layout("", tuple(parameter.shape))
            yield NamedParameter(
                _join(path, own_name), parameter, _with_path(layout, path, own_name)
            )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _with_path(layout: ParamLayout, path: str, own_name: str) -> ParamLayout:
    parts = tuple(replace(p, name=_join(path, p.name or own_name)) for p in layout.parts)
    return replace(layout, parts=parts)


def named_shards(module: nn.Module, data: dict[str, Axis] | None = None) -> dict[str, Shard]:
    """Return this rank's ``Shard`` of every logical tensor of a model, by logical name.

    Pieces are views of the parameters.

    Args:
        module: a model or a part of one.
        data: axes of the data ranks by kind (``dense``, ``expert``), as
            ``ParallelContext.data_axes()`` returns them; None: data ranks do not count as
            replicas.
    """
    return shards_of([(p, p.parameter.detach()) for p in named_parameters(module)], data)


def shards_of(
    tensors: list[tuple[NamedParameter, Tensor]], data: dict[str, Axis] | None = None
) -> dict[str, Shard]:
    """Return shards of tensors with their parameters' local shapes (gradients, main weights).

    Raises:
        ValueError: if a tensor's shape is not its parameter's, or two parameters hold
            different shapes of one logical tensor.
    """
    shards: dict[str, Shard] = {}
    for named, tensor in tensors:
        if tensor.shape != named.parameter.shape:
            raise ValueError(
                f"{named.name}: tensor {tuple(tensor.shape)} does not have its parameter's "
                f"shape {tuple(named.parameter.shape)}"
            )
        for part in named.layout.parts:
            piece = Piece(part.offsets, part.logical_lengths, part.view(tensor))
            _add(shards, named, part, piece, data)
    return shards


def flat_shards(
    ranges: list[tuple[NamedParameter, int, int, Tensor]], data: dict[str, Axis] | None = None
) -> dict[str, Shard]:
    """Return shards of flat ranges of parameters (ZeRO, FSDP), cut into boxes.

    Args:
        ranges: for each range the parameter, the first and one-past-last element in the
            flattened local tensor, and the 1-D memory that holds the range. A range of a
            matrix is at most 3 boxes.
        data: axes along which the ranges are replicated, by kind; None when each data rank
            holds a different range.
    """
    shards: dict[str, Shard] = {}
    for named, start, stop, flat in ranges:
        for part in named.layout.parts:
            for piece in flat_pieces(named, part, start, stop, flat):
                _add(shards, named, part, piece, data)
    return shards


def flat_pieces(
    named: NamedParameter, part: Part, start: int, stop: int, flat: Tensor
) -> Iterator[Piece]:
    """Cut a flat range of a parameter into pieces of one of its logical tensors.

    Args:
        named: the parameter.
        part: the part of the parameter that belongs to the logical tensor.
        start: first element of the range in the flattened local tensor.
        stop: one past the last element of the range.
        flat: the 1-D memory that holds the range; pieces are views of it.
    """
    local_shape = tuple(named.parameter.shape)
    for box in flat_boxes(local_shape, start, stop):
        # The elements of this part inside the box, in coordinates of the parameter.
        overlap = _intersect(*box, part.local_offsets, part.lengths)
        if overlap is None:
            continue
        offsets, lengths = overlap
        # ``flat`` holds the elements [start, stop) of the flattened parameter, so the overlap
        # is a view of ``flat`` with the parameter's own strides.
        first = _flat_index(local_shape, offsets) - start
        view = flat.as_strided(lengths, _strides(local_shape), flat.storage_offset() + first)
        # From the parameter to the logical tensor: relative to the part's box, without the
        # leading dimensions (of length 1) that the logical tensor lacks.
        drop = len(part.lengths) - len(part.shape)
        inside = [o - b for o, b in zip(offsets, part.local_offsets, strict=True)]
        yield Piece(
            tuple(o + i for o, i in zip(part.offsets, inside[drop:], strict=True)),
            lengths[drop:],
            view.reshape(lengths[drop:]) if drop else view,
        )


def _add(
    shards: dict[str, Shard],
    named: NamedParameter,
    part: Part,
    piece: Piece,
    data: dict[str, Axis] | None,
) -> None:
    replicas = [part.replicas, named.layout.tied]
    if data is not None:
        replicas.append(data[named.layout.data])
    axes = tuple(axis for axis in replicas if axis.size > 1)
    pieces = (piece,) if prod(piece.lengths) else ()
    shard = shards.get(part.name)
    if shard is None:
        shards[part.name] = Shard(part.shape, piece.data.dtype, pieces, axes)
        return
    if shard.shape != part.shape:
        raise ValueError(
            f"two parameters hold {part.name}, one with global shape {shard.shape}, one with "
            f"{part.shape}: their layouts must give the same shape."
        )
    shards[part.name] = replace(shard, pieces=shard.pieces + pieces)


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cut the flat range [start, stop) of a tensor into boxes: head, whole rows, tail."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (((start,), (stop - start,)) if shape else ((), ()))
        return
    row = prod(shape[1:])  # elements of one index of the first dimension
    first, last = start // row, (stop - 1) // row
    if first == last:  # inside one row: cut that row in its remaining dimensions
        if stop - start == row:
            yield (first, *(0,) * (len(shape) - 1)), (1, *shape[1:])
            return
        for offsets, lengths in flat_boxes(shape[1:], start - first * row, stop - first * row):
            yield (first, *offsets), (1, *lengths)
        return
    if start > first * row:  # head: the end of the first row
        yield from flat_boxes(shape, start, (first + 1) * row)
        first += 1
    tail = stop < (last + 1) * row
    whole_rows = last - first + (0 if tail else 1)
    if whole_rows:
        yield (first, *(0,) * (len(shape) - 1)), (whole_rows, *shape[1:])
    if tail:  # the beginning of the last row
        yield from flat_boxes(shape, last * row, stop)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _flat_index(shape: tuple[int, ...], index: tuple[int, ...]) -> int:
    return sum(i * s for i, s in zip(index, _strides(shape), strict=True))


def _intersect(
    a: tuple[int, ...], a_len: tuple[int, ...], b: tuple[int, ...], b_len: tuple[int, ...]
) -> Box | None:
    begin = tuple(max(x, y) for x, y in zip(a, b, strict=True))
    end = tuple(min(x + n, y + m) for x, n, y, m in zip(a, a_len, b, b_len, strict=True))
    if any(e <= s for s, e in zip(begin, end, strict=True)):
        return None
    return begin, tuple(e - s for s, e in zip(begin, end, strict=True))
