"""Fully sharded data parallelism by torch's ``fully_shard``: ZeRO-2, ZeRO-3 and hybrid.

Each block is one unit of communication, the rest of a chunk another. Weights are all-gathered
for a unit's forward and backward. Gradients are reduce-scattered after the backward of every
micro-batch, and add up in this rank's rows. A rank keeps its rows of every weight and of every
gradient. If the model computes in 16 bits, both are float32, and the rows of weights are the
main weights. With ``main_grads_dtype`` bf16 both have 16 bits, and the optimizer keeps main
weights, if any, for example in host memory. Tensor and expert parallelism are applied first:
the rows are rows of the rank's tensor- or expert-parallel part. With several optimizer
instances (HSDP) the data ranks of one instance share the weights, and gradients are summed over
instances once a step.

Weights may be on the meta device before sharding: rows start as zeros, and ``fill_weights``
sets one parameter at a time, so that a rank never holds more than its rows and one parameter.

Some parameters stay in buckets (``DataParallel``): those that one data rank holds alone, such
as experts if expert parallelism spans all data ranks, and those whose dtype differs from that
of most parameters.

Zhao et al. 2023, arXiv:2304.11277; Rajbhandari et al. 2020, arXiv:1910.02054.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mcore_parallel.config import DataParallelConfig
from mcore_parallel.data_parallel.ddp import DataParallel, check_declared
from mcore_parallel.data_parallel.gradient_sync import Copy, GradientSync, OwnedRange, OwnedUnit
from mcore_parallel.data_parallel.grads import sum_views
from mcore_parallel.data_parallel.meta_matrices import give_memory, zeros_of_meta
from mcore_parallel.data_parallel.replica_checks import check_replicas, check_weights
from mcore_parallel.data_parallel.sharding_waits import ShardingWaits
from mcore_parallel.mesh import Axis, ParallelContext
from mcore_parallel.sharding import (
    NamedParameter,
    Part,
    Shard,
    flat_pieces,
    layer_stacks,
    named_parameters,
    shards_of,
)


class FullyShardedDataParallel(GradientSync):
    """Engine that shards weights, gradients and optimizer state over the data ranks.

    Parameters become DTensors of this rank's rows; while a unit computes, its parameters are
    whole. Methods of a chunk other than ``forward`` have whole weights only directly after
    ``forward``.
    """

    keeps_weights = False

    def __init__(
        self, chunks: Sequence[nn.Module], ctx: ParallelContext, config: DataParallelConfig
    ) -> None:
        """Shard the parameters of all chunks in place; no communication.

        Args:
            chunks: model chunks of this rank, in forward order. Each layer (``layer_stacks``)
                is a unit. Weights on the meta device become zeros on the device of ``ctx``.
            ctx: the rank grid.
            config: its ``sharding`` decides whether forward frees whole weights.

        Raises:
            ValueError: if nothing is trainable, or, with tensor ranks, a module does not
                declare how they share its parameters.
        """
        check_declared(chunks, ctx.tp)
        self.ctx, self.config, self.chunks = ctx, config, list(chunks)
        parameters = [list(named_parameters(chunk)) for chunk in chunks]
        bucketed = _bucketed([named for each in parameters for named in each], ctx)
        self._frozen = [n for each in parameters for n in each if not n.parameter.requires_grad]
        ignored = bucketed | {named.parameter for named in self._frozen}
        for parameter in ignored:
            give_memory(parameter, ctx.device)
        self._buckets: DataParallel | None = None
        if bucketed:
            bucket_config = DataParallelConfig(
                use_distributed_optimizer=True, grad_reduce_in_bf16=config.has_narrow_grads
            )
            self._buckets = DataParallel(chunks, ctx, bucket_config, only=bucketed)
        meshes = {kind: (_mesh(ctx, kind), axis) for kind, axis in _shard_axes(ctx).items()}
        self._sharded: list[ShardedParameter] = []
        for chunk, each in zip(chunks, parameters, strict=True):
            sharded = [named for named in each if named.parameter not in ignored]
            self._shard(chunk, sharded, ignored, meshes)
        self._units: list[OwnedUnit] = [*reversed(self._sharded)]
        if self._buckets is not None:
            self._units += self._buckets.units
        self._is_finished = self._is_checked = False

    def _shard(
        self,
        chunk: nn.Module,
        sharded: Sequence[NamedParameter],
        ignored: set[nn.Parameter],
        meshes: Mapping[str, tuple[DeviceMesh | None, Axis]],
    ) -> None:
        """Shard one chunk, innermost modules first."""
        # fully_shard replaces the parameters: keep their names, shapes and dtypes on "meta".
        placeholders = [nn.Parameter(n.parameter.detach().to("meta")) for n in sharded]
        unsharded = [
            replace(n, parameter=p) for n, p in zip(sharded, placeholders, strict=True)
        ]
        experts = {_owner(n.name) for n in sharded if n.layout.data == "expert"}
        frees_weights = self.config.sharding == "optim_grads_params"
        for name in sorted(experts):
            self._wrap(chunk.get_submodule(name), *meshes["expert"], ignored, frees_weights)
        for block in chain.from_iterable(layer_stacks(chunk)):
            self._wrap(block, *meshes["dense"], ignored, frees_weights)
        # Embedding, head and final norm: the loss reads the head after forward, so forward does
        # not free these weights. A middle stage has none of them, but its blocks need a root.
        if sharded:
            kind = "dense" if meshes["dense"][0] else "expert"
            self._wrap(chunk, *meshes[kind], ignored, frees_weights=False, is_root=True)
        axes = {
            "dense": (self.ctx.optimizer_shard, self.ctx.optimizer_replica),
            "expert": (self.ctx.expert_optimizer_shard, self.ctx.expert_optimizer_replica),
        }
        for named in unsharded:
            parameter = chunk.get_parameter(named.name)
            self._sharded.append(ShardedParameter(named, parameter, *axes[named.layout.data]))

    def _wrap(
        self,
        module: nn.Module,
        mesh: DeviceMesh | None,
        axis: Axis,
        ignored: set[nn.Parameter],
        frees_weights: bool,
        *,
        is_root: bool = False,
    ) -> None:
        """Cast a module's weights to the dtype of their rows and call ``fully_shard``.

        Parameters that a call on a submodule has sharded already are left out.
        """
        parameters = [
            parameter
            for parameter in module.parameters()
            if parameter not in ignored and not isinstance(parameter, DTensor)
        ]
        if not parameters and not is_root:
            return
        assert mesh is not None
        dtype = parameters[0].dtype if parameters else torch.float32
        is_narrow = self.config.main_grads_dtype == "bf16"
        wide = dtype if is_narrow else torch.promote_types(dtype, torch.float32)
        for parameter in parameters:
            parameter.data = parameter.data.to(wide)
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=frees_weights,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=None if wide == dtype else dtype,
                reduce_dtype=dtype if self.config.has_narrow_grads else wide,
                cast_forward_inputs=False,
            ),
            ignored_params=ignored,
        )
        module._apply(partial(zeros_of_meta, device=self.ctx.device))
        # Free the whole weights, of which callers may keep references until all is sharded.
        for parameter in parameters:
            parameter.data = parameter.data.new_empty(0)
        assert isinstance(module, FSDPModule)
        ShardingWaits(module, axis, is_root=is_root)
        # Losses are divided by global counts, so gradients are summed and never averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)

    @property
    def sharded(self) -> Sequence["ShardedParameter"]:
        """The parameters whose rows are divided over the data ranks."""
        return self._sharded

    @property
    def units(self) -> Sequence[OwnedUnit]:
        """A unit for each sharded parameter, and the buckets of the other parameters."""
        return self._units

    @property
    def is_finished(self) -> bool:
        """Whether gradients are complete."""
        return self._is_finished

    def zero_grad(self) -> None:
        """Set all gradients to zero."""
        grads = [unit.grads for unit in self._sharded if unit.grads.numel()]
        if grads:
            torch._foreach_zero_(grads)
        if self._buckets is not None:
            self._buckets.zero_grad()
        self._is_finished = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gathered weights (ZeRO-2) and defer sums over instances, within the block.

        Gradients of every micro-batch are still reduce-scattered, since unsharded gradients
        might not fit in memory.
        """
        for chunk in self.chunks:
            self._set_last(chunk, is_last=False)
        try:
            if self._buckets is None:
                yield
            else:
                with self._buckets.no_sync():
                    yield
        finally:
            for chunk in self.chunks:
                self._set_last(chunk, is_last=True)

    def start_sync(self, chunk: int) -> None:
        """Sum over instances in the chunk's next backward, and reshard its weights after it."""
        self._set_last(self.chunks[chunk], is_last=True)
        if self._buckets is not None:
            self._buckets.start_sync(chunk)

    def _set_last(self, chunk: nn.Module, *, is_last: bool) -> None:
        if not isinstance(chunk, FSDPModule):
            return  # all parameters of the chunk are in buckets
        chunk.set_requires_all_reduce(is_last)
        if self.config.sharding == "optim_grads":
            chunk.set_reshard_after_backward(is_last)

    def finish(self) -> None:
        """Sum partial gradients over tensor ranks, and tied copies over stages.

        Backward has summed gradients over data ranks. The first call also compares replicas.

        Raises:
            ValueError: see ``DataParallel.finish``.
            RuntimeError: if called again before ``zero_grad``.
        """
        if self._is_finished:
            raise RuntimeError("gradients are summed already: call zero_grad() before backward")
        if self._buckets is not None:
            self._buckets.finish()
        sum_views([view for unit in self._sharded for view in unit.parts_of_sums()])
        sum_views([(unit.named.layout.tied, unit.grads) for unit in self._sharded])
        if self._sharded and not self._is_checked:
            check_replicas([*reversed(self._sharded)], self.ctx)
            self._is_checked = True
        self._is_finished = True

    @property
    def update_order(self) -> Sequence[OwnedUnit]:
        """The units in the order of ``gathering``."""
        order: list[OwnedUnit] = [*reversed(self._sharded)]
        return order if self._buckets is None else [*order, *self._buckets.update_order]

    def gathering(self) -> Iterator[OwnedUnit]:
        """Yield each unit; sharded weights are gathered by the modules that need them."""
        yield from reversed(self._sharded)
        if self._buckets is not None:
            yield from self._buckets.gathering()

    def wait_params(self) -> None:
        """Update the 16-bit copies of ``weight_shards``, and free gathered weights."""
        for unit in self._sharded:
            unit.refresh_copy()
        for chunk in self.chunks:
            for module in chunk.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        if self._buckets is not None:
            self._buckets.wait_params()

    def weight_shards(self) -> dict[str, Shard]:
        """Return shards of this rank's rows in the model's dtype, rounded if narrower."""
        shards = self.owned_shards([(unit, 0, unit.own_weights()) for unit in self._sharded])
        if self._buckets is not None:
            shards |= self._buckets.weight_shards()
        frozen = [(named, named.parameter.detach()) for named in self._frozen]
        return shards | shards_of(frozen, self.ctx.data_axes())

    def fill_weights(self, fill: Callable[[Mapping[str, Shard]], None]) -> None:
        """Set the weights by a function, one sharded parameter at a time.

        The function writes into a tensor of the model's dtype, which is then copied to the
        rows.
        """
        frozen = [(named, named.parameter.detach()) for named in self._frozen]
        fill(shards_of(frozen, self.ctx.data_axes()))
        if self._buckets is not None:
            self._buckets.fill_weights(fill)
        for unit in self._sharded:
            weights = unit.rows.to(unit.dtype)
            fill(self.owned_shards([(unit, 0, weights)]))
            unit.rows.copy_(weights)

    def check_weights(self) -> None:
        """Compare the rows of instances and of tied stages."""
        check_weights(self.units, self.ctx)


