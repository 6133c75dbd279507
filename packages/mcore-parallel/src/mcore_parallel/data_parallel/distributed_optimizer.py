"""An update rule over the units of a ``GradientSync``: sharded over data ranks, or whole.

One implementation: this rank updates what it owns of every unit, which is a slice where the
engine shards (ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054) and all of it otherwise. 16-bit
weights have float32 main weights; float32 and float64 weights are their own. After the update
the engine gathers the weights, or its modules do where they need them.

A flat range has no shapes, so what depends on them (weight decay, which rank counts in the
norm, what a checkpoint holds) comes from the parameters' layouts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from mcore_parallel.collectives import all_reduce
from mcore_parallel.data_parallel.gradient_sync import (
    GradientSync,
    OwnedRange,
    OwnedUnit,
    clipped,
)
from mcore_parallel.data_parallel.grads import grad_norm, owned_views
from mcore_parallel.data_parallel.optimizer_segments import (
    Segment,
    SegmentRun,
    build_runs,
    bytes_on_host,
    check_rounding,
    main_dtype,
    new_segment,
    segment_view,
    share_out,
)
from mcore_parallel.kernels.rounding import round_stochastically_
from mcore_parallel.offloading.host_updates import CudaQueues, HostUpdates
from mcore_parallel.offloading.state_memory import allocate_state, allocate_state_file
from mcore_parallel.optimizers.update_rule import UpdateRule
from mcore_parallel.sharding import NamedParameter, Shard

_RUN = 1 << 24
"""Elements that are updated at one time, which bounds temporary memory."""

RowFactors = Mapping[str, Float[Tensor, " F"]]
"""By the name of a parameter one factor for each of this rank's rows."""

NO_FACTORS: RowFactors = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Rates:
    """Numbers of one step."""

    num_steps: int
    lr: float
    weight_decay: float
    row_factors: RowFactors


