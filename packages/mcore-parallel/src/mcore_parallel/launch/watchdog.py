"""Ends all ranks of a job if one raises, dies or hangs, and reports which rank failed where.

Torch's collectives time out; the watchdog adds which rank failed and where, and ends the other
ranks. Every few seconds a thread of each rank writes this rank's position in the code to a
store, and checks whether another rank has failed. The thread reads the interpreter's stacks, so
training is not slowed. A failing rank writes the error, its axis and line, and the positions of
all other ranks; their threads then end their processes. Every second the thread checks that the
processes of the other ranks of its host exist: ranks whose GPUs wait for a killed rank handle
no signal, so the launcher would wait 30 s before it kills them too. A second thread watches the
store itself, for which torch would wait without limit.

If a program reports its steps (``step_ended``), hangs are detected long before collectives time
out: a step is late when it takes ``STEP_FACTOR`` times the longest earlier step plus
``STEP_SLACK_S``. Then the ranks outside of any collective are logged, and each rank writes its
flight recorder.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from mcore_parallel.launch import launcher

log = logging.getLogger(__name__)

EXIT_CODE = 1
GRACE_S = 2.0
"""Time for a rank to end normally after another rank's fault; it may have failed too."""
ENDING_S = 15.0
"""Time for a failed rank to end."""
POLL_S = 1.0
"""Time between two checks of the processes of this host's ranks."""
WARN_SHARE = 0.9
"""Fraction of the timeout after which a rank that does not move logs all ranks' positions."""
STEP_FACTOR = 2.0
STEP_SLACK_S = 5.0
"""A step is late after ``STEP_FACTOR`` times the longest earlier step, plus this time. A late
step is detected within one period of the watch, at most 5 s later."""
LEARNED_STEPS = 3
"""Number of first steps whose times do not count: they load kernels and files."""
COMMUNICATION = ("collectives.py", "p2p.py", "buckets.py", "call_checks.py")
"""Files of this package that communicate; their callers are the call sites."""
GONE = ("left", "failed")
"""Last positions of a rank that has left the watch."""
WAITING = "waiting for its device"
"""Beginning of the position of a rank whose host waits for its GPU."""
FOREIGN = ("torch", "jaxtyping", "beartype")
"""Packages whose frames are skipped between a call site and the communication."""
_LIBRARY = str(Path(os.__file__).parent)
"""Folder of the standard library, whose frames are skipped as well."""


