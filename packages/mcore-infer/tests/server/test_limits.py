"""Clients that leave, stall, come in crowds, or send what no one should."""

import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcore_data.tokenizers.plain import ByteTokenizer
from mcore_infer import Generation, SamplingConfig, generate_text
from mcore_infer.server.answering import Patience
from mcore_infer.server.description import openapi
from mcore_infer.server.job import ServedModel

# The server draws random numbers in its threads while hypothesis draws a body.
# Hypothesis takes them for draws of the strategy.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning"
)

ENDLESS = {"prompt": "In the", "max_tokens": 400, "ignore_eos": True}


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_is_cancelled_and_its_pages_come_back(
    client, is_stream, monkeypatch
):
    requests, steps = client.server.front.worker.requests, []
    follow = requests.step
    monkeypatch.setattr(
        requests, "step", lambda orders: steps.append(follow(orders)) or steps[-1]
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
        ("POST", "/v1/completions", b"[" * 100_000, {}, 400),
        ("POST", "/v1/completions", b'{"prompt": "\\ud800"}', {}, 400),
        ("POST", "/v1/completions", b'{"prompt": "a", "temperature": NaN}', {}, 400),
        ("POST", "/v1/completions", b"1" * 5000, {}, 400),
        ("PUT", "/api", b"{", {}, 400),
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
        ("/v1/completions", {"prompt": "a" * 600}, "the prompt has 600 tokens, and 512"),
        ("/v1/completions", {"prompt": []}, "prompt must be"),
        ("/v1/completions", {}, "prompt must be"),
        ("/v1/completions", {"prompt": [1, 257]}, "token ids are from 0 to 256"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "needs echo"),
        ("/v1/completions", {"prompt": "a", "best_of": 3}, "best_of must be n"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix is refused"),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, "from 0 to 20"),
        ("/v1/completions", {"prompt": ["a"] * 65, "n": 2}, "130 texts are more than 128"),
        ("/v1/completions", {"prompt": "a", "top_p": 0}, "top_p"),
        ("/v1/completions", {"prompt": "a", "top_p": 0.5, "top_k": 3}, "--top-k"),
        ("/v1/completions", {"prompt": "a", "stop": [""]}, "none empty"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}, "x is no token id"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"999": 1}}, "999 is no token id"),
        ("/v1/completions", {"prompt": "a", "seed": 10**30}, "seed"),
        ("/v1/completions", {"prompt": "a", "strem": True}, "did you mean stream?"),
        (
            "/v1/completions",
            {"prompt": "a", "stream": True, "echo": True, "logprobs": 1},
            "cannot be streamed",
        ),
        ("/v1/chat/completions", {}, "messages must be"),
        ("/v1/chat/completions", {"messages": [{"content": "a"}]}, "with a role"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "must have content"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "parts of text",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "bad", "content": "a"}]},
            "template refuses these messages",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "response_format": {"type": "yaml"},
            },
            "type yaml is none of text, json_object, json_schema, regex",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "response_format": {"type": "regex", "pattern": "["}},
            "this regular expression cannot be held to",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"},
            "tool_choice must be auto or none",
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
    # From here on only what never comes is waited for: a busy host is slower than patience.
    server = small_client.server
    server.limits = replace(server.limits, patience=Patience(client_s=0.3))
    silent = socket.create_connection(("127.0.0.1", small_client.port), timeout=120)
    silent.sendall(
        b"PUT /api HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
        b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    )
    assert b"408" in silent.recv(100)
    silent.close()
    server.limits = replace(server.limits, patience=Patience(answer_s=0.3))
    many = {**ENDLESS, "n": 20}
    late, _, text = small_client.send("POST", "/v1/completions", many, key)
    assert late == 504
    assert "more than 0.3 seconds" in json.loads(text)["error"]["message"]
    _, _, text = small_client.send("POST", "/v1/completions", {**many, "stream": True}, key)
    assert "more than 0.3 seconds" in json.loads(text.split(b"data: ")[-1])["error"]["message"]
    server.front.max_queued = 3
    status, headers, _ = small_client.send("POST", "/v1/completions", many, key)
    assert (status, headers["retry-after"]) == (503, "1")


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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
SERVED = ServedModel(name="tiny", tokenizer=ByteTokenizer(), vocab_size=257, max_tokens=512)
DOCUMENT = openapi(SERVED, has_key=False)
"""What the server publishes, see ``test_the_description_is_published``."""
PATHS = {path: ways for path, ways in DOCUMENT["paths"].items() if "post" in ways}
COUNTS = ("max_tokens", "max_completion_tokens", "tokens_to_generate", "n", "beam_width")
"""Fields that are kept small, so that answers come soon."""


