"""The optimizer of all data-parallel engines: updates the ranges of weights of this rank.

A ``GradientSync`` lists its weights in units (buckets, or parameters sharded by FSDP2). This
rank owns a flat range of every unit: a slice if the engine shards the optimizer (ZeRO,
Rajbhandari et al. 2020, arXiv:1910.02054), else the whole unit. 16-bit weights have float32
main weights; float32 and float64 weights are their own main weights. After the update the
engine all-gathers the weights; under FSDP2 the modules gather them in forward.

Three levels, from large to small: a **unit** is what the engine communicates at once; a
**segment** is a part of the rank's range with one rule and with its state in one place (device
or host); a **run** is a part of a segment with one ``UpdateGroup``, updated by one call.
A flat range has no shapes: weight decay, the share of the norm and the boxes of a checkpoint
come from the parameters' layouts. A ``MatrixRule`` gets whole matrices by a
``MatrixExchange``, between two elementwise parts on the runs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Literal, cast

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from mcore_parallel.collectives import all_reduce
from mcore_parallel.data_parallel.gradient_sync import (
    GradientSync,
    OwnedRange,
    OwnedUnit,
    clip_ranges,
)
from mcore_parallel.data_parallel.grads import grad_norm, owned_views
from mcore_parallel.data_parallel.matrix_exchange import MatrixExchange, TPMode
from mcore_parallel.data_parallel.optimizer_segments import (
    Segment,
    SegmentRun,
    build_runs,
    bytes_on_host,
    check_rounding,
    has_weight_decay,
    main_dtype,
    new_segment,
    segment_view,
    share_out,
)
from mcore_parallel.kernels.rounding import round_stochastically_
from mcore_parallel.offloading.host_updates import CudaQueues, HostUpdates
from mcore_parallel.offloading.state_memory import allocate_state, allocate_state_file
from mcore_parallel.optimizers.update_rule import (
    AVERAGE,
    AnyRule,
    MaskableRule,
    MatrixRule,
    UpdateGroup,
    UpdateRule,
    unless_applied,
)
from mcore_parallel.sharding import NamedParameter, Shard

_MAX_ELEMENTS = 1 << 24
"""Most elements that one call updates, which bounds the temporary memory of casts and masks."""

RowFactors = Mapping[str, Float[Tensor, " F"]]
"""Factors of rows by parameter name: one for each row that this rank holds."""

NO_FACTORS: RowFactors = MappingProxyType({})
NO_RATES: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Rates:
    """The arguments of ``step``: equal for all runs of one step."""

    num_steps: int
    lr: float
    named_lrs: Mapping[str, float]
    weight_decay: float
    grad_scale: Float[Tensor, ""] | float
    row_factors: RowFactors
    is_applied: Bool[Tensor, ""] | None


@dataclass(frozen=True, slots=True)
class _Work:
    """One operation of a step, on one run or on one chunk of matrices.

    ``update`` is the complete update of a run with an elementwise rule. For matrices:
    ``message`` writes a run's messages, ``send`` starts the exchange of a chunk, ``compute``
    computes the directions of the matrices that this rank owns, ``receive`` returns the
    directions of this rank's runs, ``apply`` updates the weights of a run, ``free`` drops the
    chunk's memory.
    """

    kind: Literal["update", "message", "send", "compute", "receive", "apply", "free"]
    chunk: int = -1
    run: SegmentRun | None = None
    begin: int = 0
    """Offset of the run in the flat tensors of its chunk."""


class DistributedOptimizer:
    """Applies update rules to the ranges of weights that this rank owns.

    Attributes:
        rule: rule of parameters without a group.
        num_steps: number of updates so far; set it when state is loaded.
    """

    def __init__(
        self,
        data_parallel: GradientSync,
        rule: AnyRule,
        *,
        group_of: Callable[[NamedParameter], UpdateGroup] | None = None,
        host_share: float = 0.0,
        host_folder: str = "",
        has_main: bool = True,
        ema_decay: float = 0.0,
        matrix_tp_mode: TPMode = "distributed",
    ) -> None:
        """Allocate main weights and moments of this rank's ranges.

        No communication, unless a parameter has a ``MatrixRule``: then all-gathers over the
        ranks of the pipeline stage, before anything is allocated.

        Args:
            data_parallel: the engine, which holds weights and gradients and assigns ranges to
                ranks.
            rule: the update of parameters without a group.
            group_of: returns the rule and rates of a parameter; None: ``rule`` for all
                parameters, and weight decay for matrices only.
            host_share: fraction, 0 to 1, of main weights and moments to keep in host memory,
                beginning with those that are updated first.
            host_folder: folder of a file that holds this fraction instead of host memory, see
                ``allocate_state_file``; empty: use memory.
            has_main: keep float32 main weights of 16-bit weights. Without main weights,
                bfloat16 weights are updated in float32 and rounded stochastically.
            ema_decay: factor on the exponential moving average of the weights in each update;
                0: no average is kept.
            matrix_tp_mode: how tensor ranks update a matrix that they share, see
                ``MuonConfig.muon_tp_mode``.

        Raises:
            ValueError: if ``has_main`` is False for float16 weights, or for weights whose
                float32 copies the engine keeps; if host memory or the folder is too small.
        """
        self.data_parallel = data_parallel
        self.rule = rule
        self.num_steps = 0
        self._has_main, self._ema_decay = has_main, ema_decay
        order = data_parallel.update_order
        groups = {
            named.parameter: group_of(named) if group_of else _plain_group(rule, named)
            for unit in order
            for named in unit.members
        }
        ctx, device = data_parallel.ctx, data_parallel.ctx.device
        self._exchange: MatrixExchange | None = None
        if any(isinstance(group.rule, MatrixRule) for group in groups.values()):
            stage = ctx.axis("tp", "cp", "dp")
            self._exchange = MatrixExchange(order, groups, stage, device, matrix_tp_mode)
        if not has_main:
            check_rounding(data_parallel.units)
        parts_of_units = list(share_out(order, groups, host_share))
        has_average = ema_decay > 0.0
        size = bytes_on_host(parts_of_units, has_main, has_average)
        if host_folder:
            memory = allocate_state_file(size, host_folder)
        else:
            memory = allocate_state(size, device)
        self._segments: dict[OwnedUnit, list[Segment]] = {
            unit: [
                new_segment(unit, part, has_main, has_average, memory.zeros) for part in parts
            ]
            for unit, parts in parts_of_units
        }
        self._norm_views = owned_views(data_parallel.grad_shards().values())
        chunk_of = {} if self._exchange is None else self._exchange.chunk_of
        runs = {
            unit: [run for each in segments for run in build_runs(each, groups, chunk_of)]
            for unit, segments in self._segments.items()
        }
        self._work = _plan_step(runs, self._exchange)
        runs_in_order = (work.run for works in self._work.values() for work in works)
        on_host = [run for run in runs_in_order if run is not None and run.on_host]
        self._host = HostUpdates(
            [run.state() for run in on_host],
            CudaQueues(device) if device.type == "cuda" and on_host else None,
            memory.read_ahead if host_folder else None,
        )
        self._is_checked = False

    def grad_norm(self) -> Float[Tensor, ""]:
        """Return the L2 norm of the finished gradients, each logical element counted once.

        One all-reduce over the world; equal on all ranks; float64, on the device.
        """
        self._check_finished()
        ctx = self.data_parallel.ctx
        return grad_norm(self._norm_views, ctx.world, ctx.device)

    def step(
        self,
        lr: float,
        weight_decay: float,
        grad_scale: Float[Tensor, ""] | float = 1.0,
        row_factors: RowFactors = NO_FACTORS,
        named_lrs: Mapping[str, float] = NO_RATES,
        is_applied: Bool[Tensor, ""] | None = None,
    ) -> None:
        """Update weights and state from the finished gradients, then gather the weights.

        Args:
            lr: learning rate.
            weight_decay: decoupled decay, multiplied by the factor of each ``UpdateGroup``.
            grad_scale: factor on the gradients, such as a clip coefficient.
            row_factors: factors by which rows of parameters are multiplied after the update,
                equal on all ranks that hold a row.
            named_lrs: learning rates of the groups with an ``lr_name``.
            is_applied: a mask on the device, equal on all ranks. If the mask is false, weights
                and state do not change by a bit; the caller subtracts one from ``num_steps``
                when the host has read the mask. None: the step is applied. A mask costs copies
                of the state, except for a ``MaskableRule`` without ``ema_decay`` and
                ``row_factors``.

        Raises:
            RuntimeError: if the gradients are not finished; or, in the first step, on every
                rank, if weights were written without a ``refresh`` of their main weights.
        """
        self._check_finished()
        if not self._is_checked:
            self._check_main_weights()
            self._is_checked = True
        self.num_steps += 1

        rates = _Rates(
            self.num_steps, lr, named_lrs, weight_decay, grad_scale, row_factors, is_applied
        )
        flats: dict[int, Tensor] = {}  # messages, then directions, by chunk
        with self._host.updating():
            for unit in self.data_parallel.gathering():
                for work in self._work[unit]:
                    if work.run is None or not work.run.on_host:
                        self._run_work(work, work.run, rates, flats)
                        continue
                    with self._host.next_piece() as state:
                        self._run_work(work, work.run.with_state(state), rates, flats)

    def _run_work(
        self, work: _Work, run: SegmentRun | None, rates: _Rates, flats: dict[int, Tensor]
    ) -> None:
        """Perform one operation; ``run`` is that of ``work`` with its state on the device."""
        exchange, chunk = self._exchange, work.chunk
        if work.kind == "update":
            assert run is not None
            self._update(run, rates, run.grad, is_direction=False)
            return
        assert exchange is not None
        if work.kind == "send":  # a rank that owns no part of the chunk wrote no message
            exchange.send(chunk, flats.pop(chunk) if chunk in flats else exchange.flat(chunk))
        elif work.kind == "compute":
            exchange.compute(chunk, rates.num_steps, rates.is_applied)
        elif work.kind == "receive":
            flats[chunk] = exchange.receive(chunk)
        elif work.kind == "free":
            del flats[chunk]
        else:
            assert run is not None
            if chunk not in flats:
                flats[chunk] = exchange.flat(chunk)
            flat = flats[chunk][work.begin : work.begin + run.grad.numel()]
            if work.kind == "message":
                _write_message(run, rates, flat)
            else:
                self._update(run, rates, flat, is_direction=True)

    def _update(
        self, run: SegmentRun, rates: _Rates, change: Tensor, *, is_direction: bool
    ) -> None:
        """Update the weights and the state of one run in place.

        bfloat16 main weights are updated in float32 and rounded stochastically.

        Args:
            run: weights, moments and group.
            rates: arguments of the step.
            change: gradients for an elementwise rule, or directions of a matrix rule.
            is_direction: whether ``change`` holds directions.
        """
        group, rule, mask = run.group, run.group.rule, rates.is_applied
        if (
            mask is not None
            and not (is_direction or self._ema_decay or rates.row_factors)
            and isinstance(rule, MaskableRule)
        ):
            rule, mask = rule.masked(mask), None
        # muP: a matrix of width w times the base takes lr / w, gradient * w and decay * w, so
        # that Adam's epsilon is in effect divided by w, and the decay of a step unchanged.
        lr = rates.named_lrs[group.lr_name] if group.lr_name else rates.lr
        lr = lr * group.lr_factor / group.width
        decay = rates.weight_decay * group.width * group.decay_factor
        if is_direction:
            update = partial(_apply_direction, lr=lr, weight_decay=decay)
        else:
            width, scale = group.width, rates.grad_scale
            # A cast, since isinstance of a protocol takes 16 us for each run in every step.
            update = partial(
                cast("UpdateRule", rule).update,
                num_steps=rates.num_steps,
                lr=lr,
                weight_decay=decay,
                grad_scale=scale if width == 1.0 else scale * width,
            )
        is_narrow = run.main.dtype == torch.bfloat16
        # float32 copies and masked updates need temporary memory: update in bounded parts.
        is_cut = is_narrow or mask is not None
        length = _MAX_ELEMENTS if is_cut else max(1, run.main.numel())
        for begin in range(0, run.main.numel(), length):
            cut = slice(begin, begin + length)
            main = run.main[cut].float() if is_narrow else run.main[cut]
            target = main if is_narrow else run.weights[cut]
            moments = {name: moment[cut] for name, moment in run.moments.items()}
            with unless_applied(mask, (main, target, *moments.values())):
                update(main, change[cut], moments, target)
                if rates.row_factors:
                    owned = list(clip_ranges(run.owned, begin, begin + main.numel()))
                    _scale_rows(owned, rates.row_factors, main, target)
                if self._ema_decay:
                    moments[AVERAGE].lerp_(main, 1 - self._ema_decay)
            if is_narrow:
                round_stochastically_(run.main[cut], main, rates.num_steps)

    def main_ranges(self) -> list[tuple[OwnedRange, Tensor]]:
        """List the ranges of parameters that this rank updates, with views of main weights."""
        return [
            (owned, owned.view(segment.main))
            for segments in self._segments.values()
            for segment in segments
            for owned in clip_ranges(
                segment.unit.owned_ranges(), segment.begin, segment.begin + segment.main.numel()
            )
        ]

    def own_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's main weights and moments by name, with those not in checkpoints."""
        for segment in (s for each in self._segments.values() for s in each):
            ranges, stop = segment.unit.owned_ranges(), segment.begin + segment.main.numel()
            for owned in clip_ranges(ranges, segment.begin, stop):
                for kind, flat in {"main": segment.main, **segment.moments}.items():
                    yield f"{kind}.{owned.named.name}", owned.view(flat)

    def named_shards(self) -> dict[str, Shard]:
        """Return shards of main weights and moments by logical name, for a checkpoint.

        Names are ``main.<logical>``, unless the parameter is its own main weight, and
        ``<moment>.<logical>``, such as ``exp_avg.<logical>``. To load, write into the pieces,
        set ``num_steps``, then call ``refresh``.
        """
        shards = {} if self._exchange is None else self._exchange.named_shards()
        segments = [s for each in self._segments.values() for s in each]
        kinds = dict.fromkeys(name for s in segments for name in s.moments)
        for kind in ("main", *kinds):
            flats = [
                (s.unit, s.begin, s.main if kind == "main" else s.moments[kind])
                for s in segments
                if (self._keeps_main(s.unit) if kind == "main" else kind in s.moments)
            ]
            described = self.data_parallel.owned_shards(flats)
            shards.update({f"{kind}.{name}": shard for name, shard in described.items()})
        return shards

    def restart_average(self) -> None:
        """Set the averages of weights, if kept, to the main weights; no communication."""
        for segment in (s for each in self._segments.values() for s in each):
            if AVERAGE in segment.moments:
                segment.moments[AVERAGE].copy_(segment.main)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the model's weights by their averages within the ``with`` block.

        After the block the trained weights are restored bit for bit, from copies of this rank's
        ranges. All-gathers over the data ranks before and after the block.
        """
        self.data_parallel.wait_params()
        trained: list[tuple[Tensor, Tensor]] = []
        for unit in self.data_parallel.gathering():
            for segment in self._segments[unit]:
                targets = [segment.weights]
                if unit.own_main() is not None:
                    targets.append(segment_view(unit.own_weights(), segment))
                for target in targets:
                    trained.append((target, target.clone()))
                    target.copy_(segment.moments[AVERAGE])
        self.data_parallel.wait_params()
        try:
            yield
        finally:
            # The engine yields units in the same order again, so the copies come in order.
            copies = iter(trained)
            for unit in self.data_parallel.gathering():
                for _ in range(len(self._segments[unit]) * (1 + (unit.own_main() is not None))):
                    target, copy = next(copies)
                    target.copy_(copy)
            self.data_parallel.wait_params()

    def refresh(self, *, from_parameters: bool = False) -> None:
        """Make weights and main weights equal after a load; gathers over the data ranks.

        Args:
            from_parameters: copy the parameters to the main weights, which were not loaded.
                By default the main weights are rounded into the parameters.
        """
        if from_parameters:
            for segment in self._kept_apart():
                segment.main.copy_(segment_view(segment.unit.own_weights(), segment))
                if segment.unit.own_main() is not None:
                    segment.weights.copy_(segment.main)
        else:
            for unit in self.data_parallel.gathering():
                for segment in self._kept_apart(unit):
                    segment.weights.copy_(segment.main)
                    if unit.own_main() is not None:
                        segment_view(unit.own_weights(), segment).copy_(segment.main)
        self.data_parallel.wait_params()

    def refresh_in_full(self) -> None:
        """Replace fp8-gathered weights by rounded main weights, for a save.

        Gathers these weights over the data ranks in the model's dtype. GEMMs cast them to the
        same fp8 numbers; the next step gathers them in fp8 again.
        """
        self.data_parallel.wait_params()
        for segment in self._kept_apart():
            if segment.unit.is_narrow:
                segment.weights.copy_(segment.main)
        self.data_parallel.gather_in_full()

    def _kept_apart(self, unit: OwnedUnit | None = None) -> list[Segment]:
        """List the segments of one unit, or of all, whose main weights are separate tensors."""
        units = self._segments if unit is None else (unit,)
        segments = [segment for each in units for segment in self._segments[each]]
        return [s for s in segments if self._keeps_main(s.unit)]

    def _keeps_main(self, unit: OwnedUnit) -> bool:
        return self._has_main and main_dtype(unit) != unit.dtype

    def _check_main_weights(self) -> None:
        """Raise on all ranks if rounded main weights differ from the weights on any rank.

        The update would overwrite such weights. One all-reduce over the world.
        """
        ctx = self.data_parallel.ctx
        differs = torch.zeros((), device=ctx.device)
        for segment in (s for s in self._kept_apart() if not s.unit.is_narrow):
            pairs = zip(
                segment.main.split(_MAX_ELEMENTS),
                segment.weights.split(_MAX_ELEMENTS),
                strict=True,
            )
            for main, weights in pairs:
                rounded = main.to(weights.device).to(weights.dtype).view(torch.uint8)
                differs += (rounded != weights.view(torch.uint8)).any()
        if all_reduce(differs, ctx.world, "max").item():
            raise RuntimeError(
                "weights were loaded or set after the optimizer was built, and differ from its "
                "float32 main weights: call refresh(from_parameters=True) after the change, or "
                "refresh() if main weights were loaded too."
            )

    def _check_finished(self) -> None:
        if not self.data_parallel.is_finished:
            raise RuntimeError(
                "the optimizer needs summed gradients: call finish() after the last backward"
            )


def _plain_group(rule: AnyRule, named: NamedParameter) -> UpdateGroup:
    return UpdateGroup(rule, decay_factor=float(has_weight_decay(named)))


def _plan_step(
    runs: Mapping[OwnedUnit, Sequence[SegmentRun]], exchange: MatrixExchange | None
) -> dict[OwnedUnit, list[_Work]]:
    """List the operations of a step for each unit, in the order of updates.

    The matrices of a unit come before its elementwise runs. Exchanges are pipelined: while
    this rank computes chunk i, messages of chunk i + 1 and directions of chunk i - 1 are in
    flight. All ranks start the exchanges of all chunks in the same order.
    """
    num_chunks = 0 if exchange is None else exchange.num_chunks
    # For each chunk: its runs, each with its offset in the chunk's flat tensors.
    runs_of_chunks: list[list[tuple[SegmentRun, int]]] = []
    for chunk in range(num_chunks):
        assert exchange is not None
        chunk_runs = [run for each in runs.values() for run in each if run.chunk == chunk]
        sizes = [run.main.numel() for run in chunk_runs]
        begins = [0, *accumulate(sizes)][: len(sizes)]
        runs_of_chunks.append(list(zip(chunk_runs, begins, strict=True)))
        exchange.place(chunk, _adjacent_runs(runs_of_chunks[-1]), sum(sizes))
    num_sent = num_computed = 0
    num_unapplied = [len(each) for each in runs_of_chunks]

    def compute_up_to(chunk: int) -> Iterator[_Work]:
        """Send and compute ahead of ``chunk``, then receive its directions."""
        nonlocal num_sent, num_computed
        while num_computed < min(chunk + 2, num_chunks):
            while num_sent < min(num_computed + 2, num_chunks):
                for run, begin in runs_of_chunks[num_sent]:
                    yield _Work("message", num_sent, run.only_moments(), begin)
                yield _Work("send", num_sent)
                num_sent += 1
            yield _Work("compute", num_computed)
            num_computed += 1
        yield _Work("receive", chunk)

    plan: dict[OwnedUnit, list[_Work]] = {}
    for position, (unit, unit_runs) in enumerate(runs.items()):
        works = plan[unit] = []
        for chunk in range(num_chunks):
            if exchange is not None and exchange.first_unit(chunk) == position:
                works += compute_up_to(chunk)  # also on ranks without a run of the chunk
            runs_here = [
                (run, begin) for run, begin in runs_of_chunks[chunk] if run.unit is unit
            ]
            works += [_Work("apply", chunk, run.only_main(), begin) for run, begin in runs_here]
            num_unapplied[chunk] -= len(runs_here)
            if runs_here and not num_unapplied[chunk]:
                works.append(_Work("free", chunk))
        works += [_Work("update", run=run) for run in unit_runs if run.chunk < 0]
    return plan


def _adjacent_runs(
    runs_with_offsets: Sequence[tuple[SegmentRun, int]],
) -> Iterator[tuple[OwnedUnit, int, int, int]]:
    """Join adjacent runs of a unit; yield unit, begin, stop and offset in flat tensors."""
    joined: tuple[OwnedUnit, int, int, int] | None = None
    for run, begin in runs_with_offsets:
        stop = run.begin + run.main.numel()
        if joined is not None and joined[0] is run.unit and joined[2] == run.begin:
            joined = (*joined[:2], stop, joined[3])
            continue
        if joined is not None:
            yield joined
        joined = (run.unit, run.begin, stop, begin)
    if joined is not None:
        yield joined


def _write_message(run: SegmentRun, rates: _Rates, flat: Tensor) -> None:
    """Update a run's moments by its matrix rule, and write its messages into ``flat``."""
    rule = cast("MatrixRule", run.group.rule)
    for begin in range(0, flat.numel(), _MAX_ELEMENTS):
        cut = slice(begin, begin + _MAX_ELEMENTS)
        moments = {name: moment[cut] for name, moment in run.moments.items()}
        with unless_applied(rates.is_applied, moments.values()):
            flat[cut] = rule.message(run.grad[cut], moments, grad_scale=rates.grad_scale)


