"""AdamW over the buckets of ``DataParallel``: sharded over data ranks, or whole.

One implementation: this rank updates its own range of every bucket, which is a slice with
``use_distributed_optimizer`` (ZeRO stage 1, Rajbhandari et al. 2020, arXiv:1910.02054) and
all of it otherwise. 16-bit weights have float32 main weights; float32 and float64 weights
are their own. After the update the ranges are gathered straight into the parameters.

A flat range knows nothing of shapes, so what depends on them (weight decay, who counts in
the norm, what a checkpoint holds) comes from the parameters' layouts.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim.adamw import adamw

from mcore_parallel.buckets import Bucket
from mcore_parallel.config import AdamConfig
from mcore_parallel.data_parallel import DataParallel
from mcore_parallel.grads import grad_norm, owned_views
from mcore_parallel.sharding import NamedParameter, Shard


def has_weight_decay(named: NamedParameter) -> bool:
    """Return whether a parameter decays: not biases, nor what is logically one-dimensional.

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
    num_steps: Tensor
    """One float a parameter: Adam's kernel advances each count that it is given."""


@dataclass(frozen=True, slots=True)
class _Update:
    """Views over one parameter's part of the range, as the fused kernel takes them."""

    main: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    num_steps: Tensor


class ShardedAdamW:
    """AdamW on main gradients (Loshchilov and Hutter 2019, arXiv:1711.05101).

    A step makes no host sync: bias correction follows ``num_steps``, a plain integer.

    Attributes:
        num_steps: updates made; set it when state is loaded.
    """

    def __init__(self, data_parallel: DataParallel, config: AdamConfig) -> None:
        """Allocate the state of this rank's ranges; talks to nobody.

        Args:
            data_parallel: holds weights and gradients; decides who owns which range.
            config: the constants of Adam.
        """
        self.data_parallel = data_parallel
        self.config = config
        self.num_steps = 0
        self._states = {bucket: _new_state(bucket) for bucket in data_parallel.buckets}
        self._norm_views = owned_views(data_parallel.grad_shards().values())
        self._updates: dict[tuple[torch.dtype, bool], list[_Update]] = {}
        for bucket, state in self._states.items():
            _add_updates(self._updates, bucket, state)

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
            grad_scale: multiplies the gradients, in place, first: a clip coefficient.

        Raises:
            RuntimeError: if the gradients are not finished.
        """
        self._check_finished()
        for state in self._states.values():
            state.num_steps.fill_(self.num_steps)
        for (dtype, decays), updates in self._updates.items():
            grads = [update.grad.to(dtype) for update in updates]
            if isinstance(grad_scale, Tensor):
                torch._foreach_mul_(grads, grad_scale.to(dtype))
            elif grad_scale != 1.0:
                torch._foreach_mul_(grads, grad_scale)
            adamw(
                [update.main for update in updates],
                grads,
                [update.exp_avg for update in updates],
                [update.exp_avg_sq for update in updates],
                [],
                [update.num_steps for update in updates],
                fused=True,
                amsgrad=False,
                beta1=self.config.adam_beta1,
                beta2=self.config.adam_beta2,
                lr=lr,
                weight_decay=weight_decay if decays else 0.0,
                eps=self.config.adam_eps,
                maximize=False,
            )
        self.num_steps += 1
        self._publish()

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
        self._publish()
        self.data_parallel.wait_params()

    def _publish(self) -> None:
        for bucket, state in self._states.items():
            if _has_main(bucket):
                bucket.owned(bucket.params).copy_(state.main)
        self.data_parallel.gather_params()

    def _check_finished(self) -> None:
        if not self.data_parallel.is_finished:
            raise RuntimeError("gradients are not summed yet: call finish() after backward")


def _main_dtype(bucket: Bucket) -> torch.dtype:
    return torch.promote_types(bucket.params.dtype, torch.float32)


def _has_main(bucket: Bucket) -> bool:
    return _main_dtype(bucket) != bucket.params.dtype


def _new_state(bucket: Bucket) -> _State:
    own = bucket.owned(bucket.params)
    main = own.to(_main_dtype(bucket)) if _has_main(bucket) else own
    counts = torch.zeros(len(bucket.owned_ranges()), device=own.device)
    return _State(main, torch.zeros_like(main), torch.zeros_like(main), counts)


def _add_updates(
    updates: dict[tuple[torch.dtype, bool], list[_Update]], bucket: Bucket, state: _State
) -> None:
    flats = (state.main, bucket.owned(bucket.grads), state.exp_avg, state.exp_avg_sq)
    counts = state.num_steps.unbind()
    for owned, count in zip(bucket.owned_ranges(), counts, strict=True):
        key = (state.main.dtype, has_weight_decay(owned.named))
        main, grad, exp_avg, exp_avg_sq = map(owned.view, flats)
        updates.setdefault(key, []).append(_Update(main, grad, exp_avg, exp_avg_sq, count))
