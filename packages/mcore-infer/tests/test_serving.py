"""The command that serves, the page that shows it, and the scripts of known names."""

import http.client
import importlib.util
import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from torch import distributed as dist
from warm_ranks import run_ranks

from mcore_infer import (
    InferenceConfig,
    SamplingConfig,
    build_engine,
    generate_text,
    load_model,
)
from mcore_infer.cli import main
from mcore_infer.commands.opening import ModelOptions
from mcore_infer.commands.serving import serve
from mcore_infer.config import ServerConfig
from mcore_parallel.launch.launcher import free_port
from mcore_parallel.mesh import ParallelContext

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _no_exit():
    """SIGTERM must not end the tests, should a server not be there to take it."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


def while_serving(port, work):
    """Start a thread that works once a server is there, and then ends it as a host would."""
    found = []

    def run():
        try:
            for _ in range(12000):
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    time.sleep(0.01)
            found.append(work())
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def example(name):
    """The module of a script below ``examples``."""
    spec = importlib.util.spec_from_file_location("example", ROOT / f"examples/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expected_text(folder, prompt, num_tokens):
    loaded = load_model(folder, ParallelContext.single())
    sampling = SamplingConfig(num_tokens=num_tokens, top_k=1)
    return generate_text(loaded.model, loaded.tokenizer, [prompt], sampling)[0]


def test_the_page_goes_from_a_checkpoint_to_a_server_in_three_commands(long_folder):
    page = (ROOT / "docs/serving.md").read_text()
    (block,) = re.findall(r"in_three_commands.*?```bash\n(.*?)```", page, re.DOTALL)
    port = free_port()
    block = block.replace("5000", str(port)).replace("runs/tiny", str(long_folder))
    install, serve, ask = block.replace("\\\n", "").strip().splitlines()
    assert install == "pip install 'mcore-infer[server]'"
    program, *words = shlex.split(serve)
    assert program == "mcore-infer"
    assert ServerConfig().port == 5000

    def work():
        done = subprocess.run(
            shlex.split(ask), capture_output=True, text=True, check=True, timeout=60
        )
        return json.loads(done.stdout)

    thread, found = while_serving(port, work)
    assert main(words) == 0
    thread.join()
    (answer,) = found
    text = answer["text"][0]
    assert text.startswith("Hello world")
    assert len(answer["tokens"][0]) == len("Hello world") + 1


def test_the_page_serves_adapters_by_name(adapter_folders, capsys):
    """Its command lists them, and each completes as its folder does alone."""
    page = (ROOT / "docs/serving.md").read_text()
    (block,) = re.findall(r"serves_adapters_by_name.*?```bash\n(.*?)```", page, re.DOTALL)
    folders = {"Llama-3.1-8B": "base", "adapters/sql": "sql", "adapters/chat": "chat"}
    for name, folder in folders.items():
        block = block.replace(name, str(adapter_folders / folder))
    port = free_port()

    def ask(path, **body):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        fields = {"prompt": "In the", "max_tokens": 5, "temperature": 0} | body
        method, sent = ("POST", json.dumps(fields)) if body else ("GET", None)
        connection.request(method, path, sent, {"content-type": "application/json"})
        answer = connection.getresponse()
        found = answer.status, json.loads(answer.read())
        connection.close()
        return found

    def work():
        models = ask("/v1/models")[1]["data"]
        answers = [ask("/v1/completions", model=name) for name in ("base", "sql", "chat")]
        return models, answers, ask("/v1/completions", model="no"), ask("/v1/models/sql")

    thread, found = while_serving(port, work)
    assert main([*shlex.split(block)[1:], "--port", str(port)]) == 0
    thread.join()
    ((models, answers, unknown, one),) = found
    assert [(m["id"], m["parent"]) for m in models] == [
        ("base", None),
        ("sql", "base"),
        ("chat", "base"),
    ]
    assert one == (200, models[1])
    assert [answer["model"] for _, answer in answers] == ["base", "sql", "chat"]
    assert unknown[0] == 404
    assert "base, sql, chat are served" in unknown[1]["error"]["message"]
    sampling = SamplingConfig(num_tokens=5, top_k=1)
    loaded = load_model(
        adapter_folders / "base",
        ParallelContext.single(),
        adapters={name: adapter_folders / name for name in ("sql", "chat")},
    )
    engine = build_engine(loaded.model, InferenceConfig(), adapters=loaded.adapters)
    texts = []
    for name in ("", "sql", "chat"):
        engine.add(list(b"In the"), sampling, adapter=name)
        (result,) = [event[1] for event in engine.run() if isinstance(event, tuple)]
        texts.append(loaded.tokenizer.decode(result.ids))
    assert [answer["choices"][0]["text"] for _, answer in answers] == texts
    assert len(set(texts)) == 3
    words = ["serve", "--load", str(adapter_folders / "base"), "--port", "0"]
    assert main([*words, "--lora-modules", "base=x"]) == 2
    assert "has the name of the model" in capsys.readouterr().err


def test_sigterm_lets_answers_end_and_frees_the_port(long_folder, capsys):
    port = free_port()
    fields = {"prompt": "In the", "max_tokens": 60, "ignore_eos": True, "stream": True}

    def work():
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps({**fields, "temperature": 0}),
            {"content-type": "application/json", "authorization": "Bearer k"},
        )
        answer = connection.getresponse()
        first = answer.readline()
        os.kill(os.getpid(), signal.SIGTERM)
        rest = answer.read()
        connection.close()
        return first + rest

    words = ["serve", "--load", str(long_folder), "--port", str(port), "--api-key", "k"]
    thread, found = while_serving(port, work)
    assert main([*words, "--served-model-name", "mine"]) == 0
    thread.join()
    assert f"serving mine at http://127.0.0.1:{port}\n" in capsys.readouterr().out
    events = found[0].decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    texts = [json.loads(e[6:])["choices"][0]["text"] for e in events[:-2]]
    loaded = load_model(long_folder, ParallelContext.single())
    sampling = SamplingConfig(num_tokens=60, top_k=1, ignore_eod=True)
    assert ["".join(texts)] == generate_text(
        loaded.model, loaded.tokenizer, ["In the"], sampling
    )
    socket.create_server(("127.0.0.1", port)).close()


def test_the_scripts_of_known_names_serve_and_ask(long_folder, monkeypatch, capsys):
    port = free_port()
    text = expected_text(long_folder, "In the", 7)

    def work():
        asker = example("tools/text_generation_cli")
        monkeypatch.setattr("sys.stdin", io.StringIO("In the\n7\n\n"))
        return asker.main([f"localhost:{port}"], {"top_k": 1})

    thread, found = while_serving(port, work)
    server = example("tools/run_text_generation_server")
    assert server.main(["--load", str(long_folder), "--port", str(port)]) == 0
    thread.join()
    assert found == [0]
    assert f"In the{text}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "65536"], "--port 65536"),
        (["--port", "PORT"], "cannot listen on"),
        (["--host", "no.such.host.invalid"], "cannot listen on"),
        (["--answer-timeout-s", "0"], "--answer-timeout-s"),
        (["--port", "0", "--api-key", "@NOWHERE"], "NOWHERE"),
        (["--port", "0", "--inference-dynamic-batching-block-size", "0"], "block-size 0"),
    ],
)
def test_a_server_that_cannot_start_says_why_in_one_line(long_folder, words, message, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [str(taken.getsockname()[1]) if w == "PORT" else w for w in words]
        assert main(["serve", "--load", str(long_folder), *words]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert message in errors


@pytest.mark.parametrize("words", [("serve", "--port", "0"), ("chat",)])
def test_a_template_that_is_no_text_is_refused_before_a_model_is_opened(
    tmp_path, words, capsys
):
    template = tmp_path / "chat.jinja"
    template.write_bytes(b"\xff")
    assert main([*words, "--load", str(tmp_path / "no"), "--chat-template", str(template)]) == 2
    assert f"--chat-template {template} is no text in UTF-8" in capsys.readouterr().err


def refused_by_ranks(folder, template):
    """Why each of two ranks serves nothing."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    os.environ |= {"RANK": str(dist.get_rank()), **world}
    try:
        serve(
            ModelOptions(load=str(folder), device="cpu"),
            InferenceConfig(),
            ServerConfig(port=0, chat_template=str(template)),
        )
    except ValueError as error:
        return str(error)
    finally:
        for name in ("RANK", *world):
            del os.environ[name]


def test_every_rank_refuses_a_template_that_is_none(long_folder, tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ messages }}\n{% for %}")
    for why in run_ranks(refused_by_ranks, 2, long_folder, tmp_path / "chat.jinja"):
        assert why.startswith("line 2 of the chat template")
