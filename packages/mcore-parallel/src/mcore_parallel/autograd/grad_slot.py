"""``GradSlot``: where a parameter's gradient goes when an operation adds it past autograd.

``DataParallel`` gives each parameter's slot a main gradient, a view of its buckets. An
operation that can add to it directly (a GEMM in its epilogue, an embedding row by row) saves a
tensor of the parameter's size, its sum and its cast; it then returns None as the parameter's
gradient. The parameter's hook still runs at the end of backward and counts it.

A layer whose operations all call ``take_stale`` before they add declares so by ``overwrites``:
then ``zero_grad`` leaves the memory as it is, and the first GEMM
of a step is written over it instead of being added. Neither zeros are written nor read.

Where reading and writing the main gradient takes longer than a micro-batch's GEMM, the slot
may keep what some micro-batches add (``take_part``) until one operation adds all of it.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn


@runtime_checkable
class DeferredWork(Protocol):
    """Takes weight gradients that are made later; ``pipeline_parallel.WeightQueue``."""

    @property
    def is_empty(self) -> bool:
        """Whether no gradient waits to be made."""

    def put(
        self, work: Callable[[], object], prepare: Callable[[], None] | None = None
    ) -> None:
        """Take a function that adds one weight's gradient to its slot."""


class GradSlot:
    """One parameter's gradient, as its operations and its owner see it.

    Stored as ``parameter.grad_slot``, the only attribute that this library adds to a Parameter.

    Attributes:
        main: the main gradient, of the parameter's shape; None: autograd has the gradient.
        overwrites: whether all direct additions call ``take_stale`` first.
        is_stale: whether the next addition is written over ``main`` instead of being added.
        queue: takes the weight's gradient later (zero-bubble schedules); None: at once.
        on_ready: called when operations have added all gradients that a queue put off.
        num_together: micro-batches whose parts ``take_part`` adds at once.
    """

    __slots__ = (
        *("_add_parts", "_num_ended", "_num_put_off", "_parts"),
        *("is_stale", "main", "num_together", "on_ready", "overwrites", "queue"),
    )

    def __init__(self) -> None:
        self.main: Tensor | None = None
        self.overwrites = self.is_stale = False
        self.queue: DeferredWork | None = None
        self.on_ready: Callable[[], None] | None = None
        self.num_together = 1
        self._num_put_off = self._num_ended = 0
        self._parts: list[Any] = []
        self._add_parts: Callable[..., object] | None = None

    @property
    def is_keeping(self) -> bool:
        """Whether parts of the gradient are kept that ``main`` lacks."""
        return bool(self._parts)

    def take_stale(self) -> bool:
        """Whether ``main`` is to be written over; from now on it is not."""
        was_stale, self.is_stale = self.is_stale, False
        return was_stale

    def add(self, gradient: Shaped[Tensor, "*F"]) -> None:
        """Add a finished gradient to ``main``, or write it over a stale one."""
        assert self.main is not None
        if self.take_stale():
            self.main.copy_(gradient)
        else:
            self.main.add_(gradient)

    def take(self, add: Callable[..., object]) -> None:
        """Let ``add(main, overwrite=...)`` add a gradient, at once or when the queue does."""

        def work() -> None:
            assert self.main is not None
            add(self.main, overwrite=self.take_stale())
            self.ready()

        if self.queue is None:
            work()
        else:
            self._num_put_off += 1
            self.queue.put(work)

    def take_part(self, add: Callable[..., object], part: object) -> None:
        """Let ``add(main, parts, overwrite=...)`` add a part with those of other batches.

        With ``num_together`` above 1 parts are kept until the owner of ``main``, who calls
        ``end_backward``, has counted as many micro-batches; else as ``take``.

        Args:
            add: the same for all parts.
            part: tensors that nothing writes over before they are added.
        """
        if self.num_together == 1:
            self.take(lambda main, overwrite: add(main, [part], overwrite=overwrite))
            return
        self._add_parts = add
        self._parts.append(part)

    def end_backward(self, *, is_last: bool) -> None:
        """Count a micro-batch whose parts have all come; ``is_last``: of the step."""
        self._num_ended += 1
        if is_last or self._num_ended >= self.num_together:
            self.add_parts()

    def add_parts(self) -> None:
        """Add the parts that are kept, and count micro-batches anew."""
        self._num_ended = 0
        if not self._parts:
            return
        assert self.main is not None
        assert self._add_parts is not None
        parts, self._parts = self._parts, []
        with torch.no_grad():
            self._add_parts(self.main, parts, overwrite=self.take_stale())

    def drop_parts(self) -> None:
        """Drop the kept parts of a step that was not finished."""
        self._parts, self._num_ended = [], 0

    def ready(self) -> None:
        """Count an operation's gradient; calls ``on_ready`` if no gradient is deferred."""
        self._num_put_off = max(0, self._num_put_off - 1)
        if self.on_ready is not None and not self._num_put_off:
            self.on_ready()

    def zero(self) -> None:
        """Make the main gradient zero now."""
        assert self.main is not None
        self.main.zero_()

    def release(self) -> None:
        """Drop the main gradient: autograd accumulates gradients again."""
        self.main = self.on_ready = None
        self.is_stale = False
        self._num_put_off = 0
        self.drop_parts()


def grad_slot(parameter: Any) -> GradSlot:
    """Return a parameter's slot; the first call makes it."""
    slot = getattr(parameter, "grad_slot", None)
    if slot is None:
        slot = parameter.grad_slot = GradSlot()
    return slot


def slot_of(parameter: Any) -> GradSlot | None:
    """Return the slot with a main gradient that an operation adds to; None: autograd has it.

    Always None in compiled code, where a side effect of backward would be lost.
    """
    if torch.compiler.is_compiling():
        return None
    slot = getattr(parameter, "grad_slot", None)
    return None if slot is None or slot.main is None else slot


def overwrites(parameter: nn.Parameter) -> nn.Parameter:
    """Declare that all direct additions to the main gradient call ``take_stale`` first."""
    grad_slot(parameter).overwrites = True
    return parameter


def accumulate_matmul(
    total: Float[Tensor, "F D"],
    a: Float[Tensor, "F T"],
    b: Float[Tensor, "T D"],
    *,
    overwrite: bool = False,
) -> None:
    """Add the matmul a·b to ``total`` in place, in the GEMM's epilogue.

    Low-precision operands accumulate into a float32 total without a temporary on CUDA (661
    TFLOP/s seen on H200 for 8192x28672x4096); elsewhere the GEMM runs in the total's dtype.

    Args:
        total: changed in place.
        a: first factor.
        b: second factor.
        overwrite: replace ``total`` by the matmul, without reading it.
    """
    if a.dtype != total.dtype and not a.is_cuda:
        a, b = a.to(total.dtype), b.to(total.dtype)
    if a.dtype == total.dtype:
        torch.mm(a, b, out=total) if overwrite else total.addmm_(a, b)
    elif overwrite:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