def _bucketed(parameters: Sequence[NamedParameter], ctx: ParallelContext) -> set[nn.Parameter]:
    """Return the trainable parameters that cannot be sharded, or have a less common dtype."""
    trainable = [named for named in parameters if named.parameter.requires_grad]
    if not trainable:
        raise ValueError(
            "no parameter of the model requires a gradient: set requires_grad on those to train"
        )
    sizes: Counter[torch.dtype] = Counter()
    for named in trainable:
        sizes[named.parameter.dtype] += named.parameter.numel()
    usual = sizes.most_common(1)[0][0]
    shards = _shard_axes(ctx)
    return {
        named.parameter
        for named in trainable
        if named.parameter.dtype != usual
        or shards[named.layout.data].size == 1
        or named.parameter.dim() == 0
    }


def _shard_axes(ctx: ParallelContext) -> dict[str, Axis]:
    """Return the ranks that share the rows of dense parameters, and of experts."""
    return {"dense": ctx.optimizer_shard, "expert": ctx.expert_optimizer_shard}


def _mesh(ctx: ParallelContext, kind: str) -> DeviceMesh | None:
    """Build torch's device mesh from the groups of the context; None for a single rank."""
    shard, replica = ctx.optimizer_shard, ctx.optimizer_replica
    if kind == "expert":
        shard, replica = ctx.expert_optimizer_shard, ctx.expert_optimizer_replica
    if shard.group is None:
        return None
    device = ctx.device.type
    if replica.group is None:
        return DeviceMesh.from_group(shard.group, device)
    ranks = torch.tensor(ctx.data_axes()[kind].ranks).view(replica.size, shard.size)
    return DeviceMesh.from_group(
        [replica.group, shard.group], device, ranks, mesh_dim_names=("replica", "shard")
    )


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


