"""An update rule over the units of a ``GradientSync``: sharded over data ranks, or whole.

One implementation: this rank updates what it owns of every unit, which is a slice where the
engine shards (ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054) and all of it otherwise. 16-bit
weights have float32 main weights; float32 and float64 weights are their own. After the update
the engine gathers the weights, or its modules do where they need them.

A flat range has no shapes, so what depends on them (weight decay, which rank counts in the
norm, what a checkpoint holds) comes from the parameters' layouts.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.collectives import all_reduce
from mcore_parallel.data_parallel.gradient_sync import GradientSync, OwnedUnit
from mcore_parallel.data_parallel.grads import grad_norm, owned_views
from mcore_parallel.optimizers.adamw import AdamW
from mcore_parallel.optimizers.config import AdamConfig
from mcore_parallel.optimizers.update_rule import MomentDtype, UpdateRule
from mcore_parallel.sharding import NamedParameter, Shard

_RUN = 1 << 24
"""Elements that are compared at one time, which bounds temporary memory."""


def has_weight_decay(named: NamedParameter) -> bool:
    """Return whether a parameter decays: all but biases and logically one-dimensional tensors.

    Judged by logical tensors, so a flat slice or a stack of norms is not mistaken for a matrix.
    """
    return all(
        len(part.shape) > 1 and part.name.rpartition(".")[2] != "bias"
        for part in named.layout.parts
    )


@dataclass(frozen=True, slots=True)
class _State:
    """What is kept for what this rank owns of one unit, flat and in memory order."""

    main: Tensor
    moments: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Run:
    """Views over neighbouring parameters of the range with equal weight decay.

    The padding between them is included: its gradient is 0, so it stays 0.
    """

    main: Tensor
    grad: Tensor
    moments: dict[str, Tensor]
    parameter: Tensor
    decays: bool


class DistributedOptimizer:
    """An update rule on main gradients, over the ranges that this rank owns.

    Attributes:
        rule: updates a range.
        num_steps: updates made; set it when state is loaded.
    """

    def __init__(self, data_parallel: GradientSync, rule: UpdateRule) -> None:
        """Allocate main weights and moments of this rank's ranges; no communication.

        Args:
            data_parallel: holds weights and gradients; decides who owns which range.
            rule: how a range is updated, and which moments it keeps.
        """
        self.data_parallel = data_parallel
        self.rule = rule
        self.num_steps = 0
        self._states = {unit: _new_state(unit, rule) for unit in data_parallel.units}
        self._norm_views = owned_views(data_parallel.grad_shards().values())
        self._runs = {unit: _runs(unit, state) for unit, state in self._states.items()}
        self._is_checked = False

    def grad_norm(self) -> Float[Tensor, ""]:
        """Return the L2 norm of the finished gradients, each logical element counted once.

        One all-reduce over the world; equal on all ranks; float64, on the device.
        """
        self._check_finished()
        ctx = self.data_parallel.ctx
        return grad_norm(self._norm_views, ctx.world, ctx.device)

    def step(
        self, lr: float, weight_decay: float, grad_scale: Float[Tensor, ""] | float = 1.0
    ) -> None:
        """Update the weights on every rank.

        Args:
            lr: learning rate.
            weight_decay: decoupled decay, for the parameters that ``has_weight_decay``.
            grad_scale: multiplies the gradients first: a clip coefficient.

        Raises:
            RuntimeError: if the gradients are not finished; or, in the first step, on every
                rank, if weights were written without a ``refresh`` of their main weights.
        """
        self._check_finished()
        if not self._is_checked:
            self._check_main_weights()
            self._is_checked = True
        self.num_steps += 1

        for unit in self.data_parallel.gathering():
            for run in self._runs[unit]:
                self.rule.update(
                    run.main,
                    run.grad,
                    run.moments,
                    run.parameter,
                    num_steps=self.num_steps,
                    lr=lr,
                    weight_decay=weight_decay if run.decays else 0.0,
                    grad_scale=grad_scale,
                )

    def named_shards(self) -> dict[str, Shard]:
        """Describe main weights and moments by logical name, for a checkpoint.

        Names are ``main.<logical>`` where the parameter is not its own main weight, and
        ``<moment>.<logical>``, such as ``exp_avg.<logical>``. Load into the pieces, set
        ``num_steps``, then call ``refresh``.
        """
        shards = {}
        for kind in ("main", *self.rule.moments):
            flats = {
                unit: state.main if kind == "main" else state.moments[kind]
                for unit, state in self._states.items()
                if kind != "main" or _has_main(unit)
            }
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
            for unit, state in self._states.items():
                if _has_main(unit):
                    state.main.copy_(unit.own_weights())
        else:
            for unit in self.data_parallel.gathering():
                if _has_main(unit):
                    unit.own_weights().copy_(self._states[unit].main)
        self.data_parallel.wait_params()

    def _check_main_weights(self) -> None:
        """Compare rounded main weights with the weights, which the update would overwrite."""
        ctx = self.data_parallel.ctx
        differs = torch.zeros((), device=ctx.device)
        for unit, state in self._states.items():
            if _has_main(unit) and unit.own_main() is None:
                own = unit.own_weights()
                for main, weights in zip(state.main.split(_RUN), own.split(_RUN), strict=True):
                    rounded = main.to(weights.dtype).view(torch.uint8)
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


class ShardedAdamW(DistributedOptimizer):
    """The distributed optimizer with AdamW."""

    def __init__(self, data_parallel: GradientSync, config: AdamConfig) -> None:
        """Allocate the state; see ``DistributedOptimizer``.

        Args:
            data_parallel: holds weights and gradients.
            config: the constants of Adam.
        """
        super().__init__(data_parallel, AdamW(config))


def _main_dtype(unit: OwnedUnit) -> torch.dtype:
    return torch.promote_types(unit.dtype, torch.float32)


def _has_main(unit: OwnedUnit) -> bool:
    return _main_dtype(unit) != unit.dtype


def _new_state(unit: OwnedUnit, rule: UpdateRule) -> _State:
    main = unit.own_main()
    if main is None:
        own = unit.own_weights()
        main = own.to(_main_dtype(unit)) if _has_main(unit) else own
    moments = {
        name: torch.zeros_like(main, dtype=_moment_dtype(kept, main))
        for name, kept in rule.moments.items()
    }
    return _State(main, moments)


def _moment_dtype(kept: MomentDtype, main: Tensor) -> torch.dtype:
    return torch.bfloat16 if kept == "bf16" else main.dtype


def _runs(unit: OwnedUnit, state: _State) -> list[_Run]:
    """Merge neighbouring parameters with equal decay into as few runs as possible."""
    ends: list[tuple[int, int, bool]] = []
    for owned in unit.owned_ranges():
        decays = has_weight_decay(owned.named)
        begin, end = owned.offset, owned.offset + owned.stop - owned.first
        if ends and ends[-1][2] == decays:
            begin = ends.pop()[0]
        ends.append((begin, end, decays))
    grads = unit.own_grads()
    parameters = state.main if unit.own_main() is not None else unit.own_weights()
    return [
        _Run(
            main=state.main[begin:end],
            grad=grads[begin:end],
            moments={name: moment[begin:end] for name, moment in state.moments.items()},
            parameter=parameters[begin:end],
            decays=decays,
        )
        for begin, end, decays in ends
    ]