def _apply_direction(
    main: Shaped[Tensor, " n"],
    direction: Shaped[Tensor, " n"],
    _moments: Mapping[str, Tensor],
    parameter: Shaped[Tensor, " n"],
    *,
    lr: float,
    weight_decay: float,
) -> None:
    """Move main weights against a direction, in place, with decoupled decay."""
    main.mul_(1 - lr * weight_decay).sub_(direction, alpha=lr)
    if parameter.dtype != main.dtype:
        parameter.copy_(main)


def _scale_rows(
    ranges: Sequence[OwnedRange],
    factors: RowFactors,
    main: Shaped[Tensor, " n"],
    weights: Shaped[Tensor, " n"],
) -> None:
    """Multiply rows of main weights by their factors, in place, and copy them to weights.

    Args:
        ranges: the parts of parameters that ``main`` holds.
        factors: factors of the rows of some parameters, by parameter name.
        main: flat main weights.
        weights: flat weights of the model; the same memory as ``main`` if the dtypes are equal.
    """
    for owned in ranges:
        rows = factors.get(owned.named.name)
        if rows is None:
            continue
        rows = rows.to(main.device, main.dtype)
        width = owned.named.parameter.numel() // rows.numel()
        part, begin = owned.view(main), owned.first
        # A flat range is at most the tail of a row, full rows, and the head of a row.
        while begin < owned.stop:
            row = begin // width
            count = 1 if begin % width else max(1, (owned.stop - begin) // width)
            stop = min(owned.stop, (row + count) * width)
            piece = part[begin - owned.first : stop - owned.first]
            piece.view(count, -1).mul_(rows[row : row + count, None])
            begin = stop
        if weights.dtype != main.dtype:
            owned.view(weights).copy_(part)
