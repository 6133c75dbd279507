"""A recorder for CPUs: operations on the same memory, run again without the code between them.

What the host decided while a forward was recorded stays decided, as in a CUDA graph.
"""

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Keeps each operation with its arguments and results."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, results))
        return results


class TapeRecorder:
    """As ``Recorder``."""

    gave_up = False

    def recorded(self, forward):
        forward()  # takes memory
        with Tape() as tape:
            result = forward()

        def replay():
            for function, args, kwargs, old in tape.calls:
                pairs = zip(
                    tree_leaves(old), tree_leaves(function(*args, **kwargs)), strict=True
                )
                for kept, new in pairs:  # not views, nor what was changed in place
                    if isinstance(kept, Tensor) and kept.data_ptr() != new.data_ptr():
                        kept.copy_(new)
            return result

        return replay


@pytest.fixture
def tape_recorder():
    return TapeRecorder()


class WaitingRecorder:
    """As ``Recorder`` where forwards wait for the device."""

    gave_up = False

    def recorded(self, forward):
        forward()
        self.gave_up = True
        return forward


@pytest.fixture
def waiting_recorder():
    return WaitingRecorder()
