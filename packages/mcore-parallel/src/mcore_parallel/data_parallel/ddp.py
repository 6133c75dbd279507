"""Data parallelism with replicated weights: sums gradients over data ranks in buckets.

``DataParallel`` registers hooks on the parameters of plain modules. Each backward adds
``.grad`` to the main gradient and frees ``.grad``. After the last micro-batch ``finish``
completes the sums of every gradient: partial gradients over tensor ranks, tied copies over
stages, then all gradients over data and context ranks. Gradients are not averaged: losses are
divided by global counts before backward.

With ``overlap_grad_reduce`` a bucket's reduce-scatter over data ranks starts inside the last
backward. All ranks start buckets in one fixed order, so that they call collectives in the same
order: a bucket that lacks a gradient on a rank (an expert without tokens) delays the buckets
after it on that rank until ``finish``.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from weakref import ref

import torch
from torch import Tensor, nn

from mcore_parallel.autograd.grad_slot import grad_slot
from mcore_parallel.config import DataParallelConfig
from mcore_parallel.data_parallel.buckets import (
    Bucket,
    PendingGather,
    Slot,
    build_buckets,
    fp8_weights,
)
from mcore_parallel.data_parallel.gradient_sync import GradientSync
from mcore_parallel.data_parallel.grads import sum_partial_gradients, sum_tied_gradients
from mcore_parallel.data_parallel.replica_checks import check_replicas, check_weights
from mcore_parallel.mesh import Axis, ParallelContext
from mcore_parallel.sharding import (
    NamedParameter,
    Shard,
    named_parameters,
    shards_of,
    undeclared_parameters,
)


class DataParallel(GradientSync):
    """Engine of replicated weights: accumulates main gradients, sums them over data ranks.

    The optimizer is either complete on every data rank, or sharded over the data ranks
    (ZeRO-1).

    The constructor moves parameters into contiguous buffers: views of parameters taken earlier
    (``named_shards``, a torch optimizer's state) still refer to the old memory.

    Attributes:
        buckets: buckets in the order in which they are reduced, the same on all data ranks.
        ctx: the context whose data axes gradients are summed over.
        config: the options that the engine was built with.
        before_sum: called with each bucket before its sum over the data ranks begins.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        ctx: ParallelContext,
        config: DataParallelConfig,
        *,
        only: Collection[nn.Parameter] | None = None,
    ) -> None:
        """Move all trainable parameters into buckets and register hooks; no communication.

        Args:
            chunks: model chunks of this rank, in forward order; one without interleaving.
            ctx: the rank grid.
            config: sharding, overlap, bucket size, dtype.
            only: parameters to take; None: all.

        Raises:
            ValueError: if nothing is trainable, a parameter already has a gradient or a main
                gradient, or, with tensor ranks, a module does not declare how they share its
                parameters.
        """
        check_declared(chunks, ctx.tp)
        self.ctx = ctx
        self.config = config
        self.before_sum: Callable[[Bucket], None] | None = None
        # A parameter of two chunks belongs to the first chunk, whose last backward comes last.
        parameters: dict[nn.Parameter, tuple[int, NamedParameter]] = {}
        for index, chunk in enumerate(chunks):
            for named in named_parameters(chunk):
                if only is None or named.parameter in only:
                    parameters.setdefault(named.parameter, (index, named))
        self._named = [named for _, named in parameters.values()]
        narrow = fp8_weights(chunks) if config.fp8_param_gather else ()
        self.buckets = build_buckets(_trainable(list(parameters.values())), ctx, config, narrow)
        self._is_syncing = [True] * len(chunks)
        self._is_syncing_weights = [True] * len(chunks)
        self._is_finished = self._is_checked = False
        self._missing: dict[Bucket, set[int]] = {}
        self._handles = [
            slot.named.parameter.register_post_accumulate_grad_hook(
                _GradientHook(self, bucket, slot, index)
            )
            for bucket in self.buckets
            for index, slot in enumerate(bucket.slots)
        ]
        self._gathering = (
            ParameterGathering(chunks, self.buckets) if config.overlap_param_gather else None
        )
        slots = [grad_slot(s.named.parameter) for b in self.buckets for s in b.slots]
        self._overwritten = [slot for slot in slots if slot.overwrites]
        self._zeroed = [s.main for s in slots if s.main is not None and not s.overwrites]
        self._queues = {slot.queue for slot in slots if slot.queue is not None}
        self._keeping = [slot for slot in slots if slot.num_together > 1]
        self._restart()

    @property
    def units(self) -> list[Bucket]:
        """The buckets."""
        return self.buckets

    @property
    def update_order(self) -> list[Bucket]:
        """The buckets in the order in which they are updated and gathered."""
        return self.buckets if self._gathering is None else self._gathering.order

    @property
    def is_finished(self) -> bool:
        """Whether main gradients are complete: ``finish`` ran and nothing was added since."""
        return self._is_finished

    def zero_grad(self) -> None:
        """Reset all main gradients before the first micro-batch of a step.

        Sets them to zero, except those that a layer's first GEMM of the step overwrites
        (``grad_slot.overwrites``), which are marked as stale.
        """
        if self._zeroed:  # torch raises for an empty list
            torch._foreach_zero_(self._zeroed)
        for slot in self._overwritten:
            slot.is_stale = True
        for slot in self._keeping:
            slot.drop_parts()
        self._restart()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without sums over data ranks, within the ``with`` block."""
        previous = self._is_syncing, self._is_syncing_weights
        self._is_syncing = [False] * len(self._is_syncing)
        self._is_syncing_weights = [False] * len(self._is_syncing)
        try:
            yield
        finally:
            self._is_syncing, self._is_syncing_weights = previous

    def start_sync(self, chunk: int) -> None:
        """Reduce one chunk's buckets during the chunk's next backward, which is its last.

        For pipelines, whose chunks run their last micro-batch at different times. Called
        within ``no_sync``, and in effect until the end of that block. Weights whose gradients a
        ``WeightQueue`` defers need ``start_weight_sync`` instead.
        """
        self._is_syncing = [s or i == chunk for i, s in enumerate(self._is_syncing)]

    def start_weight_sync(self, chunk: int) -> None:
        """Reduce the buckets of one chunk's deferred weights when their gradients are computed.

        Deferred weights are those whose gradients a ``WeightQueue`` defers. Called before the
        last deferred gradients are computed: ``start_sync`` would be too early, since deferred
        gradients of earlier micro-batches may be computed after it.
        """
        syncing = self._is_syncing_weights
        self._is_syncing_weights = [s or i == chunk for i, s in enumerate(syncing)]

    def finish(self) -> None:
        """Complete all sums; every rank calls it once after the last backward.

        Starts, in order, the reductions of buckets that backward has not started; all-reduces
        partial gradients and tied copies; starts the buckets that need these sums
        (``is_late``); waits for all reductions. The first call also compares replicas
        (``replica_checks``).

        Raises:
            ValueError: in the first call, on every rank, if replicas of weights or gradients
                differ, or two pipeline stages give one name to their parameters.
            RuntimeError: if called again before ``zero_grad``, while weight gradients wait in a
                ``WeightQueue``, or if a parameter has a ``.grad``, which is not summed.
        """
        if self._is_finished:
            raise RuntimeError("gradients are summed already: call zero_grad() before backward")
        if not all(queue.is_empty for queue in self._queues):
            raise RuntimeError(
                "a WeightQueue still holds deferred weight gradients: pass it to run_schedule "
                "as weight_queue, which computes them."
            )
        self._check_taken()
        self.wait_params()
        for slot in self._keeping:
            slot.add_parts()  # for weights that the last micro-batch did not use
        for slot in self._overwritten:
            if slot.take_stale():  # no micro-batch of the step used the weight
                slot.zero()
        late = [bucket for bucket in self.buckets if bucket.is_late]
        for bucket in self.buckets:
            if not bucket.is_late and not bucket.is_reducing:
                self._start(bucket)
        gradients = [(slot.named, b.main_grad(slot)) for b in late for slot in b.slots]
        sum_partial_gradients(gradients)
        sum_tied_gradients(gradients)
        for bucket in late:
            self._start(bucket)
        for bucket in self.buckets:
            bucket.finish_reduction()
        if not self._is_checked:
            check_replicas(self.buckets, self.ctx)
            self._is_checked = True
        self._is_finished = True

    def gathering(self) -> Iterator[Bucket]:
        """Yield each bucket for its update by its owners, then start its all-gather.

        A gather overlaps with the updates of the following buckets. With
        ``overlap_param_gather`` the last gathers still run when the loop ends, and the modules
        wait in forward; call ``wait_params`` before weights are read in any other way.
        """
        if self._gathering is not None:
            for bucket in self.update_order:
                yield bucket
                self._gathering.start(bucket)
            return
        works = []
        for bucket in self.update_order:
            yield bucket
            works.append(bucket.gather_params(async_op=True))
        with self.ctx.dp_cp.waiting():
            for work in works:
                if work is not None:
                    work.wait()

    def wait_params(self) -> None:
        """Wait for gathers in flight: before a save, a comparison or an export."""
        if self._gathering is not None:
            self._gathering.wait()

    def gather_in_full(self) -> None:
        """All-gather in their own dtype the weights that are normally gathered in fp8."""
        for bucket in self.update_order:
            if bucket.is_narrow:
                bucket.gather_params(in_full=True)

    def check_weights(self) -> None:
        """Compare the weights of data ranks and tied copies bit for bit.

        Every rank calls it, between steps; see ``replica_checks.check_weights``.

        Raises:
            UnlikeWeightsError: on every rank if any differ, with parameter and ranks.
        """
        self.wait_params()
        check_weights(self.buckets, self.ctx)

    def weight_shards(self) -> dict[str, Shard]:
        """Return shards of all parameters, frozen ones too; data ranks hold equal shards.

        Frozen parameters whose memory is freed at the moment are left out.
        """
        tensors = [(named, named.parameter.detach()) for named in self._named]
        weights = [each for each in tensors if each[1].untyped_storage().nbytes()]
        return shards_of(weights, self.ctx.data_axes())

    def remove_hooks(self) -> None:
        """Remove the hooks and release the grad slots: backward fills ``.grad`` again."""
        for handle in self._handles:
            handle.remove()
        if self._gathering is not None:
            self._gathering.remove_hooks()
        for bucket in self.buckets:
            for slot in bucket.slots:
                grad_slot(slot.named.parameter).release()

    def _restart(self) -> None:
        self._is_finished = False
        for bucket in self.buckets:
            bucket.is_reducing = False
            self._missing[bucket] = set(range(len(bucket.slots)))

    def _check_taken(self) -> None:
        """Raise if a parameter has a ``.grad``, which no hook has added to a main gradient."""
        slots = [slot.named for bucket in self.buckets for slot in bucket.slots]
        names = [named.name for named in slots if named.parameter.grad is not None]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise RuntimeError(
                f"{names[0]}{more}: .grad was assigned directly, so DataParallel did not "
                "reduce it. In place of parameter.grad = gradient, call "
                "parameter.backward(gradient)."
            )

    def _complete(self, bucket: Bucket, index: int) -> None:
        """Record that the gradient of one slot of a bucket is complete on this rank."""
        missing = self._missing[bucket]
        missing.discard(index)
        if self.config.overlap_grad_reduce and not missing:
            self._start_in_order()

    def _start_in_order(self) -> None:
        # All ranks must start buckets in one order: an incomplete bucket blocks later ones.
        for bucket in self.buckets:
            if bucket.is_reducing:
                continue
            if bucket.is_late or self._missing[bucket]:
                return
            self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        if self.before_sum is not None:
            self.before_sum(bucket)
        bucket.start_reduction()


class ParameterGathering:
    """Starts the all-gathers of all buckets, and waits for each in the modules that use it.

    All ranks start the gathers in the same ``order``: first the buckets with a weight outside
    ``blocks`` (embedding, head, final norm), then the buckets of the blocks in forward order.
    A chunk waits for the first kind when its forward begins, since code outside the blocks may
    use a weight without calling its module; a block waits for its own buckets.
    """

    def __init__(self, chunks: Sequence[nn.Module], buckets: Sequence[Bucket]) -> None:
        """Register forward hooks on the chunks and their blocks.

        Args:
            chunks: model chunks; each module of ``chunk.blocks`` waits for its own buckets,
                the chunk's forward for all others.
            buckets: buckets of all the chunks' parameters.
        """
        self._handles = []
        self._works: dict[Bucket, PendingGather] = {}
        first: set[Bucket] = set()
        for chunk in chunks:
            container = dict(chunk.named_children()).get("blocks")
            blocks = list(container.children()) if container is not None else []
            inside = {parameter for block in blocks for parameter in block.parameters()}
            outside = set(chunk.parameters()) - inside
            needed = [b for b in buckets if b.is_late or _holds(b, outside)]
            first.update(needed)
            self._wait_in(chunk, needed)
            for block in blocks:
                self._wait_in(block, [b for b in buckets if _holds(b, block.parameters())])
        backward = list(reversed(buckets))
        self.order = [b for b in backward if b in first]
        self.order += [b for b in backward if b not in first]

    def start(self, bucket: Bucket) -> None:
        """Launch one bucket's all-gather; returns at once."""
        work = bucket.gather_params(async_op=True)
        if work is not None:
            self._works[bucket] = work

    def wait(self, buckets: Iterable[Bucket] = ()) -> None:
        """Wait for the gathers of some buckets, or of all; a finished one costs nothing."""
        for bucket in buckets or self.order:
            work = self._works.pop(bucket, None)
            if work is not None:
                with bucket.data.waiting():
                    work.wait()

    def remove_hooks(self) -> None:
        """Wait for all gathers and remove the hooks."""
        self.wait()
        for handle in self._handles:
            handle.remove()

    def _wait_in(self, module: nn.Module, buckets: list[Bucket]) -> None:
        def hook(_module: nn.Module, _arguments: tuple) -> None:
            if self._works and buckets:
                self.wait(buckets)

        self._handles.append(module.register_forward_pre_hook(hook))


