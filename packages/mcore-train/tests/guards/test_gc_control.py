"""The collector during training: still, but for the steps that are said."""

import gc
from functools import partial

import pytest

from mcore_train.guards.gc_control import GCControl


class Loop:
    """Garbage that only the collector frees."""

    count = 0

    def __init__(self):
        self.itself = self
        Loop.count += 1

    def __del__(self):
        Loop.count -= 1


def test_garbage_is_collected_after_every_nth_step_and_not_else(monkeypatch):
    Loop.count = 0
    counts, calls = [], []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, partial(calls.append, name))
    with GCControl(3) as collector:
        assert not gc.isenabled()
        for iteration in range(1, 7):
            Loop()
            collector.after_step(iteration)
            counts.append(Loop.count)
    assert counts == [1, 2, 0, 1, 2, 0]
    assert gc.isenabled()
    assert calls == ["freeze", "unfreeze"]


def test_an_interval_of_none_leaves_the_collector_alone():
    with GCControl(0) as collector:
        assert gc.isenabled()
        collector.after_step(5)
    assert gc.isenabled()


def test_an_error_inside_starts_the_collector_again():
    with pytest.raises(RuntimeError, match="stop"), GCControl(1):
        raise RuntimeError("stop")
    assert gc.isenabled()
