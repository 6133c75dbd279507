"""The distributed optimizer: AdamW over the buckets of ``DataParallel``, sharded or whole.

One implementation: this rank updates its own range of every bucket, which is a slice with
``use_distributed_optimizer`` (ZeRO stage 1, Rajbhandari et al. 2020, arXiv:1910.02054) and
all of it otherwise. 16-bit weights have float32 main weights; float32 and float64 weights
are their own. After the update the ranges are gathered straight into the parameters.

A flat range has no shapes, so what depends on them (weight decay, which rank counts in the
norm, what a checkpoint holds) comes from the parameters' layouts.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim.adamw import adamw

from mcore_parallel.collectives import all_reduce
from mcore_parallel.config import AdamConfig
from mcore_parallel.data_parallel.buckets import Bucket
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.data_parallel.grads import grad_norm, owned_views
from mcore_parallel.optional_kernels import OptionalKernel, wave, works
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
    """What Adam keeps for this rank's range of one bucket, flat and in memory order."""

    main: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(frozen=True, slots=True)
class _Run:
    """Views over neighbouring parameters of the range with equal weight decay.

    The padding between them is included: its gradient is 0, so it stays 0.
    """

    main: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    parameter: Tensor
    decays: bool


class ShardedAdamW:
    """AdamW on main gradients (Loshchilov and Hutter 2019, arXiv:1711.05101).

    A step makes no host sync: bias correction follows ``num_steps``, a plain integer.

    Attributes:
        num_steps: updates made; set it when state is loaded.
    """

    def __init__(self, data_parallel: DataParallel, config: AdamConfig) -> None:
        """Allocate the state of this rank's ranges; no communication.

        Args:
            data_parallel: holds weights and gradients; decides which rank owns which range.
            config: the constants of Adam.
        """
        self.data_parallel = data_parallel
        self.config = config
        self.num_steps = 0
        self._states = {bucket: _new_state(bucket, config) for bucket in data_parallel.buckets}
        self._norm_views = owned_views(data_parallel.grad_shards().values())
        self._runs = {bucket: _runs(bucket, state) for bucket, state in self._states.items()}
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

        def update(bucket: Bucket) -> None:
            for run in self._runs[bucket]:
                update_run = _kernel if _has_kernel(run) else adamw_plain
                update_run(
                    run.main,
                    run.grad,
                    run.exp_avg,
                    run.exp_avg_sq,
                    run.parameter,
                    num_steps=self.num_steps,
                    lr=lr,
                    weight_decay=weight_decay if run.decays else 0.0,
                    betas=(self.config.adam_beta1, self.config.adam_beta2),
                    epsilon=self.config.adam_eps,
                    grad_scale=grad_scale,
                )

        self.data_parallel.gather_params(before=update)

    def named_shards(self) -> dict[str, Shard]:
        """Describe main weights and moments by logical name, for a checkpoint.

        Names are ``main.<logical>`` where the parameter is not its own main weight,
        ``exp_avg.<logical>`` and ``exp_avg_sq.<logical>``. Load into the pieces, set
        ``num_steps``, then call ``refresh``.
        """
        shards = {}
        for kind in ("main", "exp_avg", "exp_avg_sq"):
            flats = {
                bucket: getattr(state, kind)
                for bucket, state in self._states.items()
                if kind != "main" or _has_main(bucket)
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
            for bucket, state in self._states.items():
                if _has_main(bucket):
                    state.main.copy_(bucket.owned(bucket.params))
            return

        def copy(bucket: Bucket) -> None:
            if _has_main(bucket):
                bucket.owned(bucket.params).copy_(self._states[bucket].main)

        self.data_parallel.gather_params(before=copy)
        self.data_parallel.wait_params()

    def _check_main_weights(self) -> None:
        """Compare rounded main weights with the weights, which the update would overwrite."""
        ctx = self.data_parallel.ctx
        differs = torch.zeros((), device=ctx.device)
        for bucket, state in self._states.items():
            if _has_main(bucket):
                own = bucket.owned(bucket.params)
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


def _main_dtype(bucket: Bucket) -> torch.dtype:
    return torch.promote_types(bucket.params.dtype, torch.float32)


def _has_main(bucket: Bucket) -> bool:
    return _main_dtype(bucket) != bucket.params.dtype


def _new_state(bucket: Bucket, config: AdamConfig) -> _State:
    own = bucket.owned(bucket.params)
    main = own.to(_main_dtype(bucket)) if _has_main(bucket) else own
    return _State(
        main,
        torch.zeros_like(main, dtype=_moment_dtype(config.exp_avg_dtype, main)),
        torch.zeros_like(main, dtype=_moment_dtype(config.exp_avg_sq_dtype, main)),
    )


def _moment_dtype(name: str, main: Tensor) -> torch.dtype:
    return torch.bfloat16 if name == "bf16" else main.dtype


def _runs(bucket: Bucket, state: _State) -> list[_Run]:
    """Merge neighbouring parameters with equal decay into as few runs as possible."""
    ends: list[tuple[int, int, bool]] = []
    for owned in bucket.owned_ranges():
        decays = has_weight_decay(owned.named)
        begin, end = owned.offset, owned.offset + owned.stop - owned.first
        if ends and ends[-1][2] == decays:
            begin = ends.pop()[0]
        ends.append((begin, end, decays))
    grads, parameters = bucket.owned(bucket.grads), bucket.owned(bucket.params)
    return [
        _Run(
            main=state.main[begin:end],
            grad=grads[begin:end],
            exp_avg=state.exp_avg[begin:end],
            exp_avg_sq=state.exp_avg_sq[begin:end],
            parameter=parameters[begin:end],
            decays=decays,
        )
        for begin, end, decays in ends
    ]


def _has_kernel(run: _Run) -> bool:
    is_float32 = run.main.dtype == torch.float32
    return run.main.is_cuda and is_float32 and works(ADAM_KERNEL, run.main.device)


def _kernel(*tensors: Tensor, **constants: Any) -> None:
    from mcore_parallel.kernels.adam import fused_adamw

    fused_adamw(*tensors, **constants)


def _try_kernel(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    constants: dict[str, Any] = {"num_steps": 2, "lr": 0.1, "weight_decay": 0.1}
    constants |= {"betas": (0.9, 0.95), "epsilon": 1e-8}
    results = []
    for update in (_kernel, adamw_plain):
        main, grad, mean = (wave(64, device=device, dtype=torch.float32) for _ in range(3))
        tensors = [main, grad, mean, mean.square(), main.bfloat16()]
        update(*tensors, **constants)
        results.append(tensors)
    return list(zip(*results, strict=True))


ADAM_KERNEL = OptionalKernel("AdamW in Triton", ("triton",), _try_kernel)


def adamw_plain(
    main: Float[Tensor, " n"],
    grad: Float[Tensor, " n"],
    exp_avg: Float[Tensor, " n"],
    exp_avg_sq: Float[Tensor, " n"],
    parameter: Float[Tensor, " n"],
    *,
    num_steps: int,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    epsilon: float,
    grad_scale: Float[Tensor, ""] | float = 1.0,
) -> None:
    """Reference of ``kernels.adam.fused_adamw``, by torch's AdamW; float64 stays float64."""
    wide = main.dtype
    grad, mean, square = grad.to(wide), exp_avg.to(wide), exp_avg_sq.to(wide)
    if isinstance(grad_scale, Tensor):
        grad = grad * grad_scale.to(wide)
    elif grad_scale != 1.0:
        grad = grad * grad_scale
    adamw(
        [main],
        [grad],
        [mean],
        [square],
        [],
        [torch.full((), num_steps - 1.0, device=main.device)],  # torch's kernel advances it
        fused=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=epsilon,
        maximize=False,
    )
    if mean is not exp_avg:
        exp_avg.copy_(mean)
    if square is not exp_avg_sq:
        exp_avg_sq.copy_(square)
    if parameter.data_ptr() != main.data_ptr():
        parameter.copy_(main)
