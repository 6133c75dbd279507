"""Runs a job and sends its answer, whole or as server-sent events.

A client that leaves, is silent for too long or does not read ends its job: the engine's
requests are cancelled and their pages come back.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from starlette.types import Receive, Scope, Send

from mcore_infer.server.answer import AnswerPiece
from mcore_infer.server.front import Front, RunningGroup
from mcore_infer.server.job import Job
from mcore_infer.server.metrics import Metrics
from mcore_infer.server.schemas import RequestError
from mcore_infer.server.worker import EngineFailure, Event, RefusedGroup
from mcore_infer.writing import NewToken

_UNFINISHED = (
    "the text cannot keep to its structure: no token of the vocabulary goes on with it, or the "
    "next one takes too long."
)
_ANY = TypeAdapter(Any, config=ConfigDict(ser_json_inf_nan="constants"))
_JSON = {"content-type": "application/json"}
_EVENTS = {"content-type": "text/event-stream", "cache-control": "no-store"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a server waits, in seconds."""

    answer_s: float = 600.0
    """For a whole answer, from its request to its end."""

    client_s: float = 30.0
    """For a client to send its body, and to read an event."""


class JobResponse:
    """An ASGI response: one job from its queue to its last byte.

    Attributes:
        status: sent; 499 where the client left before.
    """

    def __init__(self, job: Job, front: Front, metrics: Metrics, patience: Patience) -> None:
        """Queue the job, whose structures are prepared.

        Raises:
            RequestError: if it cannot be queued.
        """
        self.job, self.metrics, self.patience = job, metrics, patience
        self.running = front.open(job.requests)
        self.status = 499
        self._begin = self._last = time.monotonic()
        self._is_first = True

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, unless the client leaves first."""
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
            async with asyncio.timeout(self.patience.answer_s):
                await (self._send_events(send) if self.job.is_stream else self._send_all(send))
        except TimeoutError:
            message = f"the answer took more than {self.patience.answer_s:g} seconds."
            await self._refuse(send, RequestError(504, message))
        except RequestError as error:
            await self._refuse(send, error)

    async def _send_all(self, send: Send) -> None:
        pieces: list[list[AnswerPiece]] = [[] for _ in self.job.answers]
        async for index, piece in run_job(self.job, self.running):
            pieces[index].append(piece)
            self._count(bool(piece.text))
        # Scores of a long text are many: other clients are served while these are written.
        body = await asyncio.to_thread(lambda: as_json(self.job.reply.whole(pieces)))
        await self._start(send, 200, _JSON | {"content-length": str(len(body))})
        await send({"type": "http.response.body", "body": body})

    async def _send_events(self, send: Send) -> None:
        reply = self.job.reply
        async for index, piece in run_job(self.job, self.running):
            if self.status == 499:  # what cannot run was refused by now
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
            async with asyncio.timeout(self.patience.client_s):
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
        else:  # the stream has begun: its last event says why it ends
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


async def run_job(job: Job, running: RunningGroup) -> AsyncIterator[tuple[int, AnswerPiece]]:
    """Follow the engine; yield each text's new pieces, and a last one with its end.

    What waits for a slow reader is joined to one piece a text.

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


def _take(job: Job, running: RunningGroup, event: Event) -> AnswerPiece | None:
    if isinstance(event.what, RefusedGroup):
        running.num_left = 0
        raise RequestError(400, event.what.message)
    if isinstance(event.what, EngineFailure):
        raise RequestError(503, event.what.message)
    answer = job.answers[event.index]
    if isinstance(event.what, NewToken):
        if answer.finish_reason:
            return None  # was on its way when a stop string ended the text
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
    """Return an error in the form that OpenAI's clients read."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    fields = {"message": error.message, "type": kind, "param": error.field or None}
    return {"error": {**fields, "code": error.code or error.status}}


def as_json(value: Any) -> bytes:
    """Return JSON on one line; infinities, which it has no word for, as its largest numbers."""
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
