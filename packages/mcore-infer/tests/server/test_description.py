"""What the server says of itself, and any body that is drawn from it."""

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcore_infer.server.description import openapi

# The server draws random numbers in its threads while hypothesis draws a body.
# Hypothesis takes them for draws of the strategy.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning"
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
DOCUMENT = openapi(has_key=False)
"""What the server publishes, see ``test_the_description_is_published``."""
PATHS = {path: ways for path, ways in DOCUMENT["paths"].items() if "post" in ways}
COUNTS = ("max_tokens", "max_completion_tokens", "tokens_to_generate", "n", "beam_width")
"""Fields that are kept small, so that answers come soon."""


def named(schema):
    """A schema, or the one of the document that it names."""
    name = schema.get("$ref", "").rpartition("/")[2]
    return DOCUMENT["components"]["schemas"][name] if name else schema


def drawn(schema):
    """Values that a JSON schema describes, short ones."""
    schema = named(schema)
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
    if named_by := schema.get("patternProperties"):
        ((names, part),) = named_by.items()
        values = drawn(part)
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
    return named(content["application/json"]["schema"])


def conforms(value, schema):
    """Whether a value is as the schema of an answer says."""
    schema = named(schema)
    if "anyOf" in schema:
        return any(conforms(value, one) for one in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return value in (schema.get("enum") or [schema["const"]])
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
    status, headers, text = client.send("PUT" if path == "/api" else "POST", path, body)
    is_known = body.get("model") in (None, "tiny")
    assert status in ((200, 400) if is_known else (400, 404)), (body, text)
    kind = headers["content-type"]
    schema = PATHS[path]["post"]["responses"][str(status)]["content"][kind]["schema"]
    answers = [json.loads(text)] if kind == "application/json" else client.events(text)
    for answer in answers:
        assert conforms(answer, schema), answer
    if status == 200 and path != "/api":
        choices = [choice for answer in answers for choice in answer["choices"]]
        ends = [one["index"] for one in choices if one["finish_reason"] is not None]
        assert sorted(ends) == list(range(len(ends))), "each text ends once"
        assert {one["index"] for one in choices} == set(ends)


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
