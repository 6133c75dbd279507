"""Runs a job on the engine and sends its answer, whole or as server-sent events.

``EngineClient`` connects the event loop to the engine's thread; ``JobResponse`` is the ASGI
response. When a client disconnects, times out or stops reading, the job's requests are
cancelled and their pages released.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from starlette.types import Receive, Scope, Send

from mcore_infer.server.answer import AnswerPiece
from mcore_infer.server.job import Job
from mcore_infer.server.metrics import Metrics
from mcore_infer.server.schemas import RequestError
from mcore_infer.server.worker import (
    EngineFailure,
    EngineWorker,
    Event,
    RefusedGroup,
    TextRequest,
)
from mcore_infer.writing.grammars import Structure
from mcore_infer.writing.sequence import NewToken

_UNFINISHED = (
    "the text cannot keep to its structure: no token of the vocabulary continues it, or the "
    "next one takes too long."
)
_ANY = TypeAdapter(Any, config=ConfigDict(ser_json_inf_nan="constants"))
_JSON = {"content-type": "application/json"}
_EVENTS = {"content-type": "text/event-stream", "cache-control": "no-store"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Timeouts of a server, in seconds."""

    answer_s: float = 600.0
    """For a whole answer, from its request to its end."""

    client_s: float = 30.0
    """For a client to send its body, and to read an event."""


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
        self._running: dict[int, OpenGroup] = {}

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
        running = OpenGroup(self, self.worker.submit(requests), len(requests))
        self._running[running.number] = running
        self.num_open += len(requests)
        return running

    def close(self, running: "OpenGroup") -> None:
        """Remove a group and cancel its unfinished requests."""
        if self._running.pop(running.number, None):
            self.num_open -= running.size
            if running.num_left:
                self.worker.cancel(running.number)

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            if event.group < 0:  # for all groups
                self.on_failure()
                for running in self._running.values():
                    running.events.put_nowait(event)
            elif event.group in self._running:
                self._running[event.group].events.put_nowait(event)


class OpenGroup:
    """A queued or running group of requests.

    Attributes:
        number: of the worker.
        size: requests of the group.
        num_left: unfinished requests.
        events: delivered and not read yet.
    """

    def __init__(self, front: EngineClient, number: int, size: int) -> None:
        self.front, self.number, self.size, self.num_left = front, number, size, size
        self.events: asyncio.Queue[Event] = asyncio.Queue()

    async def next(self) -> list[Event]:
        """Wait for an event; return all events that have arrived, many for a slow reader."""
        found = [await self.events.get()]
        while not self.events.empty():
            found.append(self.events.get_nowait())
        return found

    def end(self, index: int, *, cancel: bool = False) -> None:
        """Count one request as finished; ``cancel`` also ends it in the engine."""
        self.num_left -= 1
        if cancel:
            self.front.worker.cancel(self.number, index)

    def close(self) -> None:
        """Cancel unfinished requests; may be called twice."""
        self.front.close(self)