class Watch:
    """Context manager that watches the ranks of a world while a program runs in it.

    All ranks must enter the context together. In a world of one rank only late steps are
    detected, if the program reports its steps.
    """

    def __init__(
        self,
        store: dist.Store | None,
        rank: int,
        world_size: int,
        timeout_s: float,
        on_fault: Callable[[str], None] = lambda _fault: None,
        *,
        end_on_hang: bool = False,
        host_ranks: Sequence[int] = (),
    ) -> None:
        """Set up; nothing is written to the store before ``__enter__``.

        Args:
            store: store that all ranks share; None: nothing is watched.
            rank: this rank.
            world_size: number of ranks.
            timeout_s: timeout of the collectives; a rank that is silent for longer is a fault.
            on_fault: called with a description in the watch's thread when another rank has
                failed, ``GRACE_S`` before the process is ended.
            end_on_hang: end all ranks when a step is late; else a late step is logged, and
                the collectives' timeout ends the ranks.
            host_ranks: ranks whose processes run on this host.
        """
        self._store, self._on_fault = store, on_fault
        self._end_on_hang = end_on_hang
        self._steps = _StepTimes()
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.period_s = min(5.0, timeout_s / 10)
        self._count = 0
        self._processes = {number: 0 for number in host_ranks if number != rank}
        self._neighbour, self._neighbour_since = "", time.monotonic()
        self._main = threading.get_ident()
        self._ended, self._left = threading.Event(), threading.Event()
        self._answered = time.monotonic()
        self._thread: threading.Thread | None = None

    @classmethod
    def of_world(
        cls,
        rank: int,
        world_size: int,
        timeout_minutes: float,
        on_fault: Callable[[str], None] = lambda _fault: None,
        *,
        reports_steps: bool = False,
        end_on_hang: bool = False,
    ) -> "Watch":
        """Build the watch of the world that this process has joined.

        A world of one rank is watched only if the program ``reports_steps`` by ``step_ended``.
        """
        if world_size == 1:
            store = dist.HashStore() if reports_steps else None
            return cls(store, rank, 1, 60 * timeout_minutes, on_fault, end_on_hang=end_on_hang)
        # A separate connection, so that the thread never waits for a call of the main thread.
        store: Any = distributed_c10d._get_default_store()  # torch's stub lacks clone
        timeout_s = 60 * timeout_minutes
        env = launcher.read_environment()
        first = env.rank - env.local_rank
        return cls(
            store.clone(),
            rank,
            world_size,
            timeout_s,
            on_fault,
            end_on_hang=end_on_hang,
            host_ranks=range(first, first + env.local_world_size),
        )

    def __enter__(self) -> "Watch":
        if self._store is not None:
            self._write_heartbeat("starting")
            self._answered = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
            self._thread.start()
            threading.Thread(target=self._guard, name="watch store", daemon=True).start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop watching; write a fault to the store and to the exception as a note.

        Only the first fault of a world is reported; later faults are its consequences. After a
        fault the process has ``ENDING_S`` to end, since leaving a world of dead ranks may hang.
        """
        if self._store is None:
            return
        if self.world_size == 1:  # there is no other rank to inform
            self._stop()
            self._left.set()
            return
        failed = isinstance(error, Exception)
        try:
            if failed:
                own_fault = self._describe(error, traceback)
                fault = self._first_fault(own_fault)
                fault = own_fault if fault == own_fault else f"{fault}. Then {own_fault}"
                error.add_note(fault)
                log.error("rank %d ends: %s", self.rank, fault)
            self._stop()
            self._write_heartbeat("failed" if failed else "left")
            if failed and self.rank == 0:
                self._outlast_readers()
        except dist.DistError as lost:
            log.error("rank %d cannot reach the store any more: %s", self.rank, lost)
        self._left.set()
        if failed:
            last_resort = threading.Timer(ENDING_S, os._exit, (EXIT_CODE,))
            last_resort.daemon = True
            last_resort.start()

    def step_ended(self) -> None:
        """Report the end of a step, so that later steps can be compared with its time."""
        self._steps.end()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Return a context for work outside steps, such as a save, which is never late."""
        self._steps.stop()
        try:
            yield
        finally:
            self._steps.start()

    def places(self, wait_s: float = 0.0) -> dict[int, str]:
        """Return the last known position of every other rank.

        Args:
            wait_s: seconds after which to read again and mark ranks without news as silent.
        """
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        before = {rank: self._heartbeat_of(rank) for rank in others}
        time.sleep(wait_s)
        places = {}
        for rank in others:
            beat = self._heartbeat_of(rank)
            places[rank] = json.loads(beat)["place"] if beat else "never heard of"
            if wait_s and beat == before[rank] and places[rank] not in GONE:
                places[rank] = f"SILENT, last {places[rank]}"
        return places

    def _outlast_readers(self) -> None:
        """Wait until the other ranks have read the fault: the store may end with rank 0."""
        deadline = time.monotonic() + GRACE_S + 2 * self.period_s + 1
        if all(place in GONE for place in self.places().values()):
            return
        while time.monotonic() < deadline:
            places = self.places(wait_s=2 * self.period_s + 0.5).values()
            if all(place in GONE or place.startswith("SILENT") for place in places):
                return

    def _stop(self) -> None:
        self._ended.set()
        assert self._thread is not None
        self._thread.join()

    def _run(self) -> None:
        """Thread: write heartbeats and look for faults until this rank or another one ends."""
        still_since, still_at, warned = time.monotonic(), "", False
        late_step = 0
        beat_due = still_since + self.period_s
        while not self._ended.wait(min(POLL_S, self.period_s)):
            now = time.monotonic()
            dead = [rank for rank, process in self._processes.items() if not _exists(process)]
            if now < beat_due and not dead:
                continue
            beat_due = now + self.period_s
            place = where_in(sys._current_frames(), self._main)
            if place != still_at:
                still_since, still_at, warned = now, place, False
            try:
                self._write_heartbeat(place)
                fault = self._fault(dead)
                self._learn_processes()
                self._answered = time.monotonic()
                is_still = now - still_since > WARN_SHARE * self.timeout_s
                if is_still and not warned:
                    self._warn(place, now - still_since)
                    warned = True
                late_s = self._steps.late_s()
                if late_s and late_step != self._steps.count:
                    late_step = self._steps.count
                    hang = self._report_late_step(place, late_s)
                    if self._end_on_hang and not fault:
                        fault = self._first_fault(hang)
            except dist.DistError as error:
                fault = f"the store is gone, and so is the rank that holds it: {error}"
            if fault:
                self._on_fault(fault)
                self._end(fault, place)
                return

    def _guard(self) -> None:
        """Thread: end the process if the store does not answer within the timeout."""
        while not self._left.wait(self.period_s):
            silent_s = time.monotonic() - self._answered
            if silent_s > self.timeout_s:
                self._exit(
                    f"the store has not answered for {silent_s:.0f} s: the process that holds "
                    "it, rank 0 or the launcher on its host, hangs or cannot be reached",
                    where_in(sys._current_frames(), self._main),
                )

    def _learn_processes(self) -> None:
        """Read missing process ids of this host's ranks from their heartbeats."""
        for rank, process in self._processes.items():
            if not process and (beat := self._heartbeat_of(rank)):
                self._processes[rank] = json.loads(beat)["process"]

    def _fault(self, dead: Sequence[int]) -> str:
        """Return the stored fault, or a new one if a rank has died or is silent; empty: none.

        Each rank watches its successor, so that every rank is watched at constant cost.

        Args:
            dead: ranks of this host whose processes have ended.
        """
        if fault := self._stored_fault():
            return fault
        for rank in dead:
            place = json.loads(self._heartbeat_of(rank))["place"]
            if place not in GONE:
                return self._first_fault(
                    f"rank {rank} is gone: its process was ended, last {place}"
                )
            del self._processes[rank]
        beat = self._heartbeat_of((self.rank + 1) % self.world_size)
        if beat != self._neighbour:
            self._neighbour, self._neighbour_since = beat, time.monotonic()
        silent_s = time.monotonic() - self._neighbour_since
        place = json.loads(beat)["place"] if beat else "never heard of"
        if silent_s < self.timeout_s or place in GONE:
            return ""
        neighbour = (self.rank + 1) % self.world_size
        return self._first_fault(
            f"rank {neighbour} is gone: silent for {silent_s:.0f} s, last {place}"
        )

    def _stored_fault(self) -> str:
        assert self._store is not None
        if not self._store.check(["watch/fault"]):
            return ""
        return self._store.get("watch/fault").decode()

    def _first_fault(self, fault: str) -> str:
        """Store a fault unless one is stored already; return the stored fault."""
        assert self._store is not None
        return self._store.compare_set("watch/fault", "", fault).decode()

    def _end(self, fault: str, place: str) -> None:
        """End this process unless the main program ends within ``GRACE_S``."""
        if not self._ended.wait(GRACE_S):
            with suppress(dist.DistError):  # the store may be what is gone
                self._write_heartbeat("failed")
            self._exit(fault, place)

    def _exit(self, fault: str, place: str) -> None:
        log.error("rank %d ends (it was %s): %s", self.rank, place, fault)
        logging.shutdown()
        os._exit(EXIT_CODE)

    def _warn(self, place: str, still_s: float) -> None:
        log.warning(
            "rank %d has not moved for %.0f s: %s; %s",
            self.rank,
            still_s,
            place,
            _listed(self.places()),
        )

    def _report_late_step(self, place: str, late_s: float) -> str:
        """Log which ranks hold up a step, write the flight recorder, return what was logged."""
        places = dict(sorted({**self.places(), self.rank: place}.items()))
        # Ranks in a collective wait for the ranks that are not in one.
        blamed = {
            rank: place
            for rank, place in places.items()
            if not place.startswith(("in ", WAITING)) and place not in GONE
        }
        others = {r: p for r, p in places.items() if r not in blamed}
        first = f"rank {min(blamed)} holds up" if blamed else "every rank is in a collective in"
        text = (
            f"{first} step {self._steps.count + 1}, which takes {late_s:.0f} s; the longest "
            f"before took {self._steps.longest_s:.1f} s. "
            f"{_listed(blamed)}"
            f"{'; the others: ' if blamed and others else ''}{_listed(others)}"
        )
        log.warning("%s", text)
        if file := launcher.dump_flight_recorder(self.rank):
            log.warning("rank %d wrote its last collectives to %s", self.rank, file)
        return text

    def _describe(self, error: Exception, traceback: TracebackType | None) -> str:
        frames = []
        while traceback is not None:
            frames.append((traceback.tb_frame, traceback.tb_lineno))
            traceback = traceback.tb_next
        place = _place(list(reversed(frames)))
        # A failure in communication may only be the first sign that another rank is gone.
        is_first = place.startswith("in ") and not self._stored_fault()
        wait_s = 2 * self.period_s if is_first else 0.0
        others = _listed(self.places(wait_s))
        what = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(".")
        return f"rank {self.rank} failed {place}: {what}. The others: {others}"

    def _write_heartbeat(self, place: str) -> None:
        assert self._store is not None
        self._count += 1
        beat = {"count": self._count, "place": place, "process": os.getpid()}
        self._store.set(f"watch/beat/{self.rank}", json.dumps(beat))

    def _heartbeat_of(self, rank: int) -> str:
        assert self._store is not None
        key = f"watch/beat/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""


