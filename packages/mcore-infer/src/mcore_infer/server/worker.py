"""The thread that runs an engine on rank 0, and the loop of the ranks that follow rank 0.

Requests arrive in groups; all requests of a group are queued, or the group is refused. Before
every step rank 0 sends new and cancelled groups to all ranks, so that all ranks have the same
requests in the same order. The events of a step are delivered in one call. Groups are dealt to
replicas in turn, and all replicas step together; after a step, rank 0 gathers the events on the
host. If a rank fails, the others wait in a collective until ``Watch`` ends them; rank 0 answers
its clients first.
``EngineClient`` connects the thread to the event loop of the server.
"""

import asyncio
import logging
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from threading import Thread
from typing import Any

import torch
from pydantic import TypeAdapter

from mcore_ckpt.save_load.rank_agreement import gather_json
from mcore_infer.engine.engine import Engine
from mcore_infer.errors import EngineError
from mcore_infer.server.schemas import RequestError
from mcore_infer.writing.grammars import Structure
from mcore_infer.writing.sequence import Beam, Generation, NewToken, TextRequest
from mcore_parallel.collectives import all_reduce
from mcore_parallel.mesh import SINGLE, Axis

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""Seconds between steps of an idle rank 0, so that no rank reaches a collective's timeout."""


@dataclass(frozen=True, slots=True)
class RefusedGroup:
    """Event: the engine refused a request of a group, and queued none of the group."""

    message: str


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """Event of all groups: the engine failed. The cause is logged, not sent to clients."""

    message: str = "the engine failed: this server ends."


@dataclass(frozen=True, slots=True)
class Event:
    """A token or result of one request, or the failure of its group."""

    group: int
    index: int
    """Index of the request in its group."""
    what: NewToken | Generation | RefusedGroup | EngineFailure


@dataclass(slots=True)
class Commands:
    """Commands that rank 0 sends to all ranks before a step."""

    new: list[tuple[int, list[TextRequest]]] = field(default_factory=list)
    """New groups, with their numbers."""
    cancelled: list[tuple[int, int]] = field(default_factory=list)
    """Group, and index of the request in the group; -1: all requests of the group."""
    structures: list[Structure] = field(default_factory=list)
    """Structures to compile for later groups."""
    is_last: bool = False
    """Whether all ranks stop instead of computing a step."""


_COMMANDS = TypeAdapter(Commands)


class Requests:
    """Groups of requests on an engine; all ranks of ``axis`` make the same calls.

    Attributes:
        engine: engine of this rank's replica.
        axis: all ranks of all replicas.
        replicas: ranks of the axis with the same part of the model; they share groups.
        has_work: whether any replica has unfinished requests.
        counts: requests, pages and proposals of all replicas after the last step, by name.
    """

    def __init__(self, engine: Engine, axis: Axis, replicas: Axis = SINGLE) -> None:
        self.engine, self.axis, self.replicas = engine, axis, replicas
        self.has_work, self.counts = False, _counts(engine)
        self._group_of: dict[int, tuple[int, int]] = {}  # engine's number -> group, index
        self._groups: dict[int, dict[int, int]] = {}  # group -> index -> engine's number

    @property
    def groups(self) -> list[int]:
        """Numbers of unfinished groups."""
        return list(self._groups)

    def step(self, commands: Commands) -> list[Event]:
        """Apply commands, compute one step, return the events of all replicas.

        Communicates as ``Engine.step``; several replicas all-gather their events over ``axis``
        on the host.
        """
        if self.engine.grammars is not None:
            for structure in commands.structures:
                self.engine.grammars.prepare(structure, is_tried=False)
        size, rank = self.replicas.size, self.replicas.rank
        # Replica r runs the groups whose number is r modulo the number of replicas.
        local_groups = [new for new in commands.new if new[0] % size == rank]
        events = [event for number, group in local_groups for event in self._add(number, group)]
        for group, index in commands.cancelled:
            self._cancel(group, index)
        for event in self.engine.step():
            number, what = (event.row, event) if isinstance(event, NewToken) else event
            group, index = self._group_of[number]
            events.append(Event(group, index, what))
            if isinstance(what, Generation):
                self._forget(number)
        self.has_work, self.counts = self.engine.has_work, _counts(self.engine)
        if self.replicas.size == 1:
            return events
        replica_part = None
        if self.replicas.ranks[0] == self.axis.ranks[0]:  # one rank of each replica
            sent = [(type(event.what).__name__, asdict(event)) for event in events]
            replica_part = self.has_work, self.counts, sent
        parts = [part for part in gather_json(replica_part, self.axis) if part]
        self.has_work = any(has_work for has_work, _, _ in parts)
        self.counts = {n: sum(counts[n] for _, counts, _ in parts) for n in self.counts}
        return [_event_from(*event) for _, _, events in parts for event in events]

    def _add(self, group: int, requests: Sequence[TextRequest]) -> Iterator[Event]:
        numbers: list[int] = []
        for request in requests:
            try:
                numbers.append(self.engine.submit(request))
            except ValueError as error:
                for number in numbers:
                    self.engine.abort(number)
                yield Event(group, 0, RefusedGroup(str(error)))
                return
        self._groups[group] = dict(enumerate(numbers))
        self._group_of |= {number: (group, i) for i, number in enumerate(numbers)}

    def _cancel(self, group: int, index: int) -> None:
        running = self._groups.get(group, {})
        for number in [n for i, n in running.items() if index in (-1, i)]:
            self.engine.abort(number)
            self._forget(number)

    def _forget(self, number: int) -> None:
        group, index = self._group_of.pop(number)
        del self._groups[group][index]
        if not self._groups[group]:
            del self._groups[group]


