import time
from dataclasses import dataclass

import pytest
import torch

from mcore_parallel.step_clock import PACED_S, Mark, Recording, Span, StepClock


def recording(*spans, end=10.0):
    """Return a recording on the host's clock from names, begins and ends in seconds."""
    marked = [Span(name, Mark(begin), Mark(stop)) for name, begin, stop in spans]
    return Recording(Mark(0.0), Span("step", Mark(0.0), Mark(end)), marked)


def lengths(found):
    return [(segment.names, segment.length_s) for segment in found.segments()]


def test_a_piece_of_a_step_has_the_spans_that_are_open():
    found = recording(("compute", 1.0, 8.0), ("F/0", 2.0, 5.0), ("tp", 3.0, 4.0))
    assert lengths(found) == [
        ((), 1.0),
        (("compute",), 1.0),
        (("compute", "F/0"), 1.0),
        (("compute", "F/0", "tp"), 1.0),
        (("compute", "F/0"), 1.0),
        (("compute",), 3.0),
        ((), 2.0),
    ]


def test_pieces_add_up_where_spans_overlap_without_nesting():
    found = recording(("ep", 1.0, 6.0), ("dp", 4.0, 9.0), ("late", 8.0, 12.0))
    pieces = found.segments()
    assert sum(piece.length_s for piece in pieces) == 10.0
    assert [piece.names[-1:] for piece in pieces] == [
        (),
        ("ep",),
        ("dp",),
        ("dp",),
        ("late",),
        ("late",),
    ]


@dataclass(frozen=True)
class Event:
    """A moment of a device, in seconds."""

    at_s: float

    def elapsed_time(self, other):
        return 1e3 * (other.at_s - self.at_s)


def test_a_device_that_is_not_behind_its_host_was_paced_by_it():
    def mark(host_s, device_s):
        return Mark(host_s, Event(device_s + 100.0))  # another clock

    spans = [
        Span("late", mark(1.0, 2.0), mark(3.0, 5.0)),  # two seconds of work were ahead
        Span("paced", mark(6.0, 6.0), mark(8.0, 8.0 + PACED_S / 2)),
    ]
    whole = Span("step", mark(0.0, 0.0), mark(9.0, 9.5))
    pieces = Recording(mark(0.0, 0.0), whole, spans).segments()
    by_name = {piece.names: piece for piece in pieces if piece.names}
    assert by_name["late",].length_s == pytest.approx(3.0)
    assert not by_name["late",].is_paced
    assert by_name["paced",].length_s == pytest.approx(2.0, abs=1e-3)
    assert by_name["paced",].is_paced


def test_spans_cost_nothing_and_are_not_kept_unless_a_step_is_recorded():
    clock = StepClock(torch.device("cpu"))
    assert clock.span("early") is not None
    with clock.span("early"):
        pass
    clock.calibrate()
    clock.start()
    with clock.span("compute"):
        time.sleep(0.01)
        with clock.paused(), clock.span("hidden"):
            pass
    found = clock.stop()
    with clock.span("after"):
        pass
    assert [span.name for span in found.spans] == ["compute"]
    (piece,) = [piece for piece in found.segments() if piece.names]
    assert piece.length_s >= 0.01


def test_a_profiler_sees_spans_outside_of_recorded_steps():
    seen = []

    class Range:
        def __init__(self, name):
            seen.append(name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    clock = StepClock(torch.device("cpu"))
    clock.show(Range)
    with clock.span("compute"):
        pass
    clock.show(None)
    with clock.span("after"):
        pass
    assert seen == ["compute"]
    assert not clock.is_on


def test_spans_of_a_captured_graph_are_added_to_each_recorded_launch():
    clock = StepClock(torch.device("cpu"))
    clock.calibrate()
    clock.start()
    with clock.paused():
        with clock.span("outside"):
            assert not clock.is_recording
        with clock.capturing() as spans, clock.span("tp"):
            assert clock.is_recording
        assert not clock.is_recording
    with clock.span("compute"):
        clock.add_replayed(spans)
    assert [span.name for span in clock.stop().spans] == ["compute", "tp"]
    assert [span.name for span in spans] == ["tp"]
