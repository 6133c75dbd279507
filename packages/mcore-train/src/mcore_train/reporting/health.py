"""HTTP endpoint with the state of a run: ``/health`` for probes, ``/metrics`` for Prometheus.

The first rank of each host serves the endpoint from a separate thread. The training loop writes
a few numbers to a shared object and never waits for a request.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

log = logging.getLogger(__name__)

PREFIX = "mcore_"
"""Prefix of the names on ``/metrics``."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus's text format."""


class Health:
    """State of a run: written by the training loop, read by the server's threads.

    Each attribute is replaced by a single assignment, so a reader needs no lock.
    """

    def __init__(
        self, stale_s: float, now: Callable[[], float] = time.monotonic, rank: int = 0
    ) -> None:
        """Begin in the state ``starting``.

        Args:
            stale_s: time without progress after which the run is not healthy.
            now: clock in seconds.
            rank: rank of this process, for the labels of the metrics.
        """
        self._stale_s, self._now, self._rank = stale_s, now, rank
        self._started_s = self._progress_s = now()
        self._iteration, self._train_iters = 0, 0
        self._step_ended_s = 0.0
        self._has_stepped = False
        self._checkpoint: tuple[int, float] | None = None
        self._numbers: Mapping[str, float | int] = {}

    def begin(self, iteration: int, train_iters: int) -> None:
        """Record the number of finished steps at the start, and the last step."""
        self._iteration, self._train_iters = iteration, train_iters
        self.beat()

    def beat(self) -> None:
        """Record progress other than a step, such as a batch of a validation."""
        self._progress_s = self._now()

    def step(self, iteration: int) -> None:
        """Record that a step has ended on the host."""
        self._iteration, self._has_stepped = iteration, True
        self._progress_s = self._step_ended_s = self._now()

    def checkpoint(self, iteration: int) -> None:
        """Record that the checkpoint of a step is durable."""
        self._checkpoint = iteration, self._now()
        self.beat()

    def report(self, numbers: Mapping[str, float | int]) -> None:
        """Store the numbers of the last report for ``/metrics``."""
        self._numbers = numbers

    def state(self) -> dict[str, Any]:
        """Return the content of ``/health``; ``status`` is starting, training or stale.

        Before the first step a run is never stale, since the time to load files and to compile
        is not known.
        """
        now_s = self._now()
        silent_s = now_s - self._progress_s
        status = "starting"
        if self._has_stepped:
            status = "stale" if silent_s > self._stale_s else "training"
        values: dict[str, Any] = {
            "status": status,
            "rank": self._rank,
            "iteration": self._iteration,
            "train_iters": self._train_iters,
            "uptime_s": now_s - self._started_s,
            "progress_age_s": silent_s,
        }
        if self._has_stepped:
            values["step_age_s"] = now_s - self._step_ended_s
        if self._checkpoint is not None:
            iteration, saved_s = self._checkpoint
            values |= {"checkpoint_iteration": iteration, "checkpoint_age_s": now_s - saved_s}
        return values

    def metrics(self) -> str:
        """Return ``/metrics`` in Prometheus's text format, every number as a gauge."""
        state = self.state()
        healthy = int(state.pop("status") != "stale")
        rank = state.pop("rank")
        rows = {"healthy": healthy, **state, **self._numbers}
        lines = []
        for name, value in rows.items():
            metric = PREFIX + "".join(c if c.isalnum() else "_" for c in name)
            lines.append(f"# TYPE {metric} gauge")
            lines.append(f'{metric}{{rank="{rank}"}} {float(value)!r}')
        return "\n".join(lines) + "\n"


class HealthServer:
    """Context manager that serves a ``Health`` over HTTP."""

    def __init__(self, port: int, health: Health) -> None:
        """Bind the port.

        Args:
            port: port on all addresses of this host.
            health: state to serve.

        Raises:
            ValueError: if the port cannot be bound.
        """
        try:
            self._server = ThreadingHTTPServer(("", port), partial(_Handler, health))
        except OSError as error:
            raise ValueError(
                f"--health-port {port} cannot be used ({error.strerror}): another process uses "
                "it, or it is below 1024. Give another port."
            ) from None
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]

    def __enter__(self) -> Self:
        threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="health", daemon=True
        ).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Answers one HTTP request."""

    def __init__(self, health: Health, *arguments: Any) -> None:
        self._health = health
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Answer ``/health`` (503 once the run is stale) and ``/metrics``."""
        if self.path == "/health":
            state = self._health.state()
            code = 503 if state["status"] == "stale" else 200
            self._answer(code, "application/json", json.dumps(state) + "\n")
        elif self.path == "/metrics":
            self._answer(200, METRICS_TYPE, self._health.metrics())
        else:
            self._answer(404, "text/plain", "try /health or /metrics\n")

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)

    def _answer(self, code: int, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
