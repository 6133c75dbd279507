"""Optimizer state of this rank's shards, split by update rule and by device.

The range that a rank owns of a unit is split into ``Segment``s: one for each rule and each
device (GPU or host). A segment is split into ``SegmentRun``s: neighbouring parameters of equal
groups, which one call updates.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from mcore_parallel.data_parallel.gradient_sync import OwnedRange, OwnedUnit, clip_ranges
from mcore_parallel.offloading.config import PIECE_BYTES
from mcore_parallel.optimizers.update_rule import AVERAGE, AnyRule, UpdateGroup
from mcore_parallel.sharding import NamedParameter

_CUT_MULTIPLE = 64
"""The host's share of a unit is rounded up to a multiple of this number of elements."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Optimizer state of neighbouring elements of a unit, with one rule and on one device."""

    unit: OwnedUnit
    rule: AnyRule
    """The rule of all parameters of the segment."""
    begin: int
    """Offset of the segment in the rank's part of the unit."""
    main: Tensor
    moments: dict[str, Tensor]
    weights: Tensor
    """Weights of the model: ``main`` in the model's dtype, or ``main`` itself."""
    on_host: bool
    """Whether moments, and main weights if separate from the weights, are in host memory."""


@dataclass(frozen=True, slots=True)
class SegmentRun:
    """Views over neighbouring parameters of a segment that are updated by one call.

    The padding between them is included: its gradient is 0, so it stays 0.
    """

    unit: OwnedUnit
    begin: int
    """Offset of the run in the rank's part of the unit."""
    main: Tensor
    grad: Tensor
    moments: dict[str, Tensor]
    weights: Tensor
    owned: list[OwnedRange]
    """The ranges of parameters in this run."""
    group: UpdateGroup
    chunk: int
    """Number of the chunk of a ``MatrixExchange``; -1: its rule is elementwise."""
    on_host: bool

    def only_moments(self) -> "SegmentRun":
        """Return the run with the moments as its only state, for writing messages."""
        moments = {name: m for name, m in self.moments.items() if name != AVERAGE}
        return replace(self, main=self.weights, moments=moments)

    def only_main(self) -> "SegmentRun":
        """Return the run with main weights and average as its only state, for the update."""
        moments = {name: m for name, m in self.moments.items() if name == AVERAGE}
        return replace(self, moments=moments)

    def state(self) -> list[Tensor]:
        """List the tensors of the state: separate main weights, then moments."""
        return _kept(self)

    def with_state(self, state: Sequence[Tensor]) -> "SegmentRun":
        """Return the run with its state replaced by copies of the tensors of ``state()``."""
        first = len(state) - len(self.moments)  # 1 if the state begins with main weights
        main = state[0] if first else self.main
        moments = dict(zip(self.moments, state[first:], strict=True))
        return replace(self, main=main, moments=moments)


def _kept(part: Segment | SegmentRun) -> list[Tensor]:
    """List the state: ``main``, unless it is the weights themselves, and the moments."""
    moments = list(part.moments.values())
    is_separate = part.main.data_ptr() != part.weights.data_ptr()
    return [part.main, *moments] if is_separate else moments


def main_dtype(unit: OwnedUnit) -> torch.dtype:
    """Return the dtype of a unit's main weights: float32 or wider."""
    return torch.promote_types(unit.dtype, torch.float32)


def segment_view(flat: Tensor, segment: Segment) -> Tensor:
    """Return a segment's part of a flat tensor over this rank's part of the unit."""
    return flat[segment.begin : segment.begin + segment.main.numel()]


@dataclass(frozen=True, slots=True)
class _Range:
    """A range of this rank's part of a unit, from which a ``Segment`` is built."""

    begin: int
    stop: int
    on_host: bool
    rule: AnyRule


SharedOut = Sequence[tuple[OwnedUnit, Sequence[_Range]]]
"""The ranges of each unit, in memory order."""