def _exists(process: int) -> bool:
    """Whether a process is alive: true for 0 (id not known yet), false for a zombie."""
    try:
        # The name in parentheses may have blanks and parentheses; the state follows it.
        text = Path(f"/proc/{process or 'self'}/stat").read_text()
    except OSError:
        return not Path("/proc/self/stat").exists()  # unknown without Linux's /proc
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")


class _StepTimes:
    """Times of a program's steps; the program writes them, the watch's thread reads them."""

    def __init__(self) -> None:
        self.count, self.longest_s = 0, 0.0
        self._began_s: float | None = None

    def start(self) -> None:
        self._began_s = time.monotonic()

    def stop(self) -> None:
        self._began_s = None

    def end(self) -> None:
        now_s = time.monotonic()
        # The first steps load kernels and files: their times do not count.
        if self._began_s is not None and self.count >= LEARNED_STEPS:
            self.longest_s = max(self.longest_s, now_s - self._began_s)
        self.count += 1
        self._began_s = now_s

    def late_s(self) -> float:
        """Return the time of the current step so far if it is late, else 0."""
        began_s = self._began_s
        if began_s is None or not self.longest_s:
            return 0.0
        took_s = time.monotonic() - began_s
        return took_s if took_s > STEP_FACTOR * self.longest_s + STEP_SLACK_S else 0.0