def drawn(schema):
    """Values that a JSON schema describes, short ones."""
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    if found := schema.get("oneOf") or ("type" not in schema and schema.get("anyOf")):
        return st.one_of([drawn(one) for one in found])
    low, high = schema.get("minimum"), schema.get("maximum")
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "string":
            return st.text(min_size=schema.get("minLength", 0), max_size=9)
        case "integer":
            return st.integers(low, high)
        case "number":
            above = schema.get("exclusiveMinimum")
            return st.floats(
                low if above is None else above, high, exclude_min=above is not None
            )
        case "array":
            least, most = schema.get("minItems", 0), min(3, schema.get("maxItems", 3))
            return st.lists(drawn(schema["items"]), min_size=least, max_size=most)
        case "object":
            return drawn_object(schema)
    return JSON


def drawn_object(schema):
    names = schema.get("propertyNames", {}).get("pattern")
    if names:
        values = drawn(schema["additionalProperties"])
        return st.dictionaries(st.from_regex(names, fullmatch=True), values, max_size=3)
    parts = {name: drawn(part) for name, part in schema.get("properties", {}).items()}
    needed = {name: parts.pop(name) for name in schema.get("required", ())}
    if not (parts or needed):
        return st.dictionaries(st.text(max_size=5), JSON, max_size=3)
    return st.fixed_dictionaries(needed, optional=parts)


@st.composite
def requests(draw):
    """A path, and a body as it is described, but for one field at times."""
    path = draw(st.sampled_from(sorted(PATHS)))
    schema = body_schema(path)
    parts, needed = schema["properties"], schema["required"]
    names = draw(st.lists(st.sampled_from(sorted(parts)), max_size=6, unique=True))
    body = {name: draw(drawn(parts[name])) for name in {*names, *needed}}
    for name in COUNTS:
        if isinstance(body.get(name), int):
            body[name] = min(body[name], 4)
    if draw(st.integers(0, 3)) == 0:
        odd = st.sampled_from(sorted(parts)) | st.text(max_size=5)
        body[draw(odd)] = draw(JSON | st.integers(-2, 300) | st.floats(-3, 120))
    return path, {"tokens_to_generate" if path == "/api" else "max_tokens": 3, **body}


def body_schema(path):
    content = PATHS[path]["post"]["requestBody"]["content"]
    return content["application/json"]["schema"]


def conforms(value, schema):
    """Whether a value is as the schema of an answer says."""
    if "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        return any(conforms(value, one) for one in schema["anyOf"])
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "null": type(None)}
    wanted = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not isinstance(value, tuple(kinds[kind] for kind in wanted)):
        return False
    if isinstance(value, list):
        return all(conforms(one, schema["items"]) for one in value)
    parts = schema.get("properties", {}) if isinstance(value, dict) else {}
    return set(schema.get("required", ())) <= set(value if parts else ()) and all(
        conforms(value[name], part) for name, part in parts.items() if name in value
    )


def test_the_description_is_published(client, small_client):
    assert json.loads(client.send("GET", "/openapi.json")[2]) == DOCUMENT
    for path, ways in DOCUMENT["paths"].items():
        for method in ways:
            assert client.send(method.upper(), path, b"{}")[0] in (200, 400)
    secured = json.loads(small_client.send("GET", "/openapi.json")[2])
    assert secured["security"] == [{"key": []}]
    for path in PATHS:
        for name, part in body_schema(path)["properties"].items():
            status, _, text = client.send("POST", path, {name: ["odd"] * 200})
            assert status == 400, (name, text)
            if "description" not in part and name not in body_schema(path)["required"]:
                assert b"unknown" not in text


def check_any_body(client, path, body):
    """Whatever is sent, status and answer are as described, and an error says what is wrong."""
    status, _, text = client.send("PUT" if path == "/api" else "POST", path, body)
    assert status in (200, 400), (body, text)
    if text.startswith(b"data: "):
        assert text.endswith(b"data: [DONE]\n\n")
        return
    answer = json.loads(text)
    assert answer
    described = PATHS[path]["post"]["responses"][str(status)]["content"]["application/json"]
    assert conforms(answer, described["schema"]), answer


ANY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


@settings(max_examples=120, derandomize=True, **ANY)
@given(asked=requests())
def test_any_body_gets_a_proper_answer(client, asked):
    check_any_body(client, *asked)


def test_nothing_is_left_of_any_body(client):
    client.wait_until_idle()


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(max_examples=int(os.environ.get("MCORE_BODIES", "100000")), **ANY)
@given(asked=requests())
def test_a_hundred_thousand_bodies_get_proper_answers(client, asked):
    """Or as many as ``MCORE_BODIES`` says, so that processes can share them."""
    check_any_body(client, *asked)
    assert client.send("GET", "/health")[0] == 200
