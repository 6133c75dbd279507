"""``StepClock``: times named spans of one step on the device's own clock.

Layers and engines open a span around waits for other ranks (``Axis.waiting``), the training
loop around reading data, computing and updating. A span costs one attribute test unless a step
is recorded. On CUDA a span begins and ends with an event on the current stream: the time of a
wait is the time for which the stream was idle, and the host does not wait for the device. On a
CPU the monotonic clock is used. Spans inside a CUDA graph are captured with the graph
(``capturing``) and added to a step that launches the graph (``add_replayed``).
``Recording.segments`` cuts the step at all borders of spans: each segment belongs to the span
that began last, so the segments add up to the step even if spans overlap.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

PACED_S = 50e-6
"""A device that reaches an event within this time of its launch was waiting for the host."""

Annotate = Callable[[str], AbstractContextManager]
"""Returns a context that marks a named range in a profiler."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in time of a step: the host's time, and an event for the device's time."""

    host_s: float
    event: torch.cuda.Event | None = None


@dataclass(slots=True)
class Span:
    """A named interval of a step."""

    name: str
    begin: Mark
    end: Mark | None = None
    """None while the span is open."""


@dataclass(frozen=True, slots=True)
class Segment:
    """An interval of a step in which no span begins or ends."""

    names: tuple[str, ...]
    """Names of the open spans in the order in which they began; empty: no span is open."""
    begin_s: float
    end_s: float
    is_paced: bool = False
    """Whether device and host reached the segment's end together: no work was queued."""

    @property
    def length_s(self) -> float:
        """Length in seconds."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class Recording:
    """The spans of one step; read them when the device has finished the step."""

    base: Mark
    """A time at which the device was idle, so that host and device clocks can be compared."""
    whole: Span
    spans: list[Span]

    def segments(self) -> list[Segment]:
        """Cut the step at the borders of its spans, in order of time."""
        assert self.whole.end is not None
        first, last = self._time_s(self.whole.begin), self._time_s(self.whole.end)
        borders: list[tuple[float, int, int, Mark]] = []  # time, order, +-(span + 1), mark
        for number, span in enumerate(self.spans):
            for mark, sign in ((span.begin, 1), (span.end, -1)):
                if mark is not None:
                    time_s = min(max(self._time_s(mark), first), last)
                    borders.append((time_s, len(borders), sign * (number + 1), mark))
        borders.sort(key=lambda border: border[:2])
        borders.append((last, len(borders), 0, self.whole.end))
        segments: list[Segment] = []
        opened: list[int] = []  # indices of open spans, in the order in which they began
        before_s = first
        for time_s, _, change, mark in borders:
            if time_s > before_s:
                names = tuple(self.spans[number].name for number in opened)
                segments.append(Segment(names, before_s, time_s, self._is_paced(mark)))
                before_s = time_s
            if change > 0:
                opened.append(change - 1)
            elif change < 0 and -change - 1 in opened:
                opened.remove(-change - 1)
        return segments

    def _time_s(self, mark: Mark) -> float:
        """Return the time at which the device reached a mark, on the host's clock."""
        if mark.event is None or self.base.event is None:
            return mark.host_s
        return self.base.host_s + 1e-3 * self.base.event.elapsed_time(mark.event)

    def _is_paced(self, mark: Mark) -> bool:
        return mark.event is not None and self._time_s(mark) - mark.host_s < PACED_S


@dataclass(slots=True)
class StepClock:
    """Records the spans of a step between ``start`` and ``stop``; costs little otherwise."""

    device: torch.device
    is_on: bool = False
    """Whether spans are recorded or shown to a profiler."""
    annotate: Annotate | None = None
    """Marks each span in a profiler; set while a profiler runs."""
    _base: Mark | None = None
    _whole: Span | None = None
    _spans: list[Span] = field(default_factory=list)
    _is_capturing: bool = False

    def span(self, name: str) -> AbstractContextManager[None]:
        """Return a context that is timed as a named span; spans may nest and overlap."""
        return self._span(name) if self.is_on else nullcontext()

    def calibrate(self) -> None:
        """Wait for the device and take the base mark; call it before ``start``."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._base = self._mark()

    def start(self) -> None:
        """Start to record a step; ``calibrate`` must have been called."""
        self._spans, self._whole = [], Span("step", self._mark())
        self.is_on = True

    def stop(self) -> Recording:
        """End the step of ``start``; return its recording without waiting for the device."""
        assert self._base is not None
        assert self._whole is not None
        self._whole.end = self._mark()
        recording = Recording(self._base, self._whole, self._spans)
        self._spans, self._whole = [], None
        self.is_on = self.annotate is not None
        return recording

    def show(self, annotate: Annotate | None) -> None:
        """Mark all later spans in a profiler; None: stop marking."""
        self.annotate = annotate
        self.is_on = annotate is not None or self._whole is not None

    @property
    def is_recording(self) -> bool:
        """Whether spans are recorded now, for a step or for a graph that is captured."""
        return self.is_on and (self._whole is not None or self._is_capturing)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which no span is recorded or marked."""
        was_on, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = was_on

    @contextmanager
    def capturing(self) -> Iterator[list[Span]]:
        """Return a context that yields the spans opened inside, for capturing a CUDA graph.

        The events of these spans become nodes of the graph, so each launch of the graph records
        the events again: launch the graph only in recorded steps.
        """
        was_on, spans = self.is_on, self._spans
        self._spans, self.is_on, self._is_capturing = [], True, True
        try:
            yield self._spans
        finally:
            self._spans, self.is_on, self._is_capturing = spans, was_on, False

    def add_replayed(self, spans: Sequence[Span]) -> None:
        """Add the spans of a captured graph, which is launched next, to the recorded step."""
        now_s = time.perf_counter()
        self._spans += [
            Span(s.name, Mark(now_s, s.begin.event), s.end and Mark(now_s, s.end.event))
            for s in spans
        ]

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        span = Span(name, self._mark())
        if self.is_recording:
            self._spans.append(span)
        try:
            with nullcontext() if self.annotate is None else self.annotate(name):
                yield
        finally:
            span.end = self._mark()

    def _mark(self) -> Mark:
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True, external=self._is_capturing)
            event.record()
        return Mark(time.perf_counter(), event)
