"""A forward interleaved with a backward, so that one's exchanges run under the other.

An expert layer exchanges tokens twice, and nothing else of its micro-batch can be computed
during an exchange. The forward of another micro-batch fills these times: each of the two runs
on the host until it has started an exchange, then the other continues. Each launches the same
operations in the same order as alone, so results are the same bits.

The backward runs on a thread, since autograd cannot be left and entered again. One of the two
runs at a time, and which one depends on the layers alone: all ranks launch their collectives
in one order. DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from threading import Lock

import torch
from torch import nn

_BACKWARD, _FORWARD = 0, 1


class Turns:
    """Lets a forward and a backward take turns at the exchanges of their layers."""

    def __init__(self) -> None:
        self._entries = (Lock(), Lock())
        for entry in self._entries:
            entry.acquire()  # released by the other side
        self._is_going = [False, False]
        self._active = _BACKWARD
        self._has_failed = False
        self._thread = ThreadPoolExecutor(1, "backward")

    def serve(self, *modules: nn.Module) -> None:
        """Pass ``change`` to every layer that has a method ``set_overlap_callback``."""
        for module in modules:
            for layer in module.modules():
                setter = getattr(layer, "set_overlap_callback", None)
                if setter is not None:
                    setter(self.change)

    def change(self) -> None:
        """Let the other side continue; returns at this one's next turn, at once if alone."""
        if not all(self._is_going):
            return
        own = self._active
        self._active = 1 - own
        self._entries[1 - own].release()
        self._entries[own].acquire()
        if self._has_failed:
            raise RuntimeError("the interleaved pass has failed")

    def run(
        self,
        backward: Callable[[], object],
        forward: Callable[[], object],
        device: torch.device | str,
    ) -> None:
        """Run both to their ends; the backward begins.

        Neither may need anything of the other. Both launch on the current stream. If one
        raises, the other ends at its next turn: exchanges that peers do not enter would hang.
        """
        self._is_going[:] = True, True
        self._active = _BACKWARD
        self._has_failed = False
        is_cuda = torch.device(device).type == "cuda"
        stream = torch.cuda.current_stream(device) if is_cuda else None

        def run_backward() -> None:
            here: AbstractContextManager[object] = nullcontext()
            if stream is not None:
                here = torch.cuda.stream(stream)
            try:
                with here:
                    backward()
            except BaseException:
                self._has_failed = True
                raise
            finally:
                self._leave(_BACKWARD)

        done = self._thread.submit(run_backward)
        self._entries[_FORWARD].acquire()
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
        """End one side; the other, which waits for its turn, runs alone."""
        self._is_going[own] = False
        if self._is_going[1 - own]:
            self._active = 1 - own
            self._entries[1 - own].release()
