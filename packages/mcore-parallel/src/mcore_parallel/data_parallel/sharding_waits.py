"""Spans of the step clock around the communication of torch's ``fully_shard``.

``fully_shard`` gathers weights in hooks before the forward and the backward of a module, and
reduce-scatters gradients in an autograd node after its backward; a callback at the end of the
whole backward waits for the last collectives. Hooks that run before and after those of
``fully_shard`` open and close a span of the step clock. On a GPU a span lasts while the compute
stream waits and copies; on a CPU, where collectives are synchronous, it lasts for the
collective.

Nothing is registered in the graph of a step that is neither recorded nor profiled.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from mcore_parallel.mesh import Axis


class ShardingWaits:
    """Times the communication of one module as spans of an axis."""

    def __init__(self, module: nn.Module, axis: Axis, *, is_root: bool) -> None:
        """Register hooks on a module that ``fully_shard`` has wrapped.

        Args:
            module: a module that ``fully_shard`` has wrapped.
            axis: axis whose clock times the spans and whose name they have.
            is_root: whether backward ends with this module.
        """
        self._axis, self._is_root = axis, is_root
        self._span: AbstractContextManager[None] | None = None
        self._inputs: list[Any] = []
        module.register_forward_pre_hook(self._before_gather, prepend=True, with_kwargs=True)
        module.register_forward_pre_hook(self._after_gather, with_kwargs=True)
        module.register_forward_hook(self._before_outputs, prepend=True)
        module.register_forward_hook(self._after_outputs)

    @property
    def _is_timed(self) -> bool:
        return self._axis.clock is not None and self._axis.clock.is_on

    def _open(self, *_: Any) -> None:
        if self._span is None and self._is_timed:
            self._span = self._axis.waiting()
            self._span.__enter__()

    def _close(self, *_: Any) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(None, None, None)

    def _before_gather(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_timed:
            self._inputs = tree_leaves((args, kwargs))
            self._open()

    def _after_gather(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._close()
        old_inputs, self._inputs = self._inputs, []
        if not old_inputs:
            return
        # fully_shard has replaced inputs by outputs of its autograd node, whose backward
        # reduce-scatters the gradients: the span covers that backward.
        pairs = zip(old_inputs, tree_leaves((args, kwargs)), strict=True)
        nodes = {new.grad_fn for old, new in pairs if new is not old}
        for node in nodes:
            node.register_prehook(self._open)
            node.register_hook(self._close)

    def _before_outputs(self, _module: nn.Module, _args: Any, output: Any) -> None:
        def open_spans(_gradient: Tensor) -> None:
            if self._is_root:
                _call_after_backward(self._open)
            self._open()

        self._register(output, open_spans)

    def _after_outputs(self, _module: nn.Module, _args: Any, output: Any) -> None:
        def close_spans(_gradient: Tensor) -> None:
            self._close()
            if self._is_root:
                _call_after_backward(self._close)

        self._register(output, close_spans)

    def _register(self, output: Any, hook: Callable[[Tensor], None]) -> None:
        """Register a hook on the gradients of outputs; hooks run in order of registration."""
        for x in tree_leaves(output) if self._is_timed else ():
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(hook)


def _call_after_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of this backward, in the order of registration."""
    Variable._execution_engine.queue_callback(callback)
