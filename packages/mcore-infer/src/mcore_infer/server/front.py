"""The server's side of the engine's thread: groups of requests as asynchronous streams."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from mcore_infer.grammars import Structure
from mcore_infer.server.schemas import RequestError
from mcore_infer.server.worker import EngineFailure, EngineWorker, Event, TextRequest


class Front:
    """Hands groups to a worker and its events to those who wait for them; one event loop.

    Attributes:
        worker: runs the engine.
        on_failure: called when the engine fails.
        max_queued: most requests that run and wait.
        num_open: requests of groups that are not closed.
    """

    def __init__(self, worker: EngineWorker, max_queued: int) -> None:
        """Prepare; ``start`` starts the engine's thread."""
        self.worker, self.max_queued = worker, max_queued
        self.on_failure: Callable[[], None] = lambda: None
        self.num_open = 0
        self._running: dict[int, RunningGroup] = {}

    def start(self) -> None:
        """Start the engine's thread; events come to the running loop."""
        loop = asyncio.get_running_loop()

        def deliver(events: list[Event]) -> None:
            loop.call_soon_threadsafe(self._deliver, events)

        self.worker.start(deliver)

    async def prepare(self, structures: Iterable[Structure]) -> None:
        """Compile what texts are held to, beside the engine's steps.

        Raises:
            RequestError: with status 400, if no text can be held to one.
        """
        for structure in structures:
            try:
                await self.worker.prepare(structure)
            except ValueError as error:
                raise RequestError(400, str(error), "response_format") from None

    def open(self, requests: Sequence[TextRequest]) -> "RunningGroup":
        """Queue a group; its owner closes what is returned."""
        if self.worker.failure is not None:
            raise RequestError(503, EngineFailure().message)
        if self.num_open + len(requests) > self.max_queued:
            raise RequestError(503, "the server is full: try again later.")
        running = RunningGroup(self, self.worker.submit(requests), len(requests))
        self._running[running.number] = running
        self.num_open += len(requests)
        return running

    def close(self, running: "RunningGroup") -> None:
        """Forget a group; what still runs of it is cancelled."""
        if self._running.pop(running.number, None):
            self.num_open -= running.size
            if running.num_left:
                self.worker.cancel(running.number)

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            if event.group < 0:  # of all
                self.on_failure()
                for running in self._running.values():
                    running.events.put_nowait(event)
            elif event.group in self._running:
                self._running[event.group].events.put_nowait(event)


class RunningGroup:
    """A group that the engine runs.

    Attributes:
        number: of the worker.
        size: requests of the group.
        num_left: those that are not over.
        events: what was delivered and not taken.
    """

    def __init__(self, front: Front, number: int, size: int) -> None:
        self.front, self.number, self.size, self.num_left = front, number, size, size
        self.events: asyncio.Queue[Event] = asyncio.Queue()

    async def next(self) -> list[Event]:
        """Wait for events; return all that are there, which are many for a slow reader."""
        found = [await self.events.get()]
        while not self.events.empty():
            found.append(self.events.get_nowait())
        return found

    def end(self, index: int, *, cancel: bool = False) -> None:
        """Count one request as over; with ``cancel`` the engine is to leave it."""
        self.num_left -= 1
        if cancel:
            self.front.worker.cancel(self.number, index)

    def close(self) -> None:
        """Cancel what is not over; may be called again."""
        self.front.close(self)
