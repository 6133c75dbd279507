"""Runs a request on the engine and sends its answer, complete or as server-sent events.

``EngineResponse`` is the ASGI response. When a client disconnects, times out or stops reading,
its requests are cancelled and their pages released.
"""

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from starlette.types import Receive, Scope, Send

from mcore_infer.server.replies import Reply
from mcore_infer.server.schemas import RequestError
from mcore_infer.server.worker import (
    EngineClient,
    EngineFailure,
    Event,
    OpenGroup,
    RefusedGroup,
)
from mcore_infer.writing.sequence import NewToken
from mcore_infer.writing.token_text import AnswerPiece

_UNFINISHED = (
    "the text cannot satisfy its structure: no token of the vocabulary continues it, or the "
    "next token takes too long."
)
_ANY = TypeAdapter(Any, config=ConfigDict(ser_json_inf_nan="constants"))
_JSON = {"content-type": "application/json"}
_EVENTS = {"content-type": "text/event-stream", "cache-control": "no-store"}
_MAX_DEPTH, _NUM_ITEMS = 4, 64
"""Depth to which an answer is serialized item by item, and the number of items that one part
has below that depth."""
_WORK_S, _REST = 0.001, 2.0
"""Processor seconds after which a thread that serializes an answer sleeps, and how long it
sleeps, as a multiple of that work. The thread shares the interpreter lock with the engine's
thread: without pauses, a step would wait for a switch interval at each kernel launch."""
_BLOCK_BYTES = 1 << 16
"""Size of the blocks in which a complete answer is sent."""
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Timeouts of a server, in seconds."""

    answer_s: float = 600.0
    """Longest time from a request to the end of its answer."""

    client_s: float = 30.0
    """Longest time for a client to send its body, and to read an event."""


class Histogram:
    """Histogram of durations: a count for each upper bound in seconds, and their sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS_S) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self.total += seconds

    def lines(self, name: str) -> list[str]:
        """Return the histogram's samples in Prometheus' text format."""
        lines, total = [], 0
        for bound, count in zip([*_BOUNDS_S, "+Inf"], self.counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self.total:.6f}", f"{name}_count {total}"]


class Metrics:
    """Counters and histograms of a server; used by one event loop.

    Attributes:
        responses: number of responses by path and status.
        prompt_tokens: prompt tokens of all requests that ended.
        written_tokens: generated tokens of all texts.
        first_token: times from a request to its first tokens.
        between_tokens: times between tokens of a text.
        cancelled: requests whose client disconnected.
    """

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()
        self.prompt_tokens = self.written_tokens = self.cancelled = 0
        self.first_token, self.between_tokens = Histogram(), Histogram()

    def text(self, gauges: Mapping[str, tuple[str, float | int]]) -> str:
        """Return all metrics in Prometheus' text format.

        Args:
            gauges: help text and current value, by name.
        """
        lines = _metric_head("responses_total", "Responses by path and status.", "counter")
        for (path, status), count in sorted(self.responses.items()):
            lines.append(f'mcore_responses_total{{path="{path}",status="{status}"}} {count}')
        for name, about, value in (
            ("prompt_tokens_total", "Tokens of prompts.", self.prompt_tokens),
            ("written_tokens_total", "Tokens of texts.", self.written_tokens),
            ("cancelled_total", "Requests whose client disconnected.", self.cancelled),
        ):
            lines += [*_metric_head(name, about, "counter"), f"mcore_{name} {value}"]
        for name, about, histogram in (
            ("first_token_seconds", "From a request to its first tokens.", self.first_token),
            ("between_tokens_seconds", "Between tokens of a text.", self.between_tokens),
        ):
            lines += [
                *_metric_head(name, about, "histogram"),
                *histogram.lines(f"mcore_{name}"),
            ]
        for name, (about, value) in gauges.items():
            lines += [*_metric_head(name, about, "gauge"), f"mcore_{name} {value}"]
        return "\n".join(lines) + "\n"


def _metric_head(name: str, about: str, kind: str) -> list[str]:
    return [f"# HELP mcore_{name} {about}", f"# TYPE mcore_{name} {kind}"]