class EngineWorker:
    """Runs an engine in a thread on rank 0.

    Attributes:
        requests: groups of the engine; only the thread changes them.
        failure: error of an engine on any rank, after which no step runs; None: no failure.
    """

    def __init__(self, engine: Engine, axis: Axis, replicas: Axis = SINGLE) -> None:
        """Store the arguments; ``start`` starts the thread.

        Args:
            engine: engine of rank 0.
            axis: rank 0 and all ranks that run ``follow``.
            replicas: ranks of the axis that share groups, see ``Requests``.
        """
        self.requests, self.axis = Requests(engine, axis, replicas), axis
        self.device = engine.device
        self.failure: EngineError | None = None
        self._inbox: queue.SimpleQueue[Callable[[Commands], Any]] = queue.SimpleQueue()
        self._num_groups = 0
        self._thread: Thread | None = None
        self._deliver: Callable[[list[Event]], None] = lambda _events: None

    def start(self, deliver: Callable[[list[Event]], None]) -> None:
        """Start the thread.

        Args:
            deliver: called in the thread with the events of a step.
        """
        self._deliver = deliver
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[TextRequest]) -> int:
        """Queue a group and return its number; called from one thread."""
        self._num_groups += 1
        number, group = self._num_groups, list(requests)
        self._inbox.put(lambda commands: commands.new.append((number, group)))
        return number

    async def prepare(self, structure: Structure) -> None:
        """Compile a structure while steps continue: on rank 0 with limits, then on all ranks.

        Raises:
            ValueError: if the structure is refused.
        """
        grammars = self.requests.engine.grammars
        if grammars is None:
            raise ValueError("structured output needs an engine with a tokenizer.")
        compiled = await asyncio.shield(asyncio.wrap_future(grammars.prepare(structure)))
        if self.axis.size > 1:
            self._inbox.put(lambda commands: commands.structures.append(structure))
            # The other ranks compile about as long. A rank that takes longer delays a step.
            await asyncio.sleep(2 * compiled.seconds)

    def cancel(self, group: int, index: int = -1) -> None:
        """Cancel one request of a group, or all; no effect on finished ones."""
        self._inbox.put(lambda commands: commands.cancelled.append((group, index)))

    def stop(self) -> None:
        """End the thread and the other ranks after the current step.

        After a failure, waits for no thread.
        """

        def end(commands: Commands) -> None:
            commands.is_last = True

        self._inbox.put(end)
        if self._thread and self.failure is None:
            self._thread.join()

    def fail(self, message: str) -> None:
        """Record a failure and send it to every group; later calls have no effect.

        May be called from any thread.
        """
        if self.failure is None:
            self.failure = EngineError(f"the engine failed: {message}")
            self._deliver([Event(-1, 0, EngineFailure())])

    def _run(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the current device is a setting of each thread
        try:
            while not (commands := share_commands(self._collect_commands(), self.axis)).is_last:
                events = self.requests.step(commands)
                if events:
                    self._deliver(events)
        except Exception as error:
            log.exception("the engine failed: all requests end with an error")
            self.fail(f"{type(error).__name__}: {error}")

    def _collect_commands(self) -> Commands:
        """Return the queued commands; if the engine is idle, wait for a command."""
        commands = Commands()
        timeout = HEARTBEAT_S if self.axis.size > 1 else None
        try:
            if not self.requests.has_work:
                self._inbox.get(timeout=timeout)(commands)
            while True:
                self._inbox.get_nowait()(commands)
        except queue.Empty:
            return commands


class EngineClient:
    """Queues groups of requests on a worker and delivers its events; used by one event loop.

    Attributes:
        worker: runs the engine.
        on_failure: called when the engine fails.
        max_queued: most running and waiting requests.
        num_open: requests of groups that are not closed.
    """

    def __init__(self, worker: EngineWorker, max_queued: int) -> None:
        """Store the arguments; ``start`` starts the engine's thread."""
        self.worker, self.max_queued = worker, max_queued
        self.on_failure: Callable[[], None] = lambda: None
        self.num_open = 0
        self._open_groups: dict[int, OpenGroup] = {}

    def start(self) -> None:
        """Start the engine's thread, whose events are delivered in the running loop."""
        loop = asyncio.get_running_loop()

        def deliver(events: list[Event]) -> None:
            loop.call_soon_threadsafe(self._deliver, events)

        self.worker.start(deliver)

    async def prepare(self, structures: Iterable[Structure]) -> None:
        """Compile structures while the engine continues its steps.

        Raises:
            RequestError: with status 400, if a structure is refused.
        """
        for structure in structures:
            try:
                await self.worker.prepare(structure)
            except ValueError as error:
                raise RequestError(400, str(error), "response_format") from None

    def open(self, requests: Sequence[TextRequest]) -> "OpenGroup":
        """Queue a group; the caller closes the returned object."""
        if self.worker.failure is not None:
            raise RequestError(503, EngineFailure().message)
        if self.num_open + len(requests) > self.max_queued:
            raise RequestError(503, "the server is full: try again later.")
        group = OpenGroup(self, self.worker.submit(requests), len(requests))
        self._open_groups[group.number] = group
        self.num_open += len(requests)
        return group

    def close(self, group: "OpenGroup") -> None:
        """Remove a group and cancel its unfinished requests."""
        if self._open_groups.pop(group.number, None):
            self.num_open -= group.size
            if group.num_left:
                self.worker.cancel(group.number)

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            if event.group < 0:  # a failure, which is an event of all groups
                self.on_failure()
                for group in self._open_groups.values():
                    group.events.put_nowait(event)
            elif event.group in self._open_groups:
                self._open_groups[event.group].events.put_nowait(event)


class OpenGroup:
    """A queued or running group of requests.

    Attributes:
        number: the worker's number of the group.
        size: requests of the group.
        num_left: unfinished requests.
        events: delivered events that have not been read.
    """

    def __init__(self, engine_client: EngineClient, number: int, size: int) -> None:
        self.engine_client, self.number, self.size, self.num_left = (
            engine_client,
            number,
            size,
            size,
        )
        self.events: asyncio.Queue[Event] = asyncio.Queue()

    async def next(self) -> list[Event]:
        """Wait for an event; return all events that have arrived."""
        events = [await self.events.get()]
        while not self.events.empty():
            events.append(self.events.get_nowait())
        return events

    def end(self, index: int, *, cancel: bool = False) -> None:
        """Count one request as finished; ``cancel`` also cancels the request on the engine."""
        self.num_left -= 1
        if cancel:
            self.engine_client.worker.cancel(self.number, index)

    def close(self) -> None:
        """Cancel unfinished requests; may be called twice."""
        self.engine_client.close(self)


def follow(engine: Engine, axis: Axis, replicas: Axis = SINGLE) -> None:
    """Run the same steps as rank 0 on another rank, until the worker of rank 0 stops.

    Raises:
        EngineError: if the engine of this rank fails.
    """
    requests = Requests(engine, axis, replicas)
    try:
        while not (commands := share_commands(Commands(), axis)).is_last:
            requests.step(commands)
    except Exception as error:
        log.exception("the engine failed")
        raise EngineError(f"the engine failed: {type(error).__name__}: {error}") from error


def share_commands(commands: Commands, axis: Axis) -> Commands:
    """Return rank 0's commands on every rank.

    All-reduces the length of the commands' JSON, then its bytes, on the host: kernels on the
    device run on. Ranks other than 0 contribute zeros.
    """
    if axis.size == 1:
        return commands
    text = b""
    if axis.rank == 0 and commands != Commands():
        text = _COMMANDS.dump_json(commands)
    length = int(all_reduce(torch.tensor(len(text)), axis).item())
    if not length:
        return commands
    written = torch.zeros(length, dtype=torch.uint8)
    if text:
        written = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return _COMMANDS.validate_json(bytes(all_reduce(written, axis).tolist()))


def _counts(engine: Engine) -> dict[str, int]:
    scheduler, speculation = engine.scheduler, engine.speculation
    return {
        "requests_running": scheduler.num_running,
        "requests_waiting": scheduler.num_waiting,
        "pages_free": scheduler.pool.num_free,
        "pages": scheduler.pool.num_pages,
        "speculative_steps": speculation.steps,
        "speculative_drafted": speculation.drafted,
        "speculative_accepted": speculation.accepted,
    }


def _event_from(kind: str, fields: dict[str, Any]) -> Event:
    kinds = {kind.__name__: kind for kind in (NewToken, Generation, RefusedGroup)}
    what = {name: _frozen(value) for name, value in fields["what"].items()}
    if beams := what.get("beams"):
        what["beams"] = tuple(Beam(**beam) for beam in beams)
    return Event(fields["group"], fields["index"], kinds[kind](**what))


def _frozen(value: Any) -> Any:
    """Replace JSON's lists by tuples, at every depth."""
    if isinstance(value, dict):
        return {name: _frozen(item) for name, item in value.items()}
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