class JobResponse:
    """An ASGI response: one job from its queue to its last byte.

    Attributes:
        status: HTTP status that was sent; 499 if the client left before.
    """

    def __init__(
        self, job: Job, front: EngineClient, metrics: Metrics, timeouts: Timeouts
    ) -> None:
        """Queue the job; its structures have been prepared.

        Raises:
            RequestError: if it cannot be queued.
        """
        self.job, self.metrics, self.timeouts = job, metrics, timeouts
        self.running = front.open(job.requests)
        self.status = 499
        self._begin = self._last = time.monotonic()
        self._is_first = True

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; cancel the job if the client disconnects first."""
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(_until_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                self.metrics.cancelled += 1
        finally:
            self.running.close()
            self.metrics.prompt_tokens += sum(len(r.prompt) for r in self.job.requests)
            self.metrics.written_tokens += self.job.num_written
            for task in (sending, leaving):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await leaving
            with suppress(asyncio.CancelledError, OSError):  # the connection is gone
                await sending

    async def _send(self, send: Send) -> None:
        try:
            async with asyncio.timeout(self.timeouts.answer_s):
                await (self._send_events(send) if self.job.is_stream else self._send_all(send))
        except TimeoutError:
            message = f"the answer took more than {self.timeouts.answer_s:g} seconds."
            await self._refuse(send, RequestError(504, message))
        except RequestError as error:
            await self._refuse(send, error)

    async def _send_all(self, send: Send) -> None:
        pieces: list[list[AnswerPiece]] = [[] for _ in self.job.answers]
        async for index, piece in run_job(self.job, self.running):
            pieces[index].append(piece)
            self._count(bool(piece.text))
        # Log probabilities of a long text are many: serialize them in a thread, so that the
        # event loop serves other clients meanwhile.
        body = await asyncio.to_thread(lambda: as_json(self.job.reply.whole(pieces)))
        await self._start(send, 200, _JSON | {"content-length": str(len(body))})
        await send({"type": "http.response.body", "body": body})

    async def _send_events(self, send: Send) -> None:
        reply = self.job.reply
        async for index, piece in run_job(self.job, self.running):
            if self.status == 499:  # with the first event: the engine has accepted the job
                await self._start(send, 200, _EVENTS)
                await self._send_lines(send, reply.begin())
            self._count(True)
            event = reply.event(index, piece)
            await self._send_lines(send, [] if event is None else [event])
        await self._send_lines(send, reply.end())
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _send_lines(self, send: Send, events: Sequence[Any]) -> None:
        if not events:
            return
        body = b"".join(b"data: " + as_json(event) + b"\n\n" for event in events)
        try:
            async with asyncio.timeout(self.timeouts.client_s):
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except TimeoutError:
            raise ConnectionError("the client does not read") from None

    async def _start(self, send: Send, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
            }
        )

    async def _refuse(self, send: Send, error: RequestError) -> None:
        plain = error.message if self.job.has_plain_errors else openai_error(error)
        body = as_json(plain)
        if self.status == 499:
            length = {"content-length": str(len(body))}
            await self._start(send, error.status, _JSON | length)
        else:  # the stream has begun: its last event holds the error
            body = b"data: " + body + b"\n\n"
        await send({"type": "http.response.body", "body": body})

    def _count(self, has_text: bool) -> None:
        now = time.monotonic()
        if self._is_first:
            self.metrics.first_token.add(now - self._begin)
            self._is_first = False
        elif has_text:
            self.metrics.between_tokens.add(now - self._last)
        self._last = now


async def run_job(job: Job, running: OpenGroup) -> AsyncIterator[tuple[int, AnswerPiece]]:
    """Read the engine's events; yield the index and the new piece of each text.

    Pieces that wait for a slow reader are joined to one for each text.

    Raises:
        RequestError: if the engine refuses the job, or fails.
    """
    while running.num_left:
        pieces: dict[int, list[AnswerPiece]] = {}
        for event in await running.next():
            piece = _take(job, running, event)
            if piece:
                pieces.setdefault(event.index, []).append(piece)
        for index, of_one in pieces.items():
            joined = AnswerPiece(
                "".join(piece.text for piece in of_one),
                tuple(token for piece in of_one for token in piece.tokens),
            )
            if joined.text or joined.tokens or job.answers[index].finish_reason:
                yield index, joined


def _take(job: Job, running: OpenGroup, event: Event) -> AnswerPiece | None:
    if isinstance(event.what, RefusedGroup):
        running.num_left = 0
        raise RequestError(400, event.what.message)
    if isinstance(event.what, EngineFailure):
        raise RequestError(503, event.what.message)
    answer = job.answers[event.index]
    if isinstance(event.what, NewToken):
        if answer.finish_reason:
            return None  # written before the engine received the cancellation
        piece = answer.add(event.what)
        if answer.finish_reason and not job.needs_result:
            running.end(event.index, cancel=True)
        return piece
    if event.what.finish_reason == "error" and not answer.finish_reason:
        raise RequestError(500, _UNFINISHED)
    if answer.finish_reason:
        if job.needs_result:
            answer.result = event.what
            running.end(event.index)
        return None
    piece = answer.finish(event.what)
    answer.result = event.what
    running.end(event.index)
    return piece


def openai_error(error: RequestError) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    fields = {"message": error.message, "type": kind, "param": error.field or None}
    return {"error": {**fields, "code": error.code or error.status}}


def as_json(value: Any) -> bytes:
    """Return JSON on one line; infinities become +-1e308 and NaN becomes null."""
    text = _ANY.dump_json(value)
    return _ANY.dump_json(_finite(value)) if b"Infinity" in text or b"NaN" in text else text


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return max(-1e308, min(1e308, value)) if value == value else None  # noqa: PLR0124
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