class ShardedParameter:
    """This rank's rows of one parameter: a unit of the optimizer.

    Attributes:
        named: name and layout; its ``parameter`` has the shape before sharding and no memory.
        dtype: dtype of the gathered weight.
        rows: flat weights of the rows; the main weights if float32 or wider.
        grads: flat gradients of the rows.
    """

    is_narrow = False

    def __init__(
        self, named: NamedParameter, parameter: nn.Parameter, shard: Axis, replica: Axis
    ) -> None:
        """Allocate the gradient of a parameter that ``fully_shard`` has sharded.

        Args:
            named: the parameter before sharding, in the dtype of the model.
            parameter: the sharded parameter, a DTensor.
            shard: ranks that share the rows.
            replica: ranks that hold the same rows.
        """
        assert isinstance(parameter, DTensor)
        self.named, self.dtype = named, named.parameter.dtype
        self.parameter, self.replica = parameter, replica
        local = parameter.to_local().detach()
        self.rows = local.view(-1)
        self.grads = torch.zeros_like(self.rows)
        self._copy: Tensor | None = None
        # fully_shard splits rows like torch.chunk: ceil(rows / ranks) for each rank, so the
        # last ranks may hold fewer rows, or none.
        num_rows, row_numel = named.parameter.shape[0], named.parameter[0].numel()
        begin = min(shard.rank * -(-num_rows // shard.size), num_rows) * row_numel
        self.range = OwnedRange(named, begin, begin + local.numel(), 0)
        # torch adds the sums of each backward to an existing gradient in place.
        parameter.grad = DTensor.from_local(
            self.grads.view(local.shape),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    @property
    def members(self) -> tuple[NamedParameter]:
        """The parameter."""
        return (self.named,)

    def owned_ranges(self) -> list[OwnedRange]:
        """Return the range of this rank's rows; empty if this rank holds no row."""
        return [self.range] if self.rows.numel() else []

    def own_weights(self) -> Shaped[Tensor, " n"]:
        """Return the rows in the model's dtype: a copy, made at the first call."""
        if self.dtype == self.rows.dtype:
            return self.rows
        if self._copy is None:
            self._copy = self.rows.to(self.dtype)
        return self._copy

    def own_main(self) -> Shaped[Tensor, " n"] | None:
        """Return the rows if they are float32 or wider, else None."""
        is_wide = torch.promote_types(self.rows.dtype, torch.float32) == self.rows.dtype
        return self.rows if is_wide else None

    def own_grads(self) -> Shaped[Tensor, " n"]:
        """Return the gradients of the rows."""
        return self.grads

    def refresh_copy(self) -> None:
        """Round the rows into the 16-bit copy, if ``own_weights`` has made one."""
        if self._copy is not None:
            self._copy.copy_(self.rows)

    def copies(self) -> Iterator[Copy]:
        """Yield the rows for other instances and tied stages, and their replicated parts."""
        layout = self.named.layout
        yield Copy(self.named.name, self.replica, self.rows, True)
        yield Copy(self.named.name, layout.tied, self.rows, True)
        for part in layout.parts:
            for view in self._views(part, self.rows):
                yield Copy(self.named.name, part.replicas, view, False)

    def parts_of_sums(self) -> Iterator[tuple[Axis, Tensor]]:
        """Yield the gradients that are parts of a sum over tensor ranks, with their axes."""
        for part in self.named.layout.parts:
            if part.partial.size > 1:
                for view in self._views(part, self.grads):
                    yield part.partial, view

    def _views(self, part: Part, flat: Tensor) -> list[Tensor]:
        first, stop = self.range.first, self.range.stop
        return [piece.data for piece in flat_pieces(self.named, part, first, stop, flat)]
