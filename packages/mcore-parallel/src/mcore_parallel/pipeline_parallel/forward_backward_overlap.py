"""Runs a forward and a backward of two micro-batches alternately, to hide all-to-alls.

An expert layer exchanges tokens twice, and nothing else of its micro-batch can be computed
during an exchange. Here the pass of another micro-batch fills that time: each pass runs on the
host until it has launched an exchange, then the other continues. Either launches what it
launches alone, in the same order, so results are the same bits.

The backward runs on a thread, since autograd cannot be left and entered again. Only one of the
two threads runs at a time, and which one depends on the layers alone, so that all ranks launch
their collectives in one order. DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from threading import Lock

import torch
from torch import nn

_BACKWARD, _FORWARD = 0, 1


class ForwardBackwardOverlap:
    """Switches between a forward and a backward at the exchanges of their layers."""

    def __init__(self) -> None:
        self._entries = (Lock(), Lock())
        for entry in self._entries:
            entry.acquire()  # released by the other pass
        self._is_running = [False, False]
        self._active = _BACKWARD
        self._has_failed = False
        self._thread = ThreadPoolExecutor(1, "backward")

    def attach(self, *modules: nn.Module) -> None:
        """Give ``switch`` to every layer that has a method ``set_overlap_callback``."""
        for module in modules:
            for layer in module.modules():
                setter = getattr(layer, "set_overlap_callback", None)
                if setter is not None:
                    setter(self.switch)

    def switch(self) -> None:
        """Let the other pass run; return when it switches back, at once if it has ended.

        Layers call it after they have launched an exchange.
        """
        if not all(self._is_running):
            return
        own = self._active
        self._active = 1 - own
        self._entries[1 - own].release()
        self._entries[own].acquire()
        if self._has_failed:
            raise RuntimeError("the other pass of the pair has failed")

    def run(
        self,
        backward: Callable[[], object],
        forward: Callable[[], object],
        device: torch.device | str,
    ) -> None:
        """Run both passes to their ends; the backward begins.

        Neither pass may need a result of the other. Both launch on the current stream. If one
        raises, the other ends at its next ``switch``: it would wait for peers that never
        enter its exchanges.
        """
        self._is_running[:] = True, True
        self._active = _BACKWARD
        self._has_failed = False
        is_cuda = torch.device(device).type == "cuda"
        stream = torch.cuda.current_stream(device) if is_cuda else None

        def run_backward() -> None:
            # A thread begins on the default stream.
            on_stream: AbstractContextManager[object] = nullcontext()
            if stream is not None:
                on_stream = torch.cuda.stream(stream)
            try:
                with on_stream:
                    backward()
            except BaseException:
                self._has_failed = True
                raise
            finally:
                self._leave(_BACKWARD)

        done = self._thread.submit(run_backward)
        self._entries[_FORWARD].acquire()  # until the backward's first switch, or its end
        try:
            forward()
        except BaseException:
            failed_first, self._has_failed = not self._has_failed, True
            self._leave(_FORWARD)
            if failed_first:
                done.exception()  # waits: this error is the one to show
                raise
        else:
            self._leave(_FORWARD)
        done.result()

    def _leave(self, own: int) -> None:
        """End one pass; the other, which waits in ``switch``, goes on alone."""
        self._is_running[own] = False
        if self._is_running[1 - own]:
            self._active = 1 - own
            self._entries[1 - own].release()
