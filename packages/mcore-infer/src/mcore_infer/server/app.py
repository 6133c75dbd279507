"""Routes of the server, access control, and error responses."""

import asyncio
import gc
import hmac
import logging
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mcore_infer.server.description import INTERFACES, Interface, openapi
from mcore_infer.server.replies import Reply, ServedModel, unknown_model
from mcore_infer.server.responses import (
    EngineResponse,
    Metrics,
    Timeouts,
    as_json,
    openai_error,
)
from mcore_infer.server.schemas import MAX_TEXTS, RequestError, read_body
from mcore_infer.server.worker import EngineClient

log = logging.getLogger(__name__)

OPEN_PATHS = ("/health", "/v1/health", "/", "/openapi.json")
"""Paths that need no API key."""
_FORM = "application/x-www-form-urlencoded"
_LONG_BYTES = 1 << 14
_SWITCH_S = 0.0005
"""Switch interval of Python's threads, in seconds. The engine's thread waits for the
interpreter lock after every kernel launch; with Python's default, each launch could wait 5 ms
for another thread."""
_GAUGES = {
    "requests_running": "Requests that hold pages.",
    "requests_waiting": "Requests without pages.",
    "pages_free": "Free pages of the cache.",
    "pages": "Pages of the cache.",
    "speculative_steps": "Verifications of proposed tokens.",
    "speculative_drafted": "Proposed tokens.",
    "speculative_accepted": "Accepted proposals.",
}
"""Gauges of ``/metrics``, summed over the engines of all replicas."""
_PATHS = (
    *OPEN_PATHS,
    *(path for interface in INTERFACES for path in interface.paths),
    *("/v1/models", "/metrics"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Access control and limits of a server."""

    api_key: str = ""
    """Required bearer token; empty: no token is needed."""
    max_body_bytes: int = 4 << 20
    origins: tuple[str, ...] = ()
    """Origins of web pages that may read answers in a browser (CORS); ``*``: all."""
    hosts: tuple[str, ...] = ()
    """Accepted names in the Host header; empty: all. Protects a loopback server against DNS
    rebinding by web pages."""
    timeouts: Timeouts = field(default_factory=Timeouts)


class Server:
    """Handles the requests of all routes with one model and one engine.

    Attributes:
        served: the model.
        engine_client: queues requests on the engine's thread.
        limits: access control and limits.
        metrics: counters of this server.
    """

    def __init__(
        self, served: ServedModel, engine_client: EngineClient, limits: Limits
    ) -> None:
        self.served, self.engine_client, self.limits = served, engine_client, limits
        self.metrics = Metrics()

    def app(self) -> ASGIApp:
        """Return the ASGI application."""
        routes = [
            Route(path, self._handler(interface), methods=list(interface.methods))
            for interface in INTERFACES
            for path in interface.paths
        ]
        routes += [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/health", self.health),
            Route("/v1/health", self.health),
            Route("/metrics", self.metrics_text),
            Route("/openapi.json", self.description),
            Route("/", self.page),
        ]
        app = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers={
                RequestError: _on_error,
                404: _on_http_error,
                405: _on_http_error,
                Exception: _on_fault,
            },
        )
        gate = _Gate(app, self)
        if not self.limits.origins:
            return gate
        # CORS is outside the gate, because a browser's preflight request has no API key.
        return CORSMiddleware(
            gate,
            allow_origins=self.limits.origins,
            allow_methods=["GET", "POST", "PUT"],
            allow_headers=["*"],
        )

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        # A full garbage collection scans about a million objects of imported libraries and
        # stops all threads for 0.2 s: exclude the objects that exist now.
        gc.collect()
        gc.freeze()
        self.engine_client.start()
        try:
            yield
        finally:
            self.engine_client.worker.stop()
            gc.unfreeze()
            sys.setswitchinterval(interval)

    def _handler(self, interface: Interface) -> Callable[..., Any]:
        async def handle(request: Request) -> Any:
            raw = await self._body(request)
            if len(raw) > _LONG_BYTES:  # in a thread, so that other requests do not wait
                reply = await asyncio.to_thread(read, raw)
            else:
                reply = read(raw)
            await self._prepare(reply)
            return EngineResponse(reply, self.engine_client, self.metrics, self.limits.timeouts)

        def read(raw: bytes) -> Reply:
            max_ids = MAX_TEXTS * self.served.max_tokens
            return interface.read(read_body(raw, interface.body, max_ids), self.served)

        return handle

    async def _prepare(self, reply: Reply) -> None:
        answer_s = self.limits.timeouts.answer_s
        try:
            async with asyncio.timeout(answer_s):
                await self.engine_client.prepare(reply.structures)
        except TimeoutError:
            message = f"the answer took more than {answer_s:g} seconds."
            raise RequestError(504, message) from None

    async def _body(self, request: Request) -> bytes:
        """Read a JSON body within the limits of time and size."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # curl -d sends the content type of a form by default. Accepting it for PUT is safe: a
        # browser sends a preflight request before PUT, so other sites cannot send such a body.
        is_plain_put = request.method == "PUT" and kind in ("", _FORM)
        if kind != "application/json" and not is_plain_put:
            raise RequestError(415, "the content-type must be application/json.")
        max_bytes, parts, size = self.limits.max_body_bytes, [], 0
        timeout_s = self.limits.timeouts.client_s
        try:
            async with asyncio.timeout(timeout_s):
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    if size > max_bytes:
                        raise RequestError(413, f"the body is longer than {max_bytes} bytes.")
        except TimeoutError:
            message = f"the body did not arrive within {timeout_s:g} seconds."
            raise RequestError(408, message) from None
        return b"".join(parts)

    async def models(self, request: Request) -> Response:
        """Return all names of the model and its adapters, or the entry of one name."""
        served, name = self.served, request.path_params.get("name", "")
        if name and name not in served.names:
            raise unknown_model(name, served)
        models = {
            each: {
                "id": each,
                "object": "model",
                "created": 0,
                "owned_by": "mcore",
                "parent": served.name if each in served.adapters else None,
                "max_model_len": served.max_tokens,
            }
            for each in served.names
        }
        return _json(models[name] if name else {"object": "list", "data": [*models.values()]})

    async def health(self, _request: Request) -> Response:
        """Return whether the engine runs: status 200, or 503 after a failure."""
        is_ready = self.engine_client.worker.failure is None
        status = {"status": "ok" if is_ready else "failed", "ready": is_ready}
        return _json(status, 200 if is_ready else 503)

    async def metrics_text(self, _request: Request) -> Response:
        """Return counters and gauges in Prometheus' format."""
        counts = self.engine_client.worker.requests.counts
        text = self.metrics.text({name: (_GAUGES[name], counts[name]) for name in _GAUGES})
        return Response(text, media_type="text/plain; version=0.0.4")

    async def description(self, _request: Request) -> Response:
        """Return the OpenAPI description."""
        return _json(openapi(has_key=bool(self.limits.api_key)))

    async def page(self, _request: Request) -> Response:
        """Return a web page to try the model."""
        return HTMLResponse(files("mcore_infer.server").joinpath("page.html").read_text())


class _Gate:
    """Middleware: checks host and API key, and counts responses."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self.app, self.server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in _PATHS else "other"
                self.server.metrics.responses[path, message["status"]] += 1
            await send(message)

        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refusal(scope["path"], headers)
        if refusal:
            response = _json(openai_error(refusal), refusal.status)
            if refusal.status == 401:
                response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, counted)
            return
        try:
            await self.app(scope, receive, counted)
        except ClientDisconnect:  # the client left before its complete request arrived
            self.server.metrics.cancelled += 1

    def _refusal(self, path: str, headers: Mapping[bytes, str]) -> RequestError | None:
        limits = self.server.limits
        host = headers.get(b"host", "").lower()
        name = host.partition("]")[0].lstrip("[") if host[:1] == "[" else host.split(":")[0]
        # Browsers always send a Host header; HTTP/1.0 clients may leave it out.
        if limits.hosts and name and name not in limits.hosts:
            return RequestError(
                403, f"host {name[:100]} is not served: use the name of --host."
            )
        key = headers.get(b"authorization", "").removeprefix("Bearer ")
        is_open = not limits.api_key or path in OPEN_PATHS
        if is_open or hmac.compare_digest(key.encode(), limits.api_key.encode()):
            return None
        return RequestError(401, "the API key is missing or wrong.")


def _json(value: Any, status: int = 200) -> Response:
    return Response(as_json(value), status, media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    # Megatron's interface returns errors as plain strings.
    is_plain = request.url.path == "/api"
    body = error.message if is_plain else openai_error(error)
    response = _json(body, error.status)
    if error.status == 503:
        response.headers["retry-after"] = "1"
    return response


async def _on_http_error(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    message = f"this server has no route {request.method} {request.url.path[:200]}."
    response = _json(openai_error(RequestError(status, message)), status)
    for name, value in (getattr(error, "headers", None) or {}).items():
        response.headers[name] = value
    return response


async def _on_fault(_request: Request, error: Exception) -> Response:
    message = f"the server failed: {type(error).__name__}"
    return _json(openai_error(RequestError(500, message)), 500)
