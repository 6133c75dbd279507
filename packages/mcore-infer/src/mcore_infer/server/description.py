"""Table of the server's interfaces, and the OpenAPI description of ``/openapi.json``."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic.json_schema import models_json_schema

from mcore_base.lazy_front import package_version
from mcore_infer.server.api import read_api
from mcore_infer.server.chat import read_chat
from mcore_infer.server.completions import read_completion
from mcore_infer.server.replies import Reply, ServedModel
from mcore_infer.server.schemas import ApiBody, Body, ChatBody, CompletionBody

Schema = dict[str, Any]
"""A JSON schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One HTTP interface: paths, body, handler, and the schemas of its answers."""

    summary: str
    paths: tuple[str, ...]
    """The OpenAPI description lists the first path; the others are aliases."""
    methods: tuple[str, ...]
    body: type[Body]
    read: Callable[[Any, ServedModel], Reply]
    """Builds the reply of a valid body, with its engine requests."""
    answer: Mapping[str, Schema]
    """Required fields of a complete answer."""
    event: Mapping[str, Schema] = field(default_factory=dict)
    """Required fields of each stream event; empty: no streams."""
    has_plain_errors: bool = False


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _object(parts: Mapping[str, Schema], required: Iterable[str] | None = None) -> Schema:
    required = list(parts if required is None else required)
    return {"type": "object", "required": required, "properties": dict(parts)}


_COUNT: Schema = {"type": "integer", "minimum": 0}
_TEXT: Schema = {"type": "string"}
_USAGE = _object(dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _COUNT))
_FUNCTION = _object({"name": _TEXT, "arguments": _TEXT})
_CALL: Mapping[str, Schema] = {
    "id": _TEXT,
    "type": {"const": "function"},
    "function": _FUNCTION,
}
_MESSAGE: Mapping[str, Schema] = {
    "role": {"const": "assistant"},
    "content": {"type": ["string", "null"]},
    "reasoning_content": _TEXT,
}
_ENDS = ("stop", "length")
_CHAT_ENDS = (*_ENDS, "tool_calls")


def _head(
    kind: str, choice: Mapping[str, Schema], ends: Sequence[str | None]
) -> dict[str, Schema]:
    """Return the schemas of an OpenAI answer's fields.

    Args:
        kind: value of the field ``object``.
        choice: schemas of the fields of a choice that only this kind has.
        ends: values of ``finish_reason``.
    """
    end: Schema = {"enum": list(ends)}
    return {
        "id": _TEXT,
        "object": {"const": kind},
        "created": _COUNT,
        "model": _TEXT,
        "choices": _list(
            _object(
                {
                    "index": _COUNT,
                    **choice,
                    "logprobs": {"type": ["object", "null"]},
                    "finish_reason": end,
                }
            )
        ),
    }


INTERFACES = (
    Interface(
        summary="Complete prompts, in the format of Megatron's server",
        paths=("/api",),
        methods=("PUT", "POST"),
        body=ApiBody,
        read=read_api,
        answer={
            "text": _list(_TEXT),
            "tokens": _list(_list(_COUNT)),
            "segments": _list(_list(_TEXT)),
        },
        has_plain_errors=True,
    ),
    Interface(
        summary="Complete prompts",
        paths=("/v1/completions", "/completions"),
        methods=("POST",),
        body=CompletionBody,
        read=read_completion,
        answer={**_head("text_completion", {"text": _TEXT}, _ENDS), "usage": _USAGE},
        event=_head("text_completion", {"text": _TEXT}, (*_ENDS, None)),
    ),
    Interface(
        summary="Answer a chat",
        paths=("/v1/chat/completions", "/chat/completions"),
        methods=("POST",),
        body=ChatBody,
        read=read_chat,
        answer={
            **_head(
                "chat.completion",
                {
                    "message": _object(
                        {**_MESSAGE, "tool_calls": _list(_object(_CALL))}, ("role", "content")
                    )
                },
                _CHAT_ENDS,
            ),
            "usage": _USAGE,
        },
        event=_head(
            "chat.completion.chunk",
            {
                "delta": _object(
                    {**_MESSAGE, "tool_calls": _list(_object({"index": _COUNT, **_CALL}))}, ()
                )
            },
            (*_CHAT_ENDS, None),
        ),
    ),
)
_REFUSALS: Mapping[int, str] = {
    400: "A field is wrong or unknown, or the prompt is too long.",
    401: "The API key is missing or wrong.",
    403: "This host is not served.",
    404: "Another model is served.",
    408: "The body did not arrive in time.",
    413: "The body is too long.",
    415: "The body is not application/json.",
    500: "No token continues the text within its structure.",
    501: "A library is not installed on the server.",
    503: "The server is full, or its engine failed.",
    504: "The answer took too long.",
}
_ERROR = _object(
    {
        "error": _object(
            {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["integer", "string"]},
            }
        )
    }
)


def openapi(*, has_key: bool) -> dict[str, Any]:
    """Return the OpenAPI description of the server's interfaces.

    Args:
        has_key: whether an API key is needed.
    """
    bodies, definitions = models_json_schema(
        [(interface.body, "validation") for interface in INTERFACES],
        ref_template="#/components/schemas/{model}",
    )
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "mcore-infer", "version": package_version("mcore-infer")},
        "paths": {
            **{
                interface.paths[0]: _path(interface, bodies[interface.body, "validation"])
                for interface in INTERFACES
            },
            "/v1/models": _get_path("The model", {"type": "object"}),
            "/health": _get_path("Whether the engine runs", {"type": "object"}),
            "/metrics": _get_path("Counts and times for Prometheus", _TEXT, "text/plain"),
        },
        "components": {"schemas": {**definitions["$defs"], "Error": _ERROR}},
    }
    if has_key:
        document["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"}
        }
        document["security"] = [{"key": []}]
        document["paths"]["/health"]["get"]["security"] = []
    return document


def _path(interface: Interface, body: Schema) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _object(interface.answer)}}
    # Access errors have the same format on all paths.
    error = {"$ref": "#/components/schemas/Error"}
    if interface.event:  # schema of all events but the last, which is [DONE]
        event = _object({**interface.event, "usage": _USAGE}, required=interface.event)
        content["text/event-stream"] = {"schema": {"anyOf": [event, error]}}
    plain = {"anyOf": [_TEXT, error]} if interface.has_plain_errors else error
    refusals = {str(code): _response(text, plain) for code, text in _REFUSALS.items()}
    return {
        method.lower(): {
            "summary": interface.summary,
            "operationId": f"{method.lower()}{interface.paths[0].replace('/', '_')}",
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": body}},
            },
            "responses": {"200": {"description": "The texts.", "content": content}, **refusals},
        }
        for method in interface.methods
    }


def _get_path(summary: str, schema: Schema, kind: str = "application/json") -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": {"200": _response(summary, schema, kind)}}}


def _response(text: str, schema: Schema, kind: str = "application/json") -> dict[str, Any]:
    return {"description": text, "content": {kind: {"schema": schema}}}
