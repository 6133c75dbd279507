"""Clients that leave, stall, come in crowds, or send what no one should."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from mcore_data.tokenizers.plain import ByteTokenizer
from mcore_infer import Generation, SamplingConfig, generate_text
from mcore_infer.server.app import Limits
from mcore_infer.server.responses import Timeouts

ENDLESS = {"prompt": "In the", "max_tokens": 400, "ignore_eos": True}


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_is_cancelled_and_its_pages_come_back(
    client, is_stream, monkeypatch
):
    requests, steps = client.server.engine_client.worker.requests, []
    follow = requests.step
    monkeypatch.setattr(
        requests, "step", lambda commands: steps.append(follow(commands)) or steps[-1]
    )
    before = client.server.metrics.cancelled
    connection = client.begin("/v1/completions", **ENDLESS, stream=is_stream, n=3)
    if is_stream:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    while not steps:
        time.sleep(0.001)
    connection.close()
    client.wait_until_idle()
    assert client.server.metrics.cancelled == before + 1
    assert not any(isinstance(one.what, Generation) for step in steps for one in step)


def test_a_client_that_leaves_before_its_body_is_there_is_no_fault(client):
    connection = socket.create_connection(("127.0.0.1", client.port))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
        b"Content-Type: application/json\r\n\r\n{"
    )
    time.sleep(0.05)
    connection.close()
    assert client.send("GET", "/health")[0] == 200


def test_a_slow_reader_holds_nobody_up(client):
    slow = client.begin("/v1/completions", **ENDLESS, stream=True, n=2, logprobs=5)
    try:
        status, answer = client.post("/v1/completions", prompt="b", max_tokens=5)
        assert status == 200
        assert answer["usage"]["completion_tokens"] <= 5
    finally:
        slow.close()
    client.wait_until_idle()


def test_two_hundred_clients_each_get_their_own_text(client, long_model):
    prompts = [f"{i:03}" for i in range(200)]
    slow_ones = [client.begin("/v1/completions", **ENDLESS, stream=True) for _ in range(5)]

    def ask(prompt):
        fields = {"prompt": prompt, "max_tokens": 6, "temperature": 0}
        if int(prompt) % 3:
            return client.post("/v1/completions", **fields)[1]["choices"][0]["text"]
        events = client.stream("/v1/completions", **fields)
        return "".join(event["choices"][0]["text"] for event in events)

    with ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(ask, prompts))
        waits = []
        for _ in range(20):
            begin = time.monotonic()
            assert client.send("GET", "/health")[0] == 200
            waits.append(time.monotonic() - begin)
    for connection in slow_ones:
        connection.close()
    sampling = SamplingConfig(num_tokens=6, top_k=1)
    assert answers == generate_text(long_model.model, long_model.tokenizer, prompts, sampling)
    assert sorted(waits)[len(waits) // 2] < 5  # a busy host may hold up some
    assert max(waits) < 30
    client.wait_until_idle()


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("POST", "/v1/completions", b"{", {}, 400),
        ("POST", "/v1/completions", b"\xff", {}, 400),
        ("POST", "/v1/completions", b"[1]", {}, 400),
        ("POST", "/v1/completions", b"[" * 60_000, {}, 400),
        ("POST", "/v1/completions", b"[" * 100_000, {}, 413),
        ("POST", "/v1/completions", b'{"prompt": "\\ud800"}', {}, 400),
        ("POST", "/v1/completions", b'{"prompt": "a", "temperature": NaN}', {}, 400),
        ("POST", "/v1/completions", b"1" * 5000, {}, 400),
        ("PUT", "/api", b"{", {}, 400),
        ("PUT", "/api", b"{", {"content-type": "application/x-www-form-urlencoded"}, 400),
        ("PUT", "/api", b"{", {"content-type": ""}, 400),
        ("PUT", "/api", b"{}", {"content-type": "text/plain"}, 415),
        ("POST", "/v1/completions", b"{}", {"content-type": "text/plain"}, 415),
        ("GET", "/v1/completions", None, {}, 405),
        ("GET", "/nowhere", None, {}, 404),
        ("POST", "/v1/completions", b" " * (4 << 20) + b"{}", {}, 413),
    ],
)
def test_a_request_that_is_none_gets_a_status_and_one_line(
    client, method, path, body, headers, status
):
    found, _, text = client.send(method, path, body, headers)
    assert found == status
    answer = json.loads(text)
    message = answer if path == "/api" else answer["error"]["message"]
    assert message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (
            "/v1/completions",
            {"prompt": "a" * 600},
            "the prompt has 600 or more tokens, and 512",
        ),
        ("/v1/completions", {"prompt": []}, "prompt must be"),
        ("/v1/completions", {}, "prompt is required"),
        ("/v1/completions", {"prompt": [1, 257]}, "token ids from 0 to 256"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "needs echo"),
        ("/v1/completions", {"prompt": "a", "best_of": 3}, "best_of must be equal to n"),
        (
            "/v1/completions",
            {"prompt": "a", "suffix": "b"},
            "suffix must be empty: text can only be written after the prompt",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "logprobs": 21},
            "logprobs: must be less than or equal to 20",
        ),
        (
            "/v1/completions",
            {"prompt": ["a"] * 65, "n": 2},
            "65 prompts times n=2 are",
        ),
        ("/v1/completions", {"prompt": "a", "top_p": 0}, "top_p"),
        ("/v1/completions", {"prompt": "a", "top_k": 258}, "--top-k 258"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [257]}, "from 0 to 256"),
        ("/v1/completions", {"prompt": "a", "functions": []}, "unknown field functions"),
        ("/v1/completions", {"prompt": "a", "stop": [""]}, "none empty"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias.x"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"999": 1}}, "999 is not a token id"),
        ("/v1/completions", {"prompt": "a", "seed": 10**30}, "seed"),
        ("/v1/completions", {"prompt": "a", "strem": True}, "did you mean stream?"),
        # No suggestion: the most similar field, presence_penalty, has another meaning.
        ("/v1/completions", {"prompt": "a", "length_penalty": 1.0}, "length_penalty."),
        ("/v1/completions", {"prompt": "a", "guided_json": {}}, "use response_format"),
        (
            "/v1/completions",
            {"prompt": "a", "stream": True, "echo": True, "logprobs": 1},
            "cannot be streamed",
        ),
        ("/v1/chat/completions", {}, "messages is required"),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "max_tokens": 8,
                "max_completion_tokens": 3,
            },
            "contradict each other: give one",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"content": "a"}]},
            "messages.0.role: Field required",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "must have content"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "parts of text",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "bad", "content": "a"}]},
            "the chat template refuses these messages: no",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "response_format": {"type": "yaml"},
            },
            "type: must be 'text', 'json_object', 'json_schema' or 'regex'",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "response_format": {"type": "regex", "pattern": "["}},
            "this regular expression cannot be enforced",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "tools": [{"type": "custom", "custom": {"name": "f"}}],
            },
            "custom is not supported: give functions",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"},
            "tool_choice=required needs tools",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 1},
            "needs logprobs",
        ),
    ],
)
def test_a_wrong_field_gets_status_400_and_says_what_is_right(client, path, fields, message):
    status, answer = client.post(path, **fields)
    assert status == 400
    assert message in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


def test_a_key_a_host_and_limits_keep_others_out(small_client):
    fields = {"prompt": "a", "max_tokens": 2}
    status, headers, _ = small_client.send("POST", "/v1/completions", fields)
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    key = {"authorization": "Bearer secret"}
    assert small_client.send("POST", "/v1/completions", fields, key)[0] == 200
    assert small_client.send("GET", "/metrics")[0] == 401
    assert small_client.send("GET", "/health")[0] == 200
    assert small_client.send("GET", "/health", None, {"host": "evil.example"})[0] == 403
    long = {"prompt": "a" * 5000}
    assert small_client.send("POST", "/v1/completions", long, key)[0] == 413
    # From here on only what never comes is waited for: a busy host is slower than timeouts.
    server = small_client.server
    server.limits = replace(server.limits, timeouts=Timeouts(client_s=0.3))
    silent = socket.create_connection(("127.0.0.1", small_client.port), timeout=120)
    silent.sendall(
        b"PUT /api HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
        b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    )
    assert b"408" in silent.recv(100)
    silent.close()
    server.limits = replace(server.limits, timeouts=Timeouts(answer_s=0.3))
    many = {**ENDLESS, "n": 20}
    late, _, text = small_client.send("POST", "/v1/completions", many, key)
    assert late == 504
    assert "more than 0.3 seconds" in json.loads(text)["error"]["message"]
    _, _, text = small_client.send("POST", "/v1/completions", {**many, "stream": True}, key)
    assert "more than 0.3 seconds" in json.loads(text.split(b"data: ")[-1])["error"]["message"]
    server.engine_client.max_queued = 3
    status, headers, _ = small_client.send("POST", "/v1/completions", many, key)
    assert (status, headers["retry-after"]) == (503, "1")


class AsciiTokenizer(ByteTokenizer):
    """Bytes of which a text may hold ASCII alone."""

    def token_bytes(self):
        return [bytes([i]) if i < 128 else None for i in range(257)]


def test_a_text_that_cannot_go_on_with_its_structure_is_an_error(serving, long_model):
    client, end = serving(replace(long_model, tokenizer=AsciiTokenizer()))
    held = {"type": "regex", "pattern": "ab\u20ac"}
    fields = {"prompt": "a", "response_format": held}
    status, answer = client.post("/v1/completions", **fields)
    events = client.send("POST", "/v1/completions", {**fields, "stream": True})[2]
    last = json.loads(events.decode().split("\n\n")[-2].removeprefix("data: "))
    client.wait_until_idle()
    end()
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert answer == last
    assert "cannot satisfy its structure" in answer["error"]["message"]


def test_probes_without_a_host_browsers_of_named_origins_and_lengths_are_served(
    small_client, client, serving, long_model
):
    probe = socket.create_connection(("127.0.0.1", small_client.port), timeout=60)
    probe.sendall(b"GET /health HTTP/1.0\r\n\r\n")
    assert probe.recv(100).startswith(b"HTTP/1.1 200")
    probe.close()
    fields = {"prompt": "a", "max_tokens": 2}
    for body in (fields, {"prompt": []}):
        _, headers, text = client.send("POST", "/v1/completions", body)
        assert int(headers["content-length"]) == len(text)
    origin = {"origin": "https://chat.example"}
    ask = {**origin, "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in client.send("GET", "/health", None, origin)[1]
    limits = Limits(api_key="secret", origins=("https://chat.example",))
    open_client, end = serving(long_model, limits)
    asked = open_client.send("OPTIONS", "/v1/completions", None, ask)
    other = open_client.send("GET", "/health", None, {"origin": "https://evil.example"})
    refused = open_client.send("POST", "/v1/completions", fields, origin)
    end()
    assert (asked[0], asked[1]["access-control-allow-origin"]) == (200, "https://chat.example")
    assert "access-control-allow-origin" not in other[1]
    assert (refused[0], refused[1]["access-control-allow-origin"]) == (401, origin["origin"])


def test_metrics_health_models_and_the_page_are_there(client):
    client.post("/v1/completions", prompt="a", max_tokens=3)
    status, headers, text = client.send("GET", "/metrics")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line for line in text.decode().splitlines() if not line.startswith("#")]
    values = dict(line.rsplit(" ", 1) for line in lines)
    assert float(values["mcore_written_tokens_total"]) >= 1
    assert values["mcore_pages_free"] == values["mcore_pages"]
    assert int(values['mcore_responses_total{path="/v1/completions",status="200"}']) >= 1
    counts = [int(v) for k, v in values.items() if k.startswith("mcore_first_token_seconds_b")]
    assert counts == sorted(counts)
    assert counts[-1] == int(values["mcore_first_token_seconds_count"])
    assert json.loads(client.send("GET", "/health")[2]) == {"status": "ok", "ready": True}
    assert json.loads(client.send("GET", "/v1/models")[2])["data"][0]["max_model_len"] == 512
    status, headers, page = client.send("GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"/v1/chat/completions" in page
    assert b"choice.delta.reasoning_content" in page
