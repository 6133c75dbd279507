"""Ends all ranks of a job if one raises, dies or hangs, and reports which rank failed where.

torch's collectives only time out. Every few seconds a thread of each rank writes the rank's
position in the code to a store, and checks whether another rank has failed. The thread reads
the interpreter's stacks, so training has no overhead. A failing rank writes the fault to the
store: the exception, the axis, the call site, and the positions of all other ranks; the threads
of the other ranks then end their processes. A second thread watches the store itself, for which
torch would wait forever.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

log = logging.getLogger(__name__)

EXIT_CODE = 1
GRACE_S = 2.0
"""Time for a rank to end normally after another rank's fault; it may have failed too."""
ENDING_S = 15.0
"""Time for a failed rank to end."""
WARN_SHARE = 0.9
"""Share of the timeout after which a rank without progress logs all ranks' positions."""
COMMUNICATION = ("collectives.py", "p2p.py", "param_gather.py", "call_checks.py")
"""Files of this package that communicate; their callers are the call sites."""
GONE = ("left", "failed")
"""Final positions of a rank that has left the watch."""
FOREIGN = ("torch", "jaxtyping", "beartype")
"""Packages whose frames are skipped between a call site and the communication."""


class Watch:
    """Context manager that watches one world while a program runs in it.

    All ranks must enter it together. In a world of one rank it does nothing.
    """

    def __init__(
        self,
        store: dist.Store | None,
        rank: int,
        world_size: int,
        timeout_s: float,
        on_fault: Callable[[str], None] = lambda _fault: None,
    ) -> None:
        """Set up; nothing is written to the store before ``__enter__``.

        Args:
            store: store that all ranks share; None: nothing to watch.
            rank: this rank.
            world_size: number of ranks.
            timeout_s: timeout of the collectives; a rank silent for longer counts as dead.
            on_fault: called in the watch's thread with the fault of another rank, ``GRACE_S``
                before the process is ended.
        """
        self._store, self._on_fault = store, on_fault
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.period_s = min(5.0, timeout_s / 10)
        self._count = 0
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
    ) -> "Watch":
        """Watch over the world that this process has joined, if it has more than one rank."""
        if world_size == 1:
            return cls(None, rank, world_size, 60 * timeout_minutes)
        # A separate connection, so that the thread never waits for a call of the main thread.
        store: Any = distributed_c10d._get_default_store()  # torch's stub lacks clone
        return cls(store.clone(), rank, world_size, 60 * timeout_minutes, on_fault)

    def __enter__(self) -> "Watch":
        if self._store is not None:
            self._tell("starting")
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

        Only the first fault of a world is reported; later ones are its consequences. After a
        fault the process has ``ENDING_S`` to end, since leaving a world of dead ranks may hang.
        """
        if self._store is None:
            return
        failed = isinstance(error, Exception)
        try:
            if failed:
                fault = self._first_fault(self._describe(error, traceback))
                error.add_note(fault)
                log.error("rank %d ends: %s", self.rank, fault)
            self._stop()
            self._tell("failed" if failed else "left")
            if failed and self.rank == 0:
                self._outlast_readers()
        except dist.DistError as lost:
            log.error("rank %d cannot reach the store any more: %s", self.rank, lost)
        self._left.set()
        if failed:
            last_resort = threading.Timer(ENDING_S, os._exit, (EXIT_CODE,))
            last_resort.daemon = True
            last_resort.start()

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
        while not self._ended.wait(self.period_s):
            place = where_in(sys._current_frames(), self._main)
            now = time.monotonic()
            if place != still_at:
                still_since, still_at, warned = now, place, False
            try:
                self._tell(place)
                fault = self._fault()
                self._answered = time.monotonic()
                is_still = now - still_since > WARN_SHARE * self.timeout_s
                if is_still and not warned:
                    self._warn(place, now - still_since)
                    warned = True
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
                    "it, rank 0 or the launcher on its host, stands still or is out of reach",
                    where_in(sys._current_frames(), self._main),
                )

    def _fault(self) -> str:
        """Return the stored fault, or a new one if the next rank is silent; empty: none.

        Each rank watches its successor, so that every rank is watched at constant cost.
        """
        if fault := self._stored_fault():
            return fault
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
                self._tell("failed")
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

    def _describe(self, error: Exception, traceback: TracebackType | None) -> str:
        frames = []
        while traceback is not None:
            frames.append((traceback.tb_frame, traceback.tb_lineno))
            traceback = traceback.tb_next
        place = _place(list(reversed(frames)))
        # A failure in communication may only be the first sign that another rank is gone.
        wait_s = 2 * self.period_s if place.startswith("in ") else 0.0
        others = _listed(self.places(wait_s))
        what = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(".")
        return f"rank {self.rank} failed {place}: {what}. The others: {others}"

    def _tell(self, place: str) -> None:
        assert self._store is not None
        self._count += 1
        beat = {"count": self._count, "place": place}
        self._store.set(f"watch/beat/{self.rank}", json.dumps(beat))

    def _heartbeat_of(self, rank: int) -> str:
        assert self._store is not None
        key = f"watch/beat/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""


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
        own = [entry for entry in stack if not _is_foreign(entry[0])]
        return f"at {_line(*(own or stack)[0])}" if stack else "nowhere"
    named = [i for i in inside if _axis_of(stack[i][0]) is not None]
    frame = stack[(named or inside)[0]][0]
    outside = _outside(stack[inside[0] :])
    # A frame in ``wait`` has no axis; its caller usually has one.
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
    return axis if hasattr(axis, "ranks") else None


def _communicates(frame: FrameType) -> bool:
    if _is_own(frame):
        return Path(frame.f_code.co_filename).name in COMMUNICATION
    return "torch/distributed" in frame.f_code.co_filename


def _is_own(frame: FrameType) -> bool:
    return "mcore_parallel" in Path(frame.f_code.co_filename).parts


def _is_foreign(frame: FrameType) -> bool:
    """Whether a frame belongs to torch, or to the shape checks of the tests."""
    path = frame.f_code.co_filename
    is_wrapper = path.startswith("<") or path.endswith("tests/shape_checks.py")
    return is_wrapper or any(f"/{name}/" in path for name in FOREIGN)


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
