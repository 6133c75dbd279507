"""The command ``mcore-infer serve``: an HTTP server for one model."""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_base.command_line import file_text
from mcore_infer.commands.opening import ModelOptions, opened
from mcore_infer.config import InferenceConfig, ServerConfig

if TYPE_CHECKING:
    from mcore_infer.server.app import Limits
    from mcore_infer.server.replies import ServedModel
    from mcore_infer.server.worker import EngineWorker

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(model: ModelOptions, engine: InferenceConfig, server: ServerConfig) -> int:
    """Serve a model over HTTP: PUT /api as Megatron does, and OpenAI's interfaces below /v1.

    SIGTERM and Ctrl-C end it once the answers that have begun are sent.

    Args:
        model: model, device and ranks.
        engine: limits of the engine.
        server: address, access control and timeouts.
    """
    missing = [
        name
        for name in ("starlette", "uvicorn", "jinja2", "pydantic")
        if find_spec(name) is None
    ]
    if missing:
        raise ValueError(
            f"mcore-infer serve needs {' and '.join(missing)}: pip install "
            "'mcore-infer[server]'."
        )
    from mcore_parallel.launch.launcher import read_environment

    is_first = read_environment().rank == 0
    limits, worker = _limits(server), None
    name = server.served_model_name or Path(model.load).resolve().name
    if name in server.adapter_folders:
        raise ValueError(
            f"--lora-modules {name}=... has the name of the model: give the adapter another "
            "name, or give another --served-model-name."
        )
    template = file_text("--chat-template", server.chat_template)

    def on_fault(fault: str) -> None:
        if worker is not None:
            worker.fail(fault)

    # Listen before the model is loaded, so that a used port fails at once.
    listener = _listen(server) if is_first else nullcontext()
    with (
        listener as listening,
        opened(
            model,
            draft=engine.draft_load,
            adapters=server.adapter_folders,
            on_fault=on_fault,
        ) as (loaded, tokenizer, _),
    ):
        from mcore_infer.engine.building import build_engine
        from mcore_infer.server.replies import ServedModel
        from mcore_infer.server.worker import EngineWorker, follow
        from mcore_infer.writing.chat_format import load_chat_format
        from mcore_infer.writing.structured import Grammars

        chat = load_chat_format(template, tokenizer)  # on every rank: errors are raised on all
        replicas, in_step = loaded.data, loaded.in_step
        running = build_engine(
            loaded.model,
            engine,
            loaded.draft,
            loaded.kv_scales,
            replicas,
            in_step,
            loaded.adapters,
        )
        running.grammars = Grammars(tokenizer, loaded.model.vocab_size, loaded.ends)
        if listening is None:
            with _no_exit_on_signals():
                follow(running, loaded.world, replicas)
            return 0
        served = ServedModel(
            name=name,
            adapters=tuple(server.adapter_folders),
            tokenizer=tokenizer,
            vocab_size=loaded.model.vocab_size,
            max_tokens=running.config.max_sequence_tokens,
            ends=loaded.ends,
            chat=chat,
            defaults=loaded.sampling_defaults,
        )
        with _no_exit_on_signals():
            worker = EngineWorker(running, loaded.world, replicas)
            return _run(worker, served, server, limits, listening)


def _run(
    worker: "EngineWorker",
    served: "ServedModel",
    config: ServerConfig,
    limits: "Limits",
    listening: socket.socket,
) -> int:
    import uvicorn

    from mcore_infer.server.app import Server
    from mcore_infer.server.worker import EngineClient

    engine_client = EngineClient(worker, config.max_queued_requests)
    http = uvicorn.Server(
        uvicorn.Config(
            Server(served, engine_client, limits).app(),
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            lifespan="on",
            timeout_graceful_shutdown=max(1, round(config.drain_timeout_s)),
        )
    )

    def end() -> None:
        http.should_exit = True

    engine_client.on_failure = end
    host, port = listening.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    print(f"serving {served.name} at http://{address}:{port}", flush=True)
    http.run(sockets=[listening])
    if engine_client.worker.failure is not None:
        raise engine_client.worker.failure
    return 0


def _listen(config: ServerConfig) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        return socket.create_server((config.host, config.port), family=family, backlog=1024)
    except OSError as error:
        raise ValueError(
            f"cannot listen on --host {config.host} --port {config.port} "
            f"({error.strerror or error}): choose another host or port."
        ) from None


def _limits(config: ServerConfig) -> "Limits":
    from mcore_infer.server.app import Limits
    from mcore_infer.server.responses import Timeouts

    return Limits(
        api_key=_api_key(config),
        max_body_bytes=int(config.max_body_mib * 2**20),
        origins=config.allowed_origins,
        hosts=_LOOPBACK if config.host in _LOOPBACK else (),
        timeouts=Timeouts(answer_s=config.answer_timeout_s, client_s=config.client_timeout_s),
    )


def _api_key(config: ServerConfig) -> str:
    if not config.api_key.startswith("@"):
        return config.api_key
    key = file_text("--api-key", config.api_key[1:]).strip()
    if not key:
        raise ValueError(f"--api-key {config.api_key} is an empty file.")
    return key


@contextmanager
def _no_exit_on_signals() -> Iterator[None]:
    """Within the context, ignore signals: rank 0's server handles them and ends all ranks."""
    before = {
        number: signal.signal(number, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