class DistributedOptimizer:
    """An update rule on main gradients, over the ranges that this rank owns.

    Attributes:
        rule: updates a range.
        num_steps: updates made; set it when state is loaded.
    """

    def __init__(
        self,
        data_parallel: GradientSync,
        rule: UpdateRule,
        *,
        step_width: Callable[[NamedParameter], float] = lambda _named: 1.0,
        host_share: float = 0.0,
        host_folder: str = "",
        has_main: bool = True,
    ) -> None:
        """Allocate main weights and moments of this rank's ranges; no communication.

        Args:
            data_parallel: holds weights and gradients; decides who owns which range.
            rule: how a range is updated, and which moments it keeps.
            step_width: what divides a parameter's learning rate, and multiplies its gradient
                and decay (muP): Adam's step has no scale, so this divides its epsilon, and a
                step's decay stays.
            host_share: of the state that is kept in host memory, the first in the order of
                updates: main weights, if they are apart from the weights, and moments.
            host_folder: where that state is in a file instead, see ``allocate_state_file``.
            has_main: keep 16-bit weights in float32 too; else bfloat16 weights are rounded
                stochastically after an update in float32.

        Raises:
            ValueError: if ``has_main`` is off for weights that are neither bfloat16 nor wide,
                or that an engine keeps in float32; or the host or the folder has no room.
        """
        self.data_parallel = data_parallel
        self.rule = rule
        self.num_steps = 0
        self._has_main = has_main
        if not has_main:
            check_rounding(data_parallel.units)
        device = data_parallel.ctx.device
        shared_out = list(share_out(data_parallel.update_order, host_share))
        size = bytes_on_host(shared_out, rule, has_main)
        if host_folder:
            memory = allocate_state_file(size, host_folder)
        else:
            memory = allocate_state(size, device)
        self._segments: dict[OwnedUnit, list[Segment]] = {
            unit: [new_segment(unit, rule, has_main, memory.zeros, *part) for part in parts]
            for unit, parts in shared_out
        }
        self._norm_views = owned_views(data_parallel.grad_shards().values())
        self._runs = {
            unit: [run for segment in segments for run in build_runs(segment, step_width)]
            for unit, segments in self._segments.items()
        }
        on_host = [run for runs in self._runs.values() for run in runs if run.on_host]
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
    ) -> None:
        """Update the weights on every rank.

        Args:
            lr: learning rate.
            weight_decay: decoupled decay, for the parameters that ``has_weight_decay``.
            grad_scale: multiplies the gradients first: a clip coefficient.
            row_factors: multiply rows of parameters after their update, by the parameters'
                names: one factor for each row of this rank, equal on all that hold the row.

        Raises:
            RuntimeError: if the gradients are not finished; or, in the first step, on every
                rank, if weights were written without a ``refresh`` of their main weights.
        """
        self._check_finished()
        if not self._is_checked:
            self._check_main_weights()
            self._is_checked = True
        self.num_steps += 1

        rates = _Rates(self.num_steps, lr, weight_decay, row_factors)
        with self._host.updating():
            for unit in self.data_parallel.gathering():
                for run in self._runs[unit]:
                    if not run.on_host:
                        self._update(run, rates, grad_scale)
                        continue
                    with self._host.next_piece() as state:
                        self._update(run.with_state(state), rates, grad_scale)

    def _update(self, run: SegmentRun, rates: _Rates, grad_scale: Any) -> None:
        """Update one run by the rule; in bfloat16 in float32, and rounded stochastically."""
        constants: dict[str, Any] = {
            "num_steps": rates.num_steps,
            "lr": rates.lr / run.width,
            "weight_decay": rates.weight_decay * run.width if run.decays else 0.0,
            "grad_scale": grad_scale if run.width == 1.0 else grad_scale * run.width,
        }
        is_narrow = run.main.dtype == torch.bfloat16
        length = _RUN if is_narrow else max(1, run.main.numel())
        for begin in range(0, run.main.numel(), length):
            cut = slice(begin, begin + length)
            main = run.main[cut].float() if is_narrow else run.main[cut]
            target = main if is_narrow else run.weights[cut]
            moments = {name: moment[cut] for name, moment in run.moments.items()}
            self.rule.update(main, run.grad[cut], moments, target, **constants)
            if rates.row_factors:
                owned = list(clipped(run.owned, begin, begin + main.numel()))
                _scale_rows(owned, rates.row_factors, main, target)
            if is_narrow:
                round_stochastically_(run.main[cut], main, rates.num_steps)

    def main_ranges(self) -> list[tuple[OwnedRange, Tensor]]:
        """List what this rank updates of each parameter, with views of its main weights."""
        return [
            (owned, owned.view(segment.main))
            for segments in self._segments.values()
            for segment in segments
            for owned in clipped(
                segment.unit.owned_ranges(), segment.begin, segment.begin + segment.main.numel()
            )
        ]

    def named_shards(self) -> dict[str, Shard]:
        """Describe main weights and moments by logical name, for a checkpoint.

        Names are ``main.<logical>`` where the parameter is not its own main weight, and
        ``<moment>.<logical>``, such as ``exp_avg.<logical>``. Load into the pieces, set
        ``num_steps``, then call ``refresh``.
        """
        shards = {}
        for kind in ("main", *self.rule.moments):
            flats = [
                (s.unit, s.begin, s.main if kind == "main" else s.moments[kind])
                for segments in self._segments.values()
                for s in segments
                if kind != "main" or self._keeps_main(s.unit)
            ]
            described = self.data_parallel.owned_shards(flats)
            shards.update({f"{kind}.{name}": shard for name, shard in described.items()})
        return shards

    def refresh(self, *, from_parameters: bool = False) -> None:
        """Make weights and main weights agree after a load; gathers over the data ranks.

        Args:
            from_parameters: main weights were not loaded: take them from the parameters.
                Otherwise the parameters take theirs from the main weights.
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
        """Round weights that are gathered in fp8 from main weights once more, for a save.

        Gathers these over the data ranks in the model's dtype. GEMMs cast them to the same
        fp8 numbers; the next step rounds them again.
        """
        self.data_parallel.wait_params()
        for segment in self._kept_apart():
            if segment.unit.is_narrow:
                segment.weights.copy_(segment.main)
        self.data_parallel.gather_in_full()

    def _kept_apart(self, unit: OwnedUnit | None = None) -> list[Segment]:
        """List the segments, of one unit or all, whose main weights are no weights."""
        units = self._segments if unit is None else (unit,)
        found = [segment for each in units for segment in self._segments[each]]
        return [s for s in found if self._keeps_main(s.unit)]

    def _keeps_main(self, unit: OwnedUnit) -> bool:
        return self._has_main and main_dtype(unit) != unit.dtype

    def _check_main_weights(self) -> None:
        """Compare rounded main weights with the weights, which the update would overwrite."""
        ctx = self.data_parallel.ctx
        differs = torch.zeros((), device=ctx.device)
        for segment in (s for s in self._kept_apart() if not s.unit.is_narrow):
            pairs = zip(segment.main.split(_RUN), segment.weights.split(_RUN), strict=True)
            for main, weights in pairs:
                rounded = main.to(weights.device).to(weights.dtype).view(torch.uint8)
                differs += (rounded != weights.view(torch.uint8)).any()
        if all_reduce(differs, ctx.world, "max").item():
            raise RuntimeError(
                "weights were loaded or set after the optimizer was made, which holds them in "
                "float32 too: call refresh(from_parameters=True) after it, or refresh() where "
                "main weights were loaded."
            )

    def _check_finished(self) -> None:
        if not self.data_parallel.is_finished:
            raise RuntimeError("gradients are not summed yet: call finish() after backward")


def _scale_rows(
    ranges: Sequence[OwnedRange],
    factors: RowFactors,
    main: Shaped[Tensor, " n"],
    weights: Shaped[Tensor, " n"],
) -> None:
    """Multiply the rows of main weights that have factors, in place; the weights follow.

    Args:
        ranges: what ``main`` holds of which parameter.
        factors: by the parameters' names.
        main: flat main weights.
        weights: what becomes ``main`` in its own dtype; of equal dtype: the same memory.
    """
    for owned in ranges:
        rows = factors.get(owned.named.name)
        if rows is None:
            continue
        rows = rows.to(main.device, main.dtype)
        width = owned.named.parameter.numel() // rows.numel()
        part, begin = owned.view(main), owned.first
        while begin < owned.stop:  # the end of a row, whole rows, the beginning of one
            row = begin // width
            count = 1 if begin % width else max(1, (owned.stop - begin) // width)
            stop = min(owned.stop, (row + count) * width)
            piece = part[begin - owned.first : stop - owned.first]
            piece.view(count, -1).mul_(rows[row : row + count, None])
            begin = stop
        if weights.dtype != main.dtype:
            owned.view(weights).copy_(part)
