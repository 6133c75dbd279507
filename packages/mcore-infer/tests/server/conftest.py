"""One server on a loopback port for all tests here, and a client that shows raw answers."""

import asyncio
import http.client
import json
import socket
import threading
import time
from dataclasses import dataclass

import pytest
import uvicorn

from mcore_infer import InferenceConfig, build_engine, load_model
from mcore_infer.server.app import Limits, Server
from mcore_infer.server.replies import ServedModel
from mcore_infer.server.worker import EngineClient, EngineWorker
from mcore_infer.writing.chat_format import load_chat_format
from mcore_infer.writing.structured import Grammars
from mcore_parallel.mesh import ParallelContext

TEMPLATE = (
    "{% if tools %}t:{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{{ mood }}a:"
)


@pytest.fixture(scope="session")
def long_model(long_folder):
    """The tiny model with room for 512 tokens."""
    return load_model(long_folder, ParallelContext.single())


@dataclass(slots=True)
class Client:
    """Talks to a server as a program without its types would."""

    port: int
    server: Server

    def send(self, method, path, body=None, headers=None):
        """Send one request; return the status, headers and bytes of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        if not isinstance(body, bytes | None):
            body = json.dumps(body).encode()
        connection.request(
            method, path, body, {"content-type": "application/json", **(headers or {})}
        )
        answer = connection.getresponse()
        found = answer.status, dict(answer.headers), answer.read()
        connection.close()
        return found

    def post(self, path, /, **body):
        """Post JSON; return the status and the JSON of the answer."""
        status, _, text = self.send("PUT" if path == "/api" else "POST", path, body)
        return status, json.loads(text)

    def stream(self, path, /, **body):
        """Post JSON; return the JSON of every event."""
        status, headers, text = self.send("POST", path, {**body, "stream": True})
        assert (status, headers["content-type"]) == (200, "text/event-stream"), text
        return self.events(text)

    def events(self, text):
        """Return the JSON of every event of a stream but its last one."""
        *events, end, rest = text.decode().split("\n\n")
        assert (end, rest) == ("data: [DONE]", "")
        assert all(e.startswith("data: ") and "\n" not in e for e in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def begin(self, path, **body):
        """Send a request on a socket of its own, which is returned at once."""
        text = json.dumps(body)
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(text)}\r\n\r\n{text}".encode()
        )
        return connection

    def wait_until_idle(self, timeout_s=120.0):
        """Wait until nothing runs, then hold that nothing is left."""
        end = time.monotonic() + timeout_s
        engine = self.server.engine_client.worker.requests.engine
        scheduler, pool = engine.scheduler, engine.scheduler.pool
        # The worker's thread forgets a cancelled request just before it frees its pages.
        while (
            engine.has_work
            or self.server.engine_client.num_open
            or pool.num_free < pool.num_pages
        ):
            assert time.monotonic() < end, "requests or pages are left"
            time.sleep(0.005)
        assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
        assert self.server.engine_client.worker.requests.groups == []


def run_server(loaded, limits=None, template=TEMPLATE, **fields):
    """Start a server in a thread; return its client and what ends it."""
    fields = {"inference_max_requests": 16, "inference_dynamic_batching_block_size": 4} | fields
    engine = build_engine(loaded.model, InferenceConfig(**fields))
    tokenizer = loaded.tokenizer
    engine.grammars = Grammars(tokenizer, loaded.model.vocab_size)
    served = ServedModel(
        name="tiny",
        tokenizer=tokenizer,
        vocab_size=loaded.model.vocab_size,
        max_tokens=engine.config.max_sequence_tokens,
        chat=load_chat_format(template, tokenizer),
    )
    engine_client = EngineClient(EngineWorker(engine, loaded.model.tp), max_queued=400)
    server = Server(served, engine_client, limits or Limits())
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    config = uvicorn.Config(server.app(), log_config=None, access_log=False, ws="none")
    http_server = uvicorn.Server(config)

    def run():
        asyncio.run(http_server.serve(sockets=[listening]))

    thread = threading.Thread(target=run)
    thread.start()

    def end():
        http_server.should_exit = True
        thread.join()
        listening.close()

    client = Client(listening.getsockname()[1], server)
    while not http_server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    return client, end


@pytest.fixture(scope="session")
def serving():
    """Starts a server for a test, see ``run_server``."""
    return run_server


@pytest.fixture(scope="session")
def client(long_model):
    """A client of a server that runs for the whole session."""
    client, end = run_server(long_model, num_speculative_tokens=2)
    yield client
    client.wait_until_idle()
    end()


@pytest.fixture
def small_client(long_model):
    """A server with a key and small limits."""
    limits = Limits(api_key="secret", max_body_bytes=4096, hosts=("127.0.0.1", "localhost"))
    client, end = run_server(long_model, limits, inference_max_requests=2)
    yield client
    client.wait_until_idle()
    end()


@pytest.fixture
def failing_client(long_model):
    """A server whose engine a test breaks."""
    client, end = run_server(long_model)
    yield client
    end()