class EngineResponse:
    """An ASGI response: one HTTP request from the engine's queue to its last byte.

    Attributes:
        status: HTTP status that was sent; 499 until then, and if the client disconnects
            first.
    """

    def __init__(
        self, reply: Reply, engine_client: EngineClient, metrics: Metrics, timeouts: Timeouts
    ) -> None:
        """Queue the requests of a reply; their structures must be compiled already.

        Raises:
            RequestError: if the engine failed, or the server is full.
        """
        self.reply, self.metrics, self.timeouts = reply, metrics, timeouts
        self.group = engine_client.open(reply.requests)
        self.status = 499
        self._begin = self._last = time.monotonic()
        self._is_first = True

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; cancel its requests if the client disconnects first."""
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(_until_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                self.metrics.cancelled += 1
        finally:
            self.group.close()
            self.metrics.prompt_tokens += sum(len(r.prompt) for r in self.reply.requests)
            self.metrics.written_tokens += self.reply.num_written
            for task in (sending, leaving):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await leaving
            with suppress(asyncio.CancelledError, OSError):  # the connection is gone
                await sending

    async def _send(self, send: Send) -> None:
        try:
            async with asyncio.timeout(self.timeouts.answer_s):
                if self.reply.is_stream:
                    await self._send_events(send)
                    return
                blocks = await self._complete()
            length = str(sum(map(len, blocks)))
            await self._start(send, 200, _JSON | {"content-length": length})
            for block in blocks:
                await self._send_body(send, block)
            await send({"type": "http.response.body"})
        except TimeoutError:
            message = f"the answer took more than {self.timeouts.answer_s:g} seconds."
            await self._refuse(send, RequestError(504, message))
        except RequestError as error:
            await self._refuse(send, error)

    async def _complete(self) -> list[bytes]:
        """Wait for all texts; return the answer, built in a thread, in blocks."""
        pieces: list[list[AnswerPiece]] = [[] for _ in self.reply.answers]
        async for index, piece in run_requests(self.reply, self.group):
            pieces[index].append(piece)
            self._count(bool(piece.text))
        return await asyncio.to_thread(self._blocks, pieces)

    def _blocks(self, pieces: Sequence[Sequence[AnswerPiece]]) -> list[bytes]:
        """Build the answer; rest between its parts while other requests are open."""
        blocks, block, begin = [], bytearray(), time.thread_time()
        for part in long_json(self.reply.complete(pieces)):
            block += part
            if len(block) >= _BLOCK_BYTES:
                blocks.append(bytes(block))
                block.clear()
            worked = time.thread_time() - begin
            if worked > _WORK_S and self.group.engine_client.num_open > self.group.size:
                time.sleep(_REST * worked)
                begin = time.thread_time()
        return [*blocks, bytes(block)]

    async def _send_events(self, send: Send) -> None:
        reply = self.reply
        async for index, piece in run_requests(self.reply, self.group):
            if self.status == 499:
                # The status is sent with the first event: the engine accepted the requests.
                await self._start(send, 200, _EVENTS)
                await self._send_lines(send, reply.first_events())
            self._count(True)
            event = reply.event(index, piece)
            await self._send_lines(send, [] if event is None else [event])
        await self._send_lines(send, reply.last_events())
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _send_lines(self, send: Send, events: Sequence[Any]) -> None:
        if events:
            lines = [b"data: " + b"".join(long_json(event)) + b"\n\n" for event in events]
            await self._send_body(send, b"".join(lines))

    async def _send_body(self, send: Send, body: bytes) -> None:
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
        plain = error.message if self.reply.has_plain_errors else openai_error(error)
        body = as_json(plain)
        if self.status == 499:
            length = {"content-length": str(len(body))}
            await self._start(send, error.status, _JSON | length)
        else:  # the status 200 is sent already: the last event of the stream holds the error
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


async def run_requests(
    reply: Reply, group: OpenGroup
) -> AsyncIterator[tuple[int, AnswerPiece]]:
    """Read the engine's events; yield the index of each text and its new piece.

    Pieces that a slow client has not read yet are joined to one piece for each text.

    Raises:
        RequestError: if the engine refuses a request, or fails.
    """
    while group.num_left:
        pieces: dict[int, list[AnswerPiece]] = {}
        for event in await group.next():
            piece = _take(reply, group, event)
            if piece:
                pieces.setdefault(event.index, []).append(piece)
        for index, text_pieces in pieces.items():
            joined = AnswerPiece(
                "".join(piece.text for piece in text_pieces),
                tuple(token for piece in text_pieces for token in piece.tokens),
            )
            if joined.text or joined.tokens or reply.answers[index].finish_reason:
                yield index, joined


def _take(reply: Reply, group: OpenGroup, event: Event) -> AnswerPiece | None:
    if isinstance(event.what, RefusedGroup):
        group.num_left = 0
        raise RequestError(400, event.what.message)
    if isinstance(event.what, EngineFailure):
        raise RequestError(503, event.what.message)
    answer = reply.answers[event.index]
    # The engine returns scores of the prompt with the result only: a text that a stop string
    # ended then runs on in the engine until its result arrives.
    needs_result = reply.requests[event.index].scores.prompt
    if isinstance(event.what, NewToken):
        if answer.finish_reason:
            return None  # a token from before the engine received the cancellation
        piece = answer.add(event.what)
        if answer.finish_reason and not needs_result:
            group.end(event.index, cancel=True)
        return piece
    if event.what.finish_reason == "error" and not answer.finish_reason:
        raise RequestError(500, _UNFINISHED)
    if answer.finish_reason:
        if needs_result:
            answer.result = event.what
            group.end(event.index)
        return None
    piece = answer.finish(event.what)
    answer.result = event.what
    group.end(event.index)
    return piece


def openai_error(error: RequestError) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    fields = {"message": error.message, "type": kind, "param": error.field or None}
    return {"error": {**fields, "code": error.code or error.status}}


def long_json(value: Any, depth: int = 0) -> Iterator[bytes]:
    """Yield ``as_json(value)`` in parts, each of which holds the interpreter lock briefly.

    Iterators are serialized as lists whose items are computed one at a time: a long answer
    never is in memory as objects, which Python's garbage collector would scan while all
    threads wait.
    """
    if isinstance(value, dict) and depth < _MAX_DEPTH:
        for i, (name, item) in enumerate(value.items()):
            yield (b"," if i else b"{") + as_json(name) + b":"
            yield from long_json(item, depth + 1)
        yield b"}" if value else b"{}"
    elif isinstance(value, (list, Iterator)):
        items, size, separator = iter(value), 1 if depth < 2 else _NUM_ITEMS, b""
        yield b"["
        while batch := list(islice(items, size)):
            if depth < _MAX_DEPTH and isinstance(batch[0], (dict, list, Iterator)):
                for item in batch:
                    yield separator
                    yield from long_json(item, depth + 1)
                    separator = b","
            else:
                yield separator
                yield as_json(batch)[1:-1]
            separator = b","
        yield b"]"
    else:
        yield as_json(value)


def as_json(value: Any) -> bytes:
    """Return JSON on one line; infinities become +-1e308 and NaN becomes null."""
    text = _ANY.dump_json(value)
    return _ANY.dump_json(_finite(value)) if b"Infinity" in text or b"NaN" in text else text


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return max(-1e308, min(1e308, value)) if value == value else None  # noqa: PLR0124
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
