"""Runs a forward and a backward of two micro-batches alternately, to hide all-to-alls.

An expert layer exchanges tokens twice, and its micro-batch has nothing else to compute during
an exchange. A pass of another micro-batch fills that time: each pass runs on the host until it
has launched an exchange, then the other pass continues. Each pass launches the same work in the
same order as without overlap, so results are equal bit for bit.

The backward runs on a thread, because autograd cannot suspend a backward. Only one of the two
threads runs at a time, and the layers alone decide which, so that all ranks launch their
collectives in one order. DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1.
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
        # A pass acquires its lock to pause; the other pass releases that lock to resume it.
        self._entries = (Lock(), Lock())
        for entry in self._entries:
            entry.acquire()
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
        """Pause this pass and let the other pass run until it switches back or ends.

        Layers call ``switch`` after they have launched an exchange. Returns at once if the
        other pass has ended.
        """
        if not all(self._is_running):
            return
        this_pass = self._active
        self._active = 1 - this_pass
        self._entries[1 - this_pass].release()
        self._entries[this_pass].acquire()
        if self._has_failed:
            raise RuntimeError("the other pass of the pair has failed")

    def run(
        self,
        backward: Callable[[], object],
        forward: Callable[[], object],
        device: torch.device | str,
    ) -> None:
        """Run both passes to their ends, alternately, the backward first.

        Neither pass may need a result of the other. Both launch work on the current stream. If
        one pass raises, the other raises at its next ``switch``, because the peers of its
        exchanges may never come.
        """
        self._is_running[:] = True, True
        self._active = _BACKWARD
        self._has_failed = False
        is_cuda = torch.device(device).type == "cuda"
        stream = torch.cuda.current_stream(device) if is_cuda else None

        def run_backward() -> None:
            # A new thread has the default stream as its current stream.
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
                done.exception()  # wait for the thread, but raise the forward's error
                raise
        else:
            self._leave(_FORWARD)
        done.result()

    def _leave(self, ended: int) -> None:
        """Mark a pass as ended, and resume the other pass if it is paused in ``switch``."""
        self._is_running[ended] = False
        if self._is_running[1 - ended]:
            self._active = 1 - ended
            self._entries[1 - ended].release()