def where_in(frames: Mapping[int, FrameType], main: int) -> str:
    """Describe the position of a process: a collective, or the line of the main thread.

    Args:
        frames: innermost frame of every thread. All threads count, since backward on a GPU runs
            in a thread of autograd.
        main: the main thread.
    """
    stacks = {thread: _stack(frame) for thread, frame in frames.items()}
    if any(frame.f_code is Watch.__exit__.__code__ for frame, _ in stacks[main]):
        return "ending too"
    order = sorted(stacks, key=lambda thread: thread != main)
    for thread in order:
        if any(_communicates(frame) for frame, _ in stacks[thread]):
            return _place(stacks[thread])
    return _place(stacks[main])


def is_waiting(frames: Mapping[int, FrameType], main: int) -> bool:
    """Whether a process is within communication; cheaper than ``where_in``.

    Args:
        frames: innermost frame of every thread.
        main: the thread to check.
    """
    frame: FrameType | None = frames.get(main)
    while frame is not None:
        if _waits_in(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


@cache
def _waits_in(filename: str) -> bool:
    path = Path(filename)
    if "mcore_parallel" in path.parts:
        return path.name in COMMUNICATION
    return "torch/distributed" in filename


def call_site(skip: int = 1) -> str:
    """Return the innermost line outside ``COMMUNICATION``: the line that communicates.

    If that line is in this package, the line that called the package is appended.
    """
    return _site(_stack(sys._getframe(skip)))


def _stack(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    stack = []
    while frame is not None:
        stack.append((frame, frame.f_lineno))
        frame = frame.f_back
    return stack


def _place(stack: list[tuple[FrameType, int]]) -> str:
    """Describe the position of a stack, given innermost frame first."""
    inside = [i for i, (frame, _) in enumerate(stack) if _communicates(frame)]
    if not inside:
        known_frames = [entry for entry in stack if not _is_foreign(entry[0])]
        # In torch's Event.synchronize and similar: the collective that hangs is on the device.
        is_on_device = stack and "torch/cuda/" in stack[0][0].f_code.co_filename
        where = f"{WAITING} at" if is_on_device else "at"
        return f"{where} {_line(*(known_frames or stack)[0])}" if stack else "nowhere"
    # Name the collective, not the ``wait`` that it calls, unless ``wait`` was called directly.
    named = [
        i
        for i in inside
        if _axis_of(stack[i][0]) is not None and stack[i][0].f_code.co_name != "wait"
    ]
    frame = stack[(named or inside)[0]][0]
    outside = _outside(stack[inside[0] :])
    # A frame in ``wait`` may have no axis; its caller usually has one.
    axis = _axis_of(frame) or (_axis_of(outside[0][0]) if outside else None)
    over = f" over {axis.name} (ranks {_numbers(axis.ranks)})" if axis is not None else ""
    site = f" at {_site(outside)}" if outside else ""
    return f"in {frame.f_code.co_name}{over}{site}"


def _outside(stack: list[tuple[FrameType, int]]) -> list[tuple[FrameType, int]]:
    return [e for e in stack if not _communicates(e[0]) and not _is_foreign(e[0])]


def _site(stack: list[tuple[FrameType, int]]) -> str:
    """Return the first line outside communication, and the line that called this package."""
    lines = _outside(stack) or stack[-1:]
    callers = [e for e in lines if not _is_own(e[0])]
    called_by = f", for {_line(*callers[0])}" if callers and callers[0] is not lines[0] else ""
    return f"{_line(*lines[0])}{called_by}"


def _axis_of(frame: FrameType) -> Any:
    """Return the local ``axis`` of a frame, or ``self.axis``; None: neither exists."""
    names = frame.f_locals
    axis = names.get("axis", getattr(names.get("self"), "axis", None))
    return axis if len(getattr(axis, "ranks", ())) > 1 else None


def _communicates(frame: FrameType) -> bool:
    if _is_own(frame):
        return Path(frame.f_code.co_filename).name in COMMUNICATION
    return "torch/distributed" in frame.f_code.co_filename


def _is_own(frame: FrameType) -> bool:
    return "mcore_parallel" in Path(frame.f_code.co_filename).parts


def _is_foreign(frame: FrameType) -> bool:
    """Whether a frame belongs to torch, Python's library, or the shape checks of the tests."""
    path = frame.f_code.co_filename
    is_wrapper = path.startswith("<") or path.endswith("tests/shape_checks.py")
    is_library = path.startswith(_LIBRARY) and "-packages/" not in path
    return is_wrapper or is_library or any(f"/{name}/" in path for name in FOREIGN)


def _line(frame: FrameType, number: int) -> str:
    path = Path(frame.f_code.co_filename)
    depth = path.parts.index("mcore_parallel") if _is_own(frame) else -2
    place = "/".join(path.parts[depth:])
    return f"{place}:{number} ({frame.f_code.co_name})"


def _numbers(ranks: tuple[int, ...], most: int = 8) -> str:
    shown = ", ".join(map(str, ranks[:most]))
    return shown if len(ranks) <= most else f"{shown}, ... {ranks[-1]}"


def _listed(places: Mapping[int, str], most: int = 8) -> str:
    """Format ranks grouped by position, small groups (the outliers) first."""
    by_place: dict[str, list[int]] = {}
    for rank, place in places.items():
        by_place.setdefault(place, []).append(rank)
    groups = sorted(by_place.items(), key=lambda item: len(item[1]))
    words = [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {_numbers(tuple(ranks))} {place}"
        for place, ranks in groups[:most]
    ]
    return "; ".join(words) + (f"; {len(groups) - most} more" if len(groups) > most else "")