def share_out(
    units: Sequence[OwnedUnit], groups: Mapping[nn.Parameter, UpdateGroup], host_share: float
) -> Iterator[tuple[OwnedUnit, list[_Range]]]:
    """Cut each unit into ranges of one rule, with state on the host or on the device."""
    # State of the first units is on the host until the share is used up. A cut inside a unit is
    # rounded up to a multiple of _CUT_MULTIPLE, which keeps both parts aligned.
    sizes = [unit.own_grads().numel() for unit in units]
    num_remaining = round(host_share * sum(sizes))
    for unit, size in zip(units, sizes, strict=True):
        num_on_host = min(size, -(-num_remaining // _CUT_MULTIPLE) * _CUT_MULTIPLE)
        num_remaining = max(0, num_remaining - num_on_host)
        ranges: list[_Range] = []
        for begin, stop, rule in _by_rule(unit, groups, size):
            cut = min(max(begin, num_on_host), stop)  # the host has the elements below it
            parts = (begin, cut, True, rule), (cut, stop, False, rule)
            ranges += [_Range(*part) for part in parts if part[0] < part[1]]
        yield unit, ranges


def _by_rule(
    unit: OwnedUnit, groups: Mapping[nn.Parameter, UpdateGroup], size: int
) -> Iterator[tuple[int, int, AnyRule]]:
    """Yield ranges of neighbouring parameters of one rule, with the padding after them."""
    begin, rule = 0, None
    for owned in unit.owned_ranges():
        next_rule = groups[owned.named.parameter].rule
        if rule is not None and next_rule is not rule:
            yield begin, owned.offset, rule
            begin = owned.offset
        rule = next_rule
    if rule is not None:
        yield begin, size, rule


def bytes_on_host(shared_out: SharedOut, has_main: bool, has_average: bool) -> int:
    """Return the bytes of all state on the host, each tensor padded to a multiple of 8."""
    total = 0
    for unit, parts in shared_out:
        for part in (part for part in parts if part.on_host):
            for dtype in _kept_dtypes(unit, part.rule, has_main, has_average).values():
                total += -(-(part.stop - part.begin) * dtype.itemsize // 8) * 8
    return total


def check_rounding(units: Sequence[OwnedUnit]) -> None:
    """Raise ``ValueError`` unless bfloat16 weights can be updated without main weights."""
    for unit in units:
        is_wide = main_dtype(unit) == unit.dtype
        if not is_wide and (unit.dtype != torch.bfloat16 or unit.own_main() is not None):
            raise ValueError(
                "--main-params-dtype bf16 rounds updates into bfloat16 weights: it needs "
                "--bf16, and for fully sharded weights --main-grads-dtype bf16, without which "
                "their rows are float32."
            )


def has_weight_decay(named: NamedParameter) -> bool:
    """Whether weight decay applies: to all but biases and logically one-dimensional tensors.

    Decided by the logical tensors, so a flat slice or a stack of norms does not count as a
    matrix.
    """
    return all(
        len(part.shape) > 1 and part.name.rpartition(".")[2] != "bias"
        for part in named.layout.parts
    )


def new_segment(
    unit: OwnedUnit,
    part: _Range,
    has_main: bool,
    has_average: bool,
    host_zeros: Callable[..., Tensor],
) -> Segment:
    """Allocate the state of a range; copy main weights and averages from the weights.

    Args:
        unit: the unit.
        part: a range of this rank's part of the unit.
        has_main: whether 16-bit weights have main weights.
        has_average: whether an average of the weights is kept in addition to the moments.
        host_zeros: allocates a tensor in host memory, with the arguments of ``torch.zeros``.
    """
    weights = _updated(unit)[part.begin : part.stop]
    dtypes = _kept_dtypes(unit, part.rule, has_main, has_average)
    shape, zeros = tuple(weights.shape), host_zeros
    if not part.on_host:
        zeros = partial(torch.zeros, device=weights.device)
    wide, main = dtypes.pop("main", None), weights
    if wide is not None:
        # The cast runs on the device that keeps the result: a GPU may have no memory for it.
        main = zeros(shape, dtype=wide).copy_(weights.cpu() if part.on_host else weights)
    moments = {name: zeros(shape, dtype=dtype) for name, dtype in dtypes.items()}
    if AVERAGE in moments:
        moments[AVERAGE].copy_(main)
    return Segment(unit, part.rule, part.begin, main, moments, weights, part.on_host)


def _updated(unit: OwnedUnit) -> Tensor:
    """Return the weights that an update writes: the engine's main weights, else the model's."""
    engine_main = unit.own_main()
    return unit.own_weights() if engine_main is None else engine_main


def _kept_dtypes(
    unit: OwnedUnit, rule: AnyRule, has_main: bool, has_average: bool
) -> dict[str, torch.dtype]:
    """Return the dtypes of the state: moments, and ``main`` if it is a separate tensor."""
    narrow = _updated(unit).dtype
    wide = torch.promote_types(narrow, torch.float32)
    dtypes = {"main": wide} if has_main and wide != narrow else {}
    for name, moment in rule.moments.items():
        dtypes[name] = torch.bfloat16 if moment == "bf16" else wide
    return dtypes | ({AVERAGE: wide} if has_average else {})


def build_runs(
    segment: Segment,
    groups: Mapping[nn.Parameter, UpdateGroup],
    chunk_of: Mapping[nn.Parameter, int],
) -> list[SegmentRun]:
    """Merge neighbouring parameters of one group and chunk into as few runs as possible.

    Runs whose state is in host memory are at most one piece (``PIECE_BYTES``) long.
    """
    stop = segment.begin + segment.main.numel()
    ends: list[tuple[int, int, tuple[UpdateGroup, int]]] = []
    ranges = list(clip_ranges(segment.unit.owned_ranges(), segment.begin, stop))
    for owned in ranges:
        # A parameter of the same kind extends the last run, padding between them included.
        parameter = owned.named.parameter
        kind = groups[parameter], chunk_of.get(parameter, -1)
        begin, end = owned.offset, owned.offset + owned.stop - owned.first
        if ends and ends[-1][2] == kind:
            begin = ends.pop()[0]
        ends.append((begin, end, kind))
    grads = segment_view(segment.unit.own_grads(), segment)
    longest = _longest_run(segment)
    runs = []
    for begin, end, (group, chunk) in ends:
        for first in range(begin, end, longest):
            cut = slice(first, min(end, first + longest))
            runs.append(
                SegmentRun(
                    unit=segment.unit,
                    begin=segment.begin + cut.start,
                    main=segment.main[cut],
                    grad=grads[cut],
                    moments={n: moment[cut] for n, moment in segment.moments.items()},
                    weights=segment.weights[cut],
                    owned=list(clip_ranges(ranges, cut.start, cut.stop)),
                    group=group,
                    chunk=chunk,
                    on_host=segment.on_host,
                )
            )
    return runs


def _longest_run(segment: Segment) -> int:
    """Return the largest number of weights in a run: all, or those of one piece on the host."""
    if not segment.on_host:
        return max(1, segment.main.numel())
    width = sum(tensor.itemsize for tensor in _kept(segment))
    return max(1, PIECE_BYTES // max(1, width))