class _GradientHook:
    """Hook of one parameter: autograd calls it when ``.grad`` of a micro-batch is complete.

    torch hides such hooks from the garbage collector: an object to which a hook has a strong
    reference lives as long as the parameter. So the hook has weak references to the engine and
    the bucket, and none to the parameter.
    """

    def __init__(self, owner: DataParallel, bucket: Bucket, slot: Slot, index: int) -> None:
        self._owner, self._bucket = ref(owner), ref(bucket)
        self.name, self.chunk, self.index = slot.named.name, slot.chunk, index
        self.slot = grad_slot(slot.named.parameter)
        if self.slot.queue is not None:
            self.slot.on_ready = self.accumulated_later

    def __call__(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        owner, bucket = self._check()
        if gradient is None and self.slot.queue is not None:
            return  # the weight's GEMM is deferred and adds to the main gradient later
        is_last = owner._is_syncing[self.chunk]
        self.slot.end_backward(is_last=is_last)
        if gradient is not None:  # None: the weight's GEMM added to the main gradient itself
            self.slot.add(gradient)
        elif not self.slot.is_keeping and self.slot.take_stale():
            self.slot.zero()  # no gradient was added in this micro-batch
        if is_last:
            owner._complete(bucket, self.index)

    def accumulated_later(self) -> None:
        """Record that a gradient deferred by a ``WeightQueue`` has been computed."""
        owner, bucket = self._check()
        if owner._is_syncing_weights[self.chunk]:
            owner._complete(bucket, self.index)

    def _check(self) -> tuple[DataParallel, Bucket]:
        owner, bucket = self._owner(), self._bucket()
        if owner is None or bucket is None:
            raise RuntimeError(
                f"{self.name} received a gradient, but its DataParallel was deleted: keep the "
                "DataParallel as long as the model trains, or call its remove_hooks() first."
            )
        if bucket.is_reducing or owner.is_finished:
            raise RuntimeError(
                f"{self.name} received a gradient after its sum over data began: "
                "run all micro-batches but the last under no_sync(), and zero_grad() between "
                "steps."
            )
        return owner, bucket


def check_declared(chunks: Sequence[nn.Module], tp: Axis) -> None:
    """Raise if tensor ranks share a parameter without a layout."""
    names = [name for chunk in chunks for name in undeclared_parameters(chunk)]
    if tp.size > 1 and names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ValueError(
            f"{names[0]}{more}: no layout declares how {tp.size} tensor ranks share it, so a "
            "norm would count it wrongly. Wrap a module that all of them hold whole in "
            "mcore_parallel.replicated(module, ctx.tp), with partial=True if it computes other "
            "tokens on each rank; give a split module a method layouts()."
        )


def _trainable(
    parameters: list[tuple[int, NamedParameter]],
) -> list[tuple[int, NamedParameter]]:
    trainable = [entry for entry in parameters if entry[1].parameter.requires_grad]
    if not trainable:
        raise ValueError(
            "no parameter of the model requires a gradient: set requires_grad of those to train"
        )
    for _, named in trainable:
        if grad_slot(named.parameter).main is not None:
            raise ValueError(
                f"{named.name} already has a main gradient: wrap a model once, or call "
                "remove_hooks() on the DataParallel that holds it."
            )
        if named.parameter.grad is not None:
            raise ValueError(
                f"{named.name} already has a gradient, which would be added to that of the "
                "first step: call model.zero_grad() before DataParallel."
            )
    return trainable


def _holds(bucket: Bucket, parameters: Iterable[nn.Parameter]) -> bool:
    searched = set(parameters)
    return any(slot.named.parameter in searched for slot in bucket.slots)
