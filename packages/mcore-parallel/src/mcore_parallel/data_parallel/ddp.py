"""Data parallelism with replicated weights: gradients accumulate in buckets, summed over ranks.

``DataParallel`` hooks into the parameters of plain modules. Each backward adds ``.grad`` to the
main gradient and frees it. After the last micro-batch ``finish`` completes the sums of every
gradient: partial gradients over tensor ranks, tied copies over stages, then all over data and
context ranks. Nothing is averaged: losses are divided by global counts before backward.

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
    """Main gradients of model chunks in buckets, summed over the data ranks.

    The engine of replicated weights: the optimizer is whole on every data rank, or sharded over
    them (ZeRO-1).

    Parameters move into contiguous buffers: views of them taken earlier (``named_shards``,
    a torch optimizer's state) no longer follow.

    Attributes:
        buckets: in the order in which they are reduced, the same on all data ranks.
        ctx: the context whose data axes it sums over.
        config: the switches it was built with.
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
        """Take over the gradients of all trainable parameters.

        Args:
            chunks: model chunks of this rank, in forward order; one without interleaving.
            ctx: the rank grid; no communication here.
            config: sharding, overlap, bucket size, dtype.
            only: parameters to take; None: all.

        Raises:
            ValueError: if nothing is trainable, a parameter already has a gradient or a main
                gradient, or, with tensor ranks, a module does not say how they share its
                parameters.
        """
        check_declared(chunks, ctx.tp)
        self.ctx = ctx
        self.config = config
        self.before_sum: Callable[[Bucket], None] | None = None
        # A parameter of two chunks is the first one's, whose last backward comes last.
        found: dict[nn.Parameter, tuple[int, NamedParameter]] = {}
        for index, chunk in enumerate(chunks):
            for named in named_parameters(chunk):
                if only is None or named.parameter in only:
                    found.setdefault(named.parameter, (index, named))
        self._named = [named for _, named in found.values()]
        narrow = fp8_weights(chunks) if config.fp8_param_gather else ()
        self.buckets = build_buckets(_trainable(list(found.values())), ctx, config, narrow)
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
        """The buckets as they are gathered."""
        return self.buckets if self._gathering is None else self._gathering.order

    @property
    def is_finished(self) -> bool:
        """Whether main gradients are complete: ``finish`` ran and nothing was added since."""
        return self._is_finished

    def zero_grad(self) -> None:
        """Reset all main gradients before the first micro-batch of a step.

        They are zero afterwards, except where a layer's first GEMM of the step overwrites
        them (``grad_slot.overwrites``).
        """
        if self._zeroed:  # torch refuses a list of none
            torch._foreach_zero_(self._zeroed)
        for slot in self._overwritten:
            slot.is_stale = True
        for slot in self._keeping:
            slot.drop_parts()
        self._restart()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without sums over data ranks, within the block."""
        before = self._is_syncing, self._is_syncing_weights
        self._is_syncing = [False] * len(self._is_syncing)
        self._is_syncing_weights = [False] * len(self._is_syncing)
        try:
            yield
        finally:
            self._is_syncing, self._is_syncing_weights = before

    def start_sync(self, chunk: int) -> None:
        """Let one chunk's buckets be reduced during its next backward, which is its last.

        For pipelines, whose chunks run their last micro-batch at different times. Called
        within ``no_sync``, until whose end it has effect. Weights whose gradients a
        ``WeightQueue`` defers wait for ``start_weight_sync``.
        """
        self._is_syncing = [s or i == chunk for i, s in enumerate(self._is_syncing)]

    def start_weight_sync(self, chunk: int) -> None:
        """Do what ``start_sync`` does, for weights whose gradients a ``WeightQueue`` defers.

        Called before the last deferred gradients are computed: those of earlier micro-batches
        may be computed after ``start_sync``.
        """
        syncing = self._is_syncing_weights
        self._is_syncing_weights = [s or i == chunk for i, s in enumerate(syncing)]

    def finish(self) -> None:
        """Complete all sums; every rank calls it once after the last backward.

        Starts the buckets that backward has not started, in order; all-reduces partial sums
        and tied copies; then the buckets that waited for these; then waits for all of them.
        The first time it also compares what ranks hold in common (``replicas``).

        Raises:
            ValueError: the first time, on every rank, if weights or gradients that ranks hold
                in common differ, or two pipeline stages give one name to their parameters.
            RuntimeError: if called again before ``zero_grad``, while weight gradients wait in a
                ``WeightQueue``, or if a parameter has a ``.grad``, which is not summed.
        """
        if self._is_finished:
            raise RuntimeError("gradients are summed already: call zero_grad() before backward")
        if not all(queue.is_empty for queue in self._queues):
            raise RuntimeError(
                "weight gradients still wait in a WeightQueue: hand it to run_schedule as "
                "weight_queue, which empties it."
            )
        self._check_taken()
        self.wait_params()
        for slot in self._keeping:
            slot.add_parts()  # of weights that the last micro-batch did not use
        for slot in self._overwritten:
            if slot.take_stale():  # no micro-batch came through it
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

        A gather runs under the updates of the buckets that come after it. With
        ``overlap_param_gather`` the last ones still run when the loop ends, and the modules
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
        """Wait for gathers on their way: before a save, a comparison, an export."""
        if self._gathering is not None:
            self._gathering.wait()

    def gather_in_full(self) -> None:
        """All-gather in their own dtype the weights that are normally gathered in fp8."""
        for bucket in self.update_order:
            if bucket.is_narrow:
                bucket.gather_params(in_full=True)

    def check_weights(self) -> None:
        """Compare the weights of data ranks and tied copies, which are equal to the last bit.

        Every rank calls it, between steps; see ``replica_checks.check_weights``.

        Raises:
            UnlikeWeightsError: on every rank if any differ, with parameter and ranks.
        """
        self.wait_params()
        check_weights(self.buckets, self.ctx)

    def weight_shards(self) -> dict[str, Shard]:
        """Describe the parameters, frozen ones too; every data rank holds them whole.

        Frozen ones that have no memory at the moment are left out.
        """
        tensors = [(named, named.parameter.detach()) for named in self._named]
        weights = [each for each in tensors if each[1].untyped_storage().nbytes()]
        return shards_of(weights, self.ctx.data_axes())

    def remove_hooks(self) -> None:
        """Detach from the parameters: backward fills ``.grad`` again."""
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
        """Raise if a parameter has a ``.grad``: the hooks, which take gradients, missed it."""
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
        """Note that a bucket has the whole gradient of one of its slots."""
        missing = self._missing[bucket]
        missing.discard(index)
        if self.config.overlap_grad_reduce and not missing:
            self._start_in_order()

    def _start_in_order(self) -> None:
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
    """Starts the gathers of all buckets, and waits for each in the modules that need it.

    All ranks start the gathers in the same ``order``: first the buckets with a weight outside
    ``blocks`` (embedding, head, final norm), then those of the blocks in forward order. A chunk
    waits for the former when its forward begins, since code outside the blocks may use a weight
    without calling its module; a block waits for its own.
    """

    def __init__(self, chunks: Sequence[nn.Module], buckets: Sequence[Bucket]) -> None:
        """Hook into the chunks and their blocks.

        Args:
            chunks: model chunks; each module of ``chunk.blocks`` waits for its own buckets,
                the chunk's forward for all others.
            buckets: of all the chunks' parameters.
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
        """Begin one bucket's gather; returns at once."""
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
    """What autograd calls once a parameter has its gradient of a micro-batch.

    torch does not show such hooks to the garbage collector: what they hold strongly lives as
    long as the parameter. So they hold neither the parameter nor those who do.
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
            return  # its operation adds to the main gradient itself, later
        is_last = owner._is_syncing[self.chunk]
        self.slot.end_backward(is_last=is_last)
        if gradient is not None:  # None: its operation added to the main gradient itself
            self.slot.add(gradient)
        elif not self.slot.is_keeping and self.slot.take_stale():
            self.slot.zero()  # nothing was added: its operation had no gradient
        if is_last:
            owner._complete(bucket, self.index)

    def accumulated_later(self) -> None:
        """Note a gradient that a ``WeightQueue`` put off and has now made."""
        owner, bucket = self._check()
        if owner._is_syncing_weights[self.chunk]:
            owner._complete(bucket, self.index)

    def _check(self) -> tuple[DataParallel, Bucket]:
        owner, bucket = self._owner(), self._bucket()
        if owner is None or bucket is None:
            raise RuntimeError(
                f"{self.name} received a gradient, but nothing holds its DataParallel any "
                "more: keep it as long as the model trains, or call its remove_hooks() first."
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
            f"{names[0]}{more}: nothing says how {tp.size} tensor ranks share it, so a norm "
            "would count it wrongly. Wrap a module that all of them hold whole in "
            "mcore_parallel.replicated(module, ctx.tp), with partial=True if it sees their own "
            "tokens only; one that is split has a method layouts()."
        )


def _trainable(walked: list[tuple[int, NamedParameter]]) -> list[tuple[int, NamedParameter]]:
    found = [entry for entry in walked if entry[1].parameter.requires_grad]
    if not found:
        raise ValueError("no parameter of the model requires a gradient")
    for _, named in found:
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
    return found


def _holds(bucket: Bucket, parameters: Iterable[nn.Parameter]) -> bool:
    wanted = set(parameters)
    return any(slot.named.parameter in wanted for slot in bucket.slots)
