import signal

import pytest
import torch.distributed as dist
from warm_ranks import run_ranks

from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import ParallelContext
from mcore_train.guards.signals import StopRequest


# A signal raised is met by this thread, at once; one sent may find another thread first.
def test_a_signal_that_comes_twice_is_remembered_and_its_handler_given_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(ParallelContext.single()) as stop:
        assert not stop.poll()
        for number in (signal.SIGTERM, signal.SIGINT) * 2:  # as timeout and launchers send
            signal.raise_signal(number)
        assert stop.poll()
        assert stop.received == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def interrupts():
    """Python's own handler of SIGINT, which a shell's background jobs do not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_interrupt_acts_as_it_would_have_without_us(interrupts, monkeypatch):
    monkeypatch.setattr("mcore_train.guards.signals.REPEATED_S", 0.0)
    with StopRequest(ParallelContext.single()) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.poll()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def stop_rank_one() -> list[bool]:
    with StopRequest(ParallelContext.build(ParallelConfig())) as stop:
        answers = []
        for step in range(4):
            if step == 1 and dist.get_rank() == 1:
                signal.raise_signal(signal.SIGTERM)
            answers.append(stop.poll())
        return answers


def test_a_signal_to_one_rank_stops_all_of_them_after_the_same_step():
    first, second = run_ranks(stop_rank_one, 2)
    assert first == second == [False, False, True, True]
