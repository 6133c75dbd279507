"""The OpenAPI description that ``/openapi.json`` gives, made of the tables that read bodies."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_infer.server.api import api_table, read_api
from mcore_infer.server.chat import chat_table, read_chat
from mcore_infer.server.completions import completion_table, read_completion
from mcore_infer.server.fields import Schema, Table, object_schema
from mcore_infer.server.job import WITHOUT_EFFECT, Job, ServedModel
from mcore_parallel.lazy_front import package_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One way to request texts."""

    summary: str
    paths: tuple[str, ...]
    """The first is described; the others are short for it."""
    methods: tuple[str, ...]
    read: Callable[[dict[str, Any], ServedModel], Job]
    table: Callable[[ServedModel], Table]
    answer: Mapping[str, Schema]
    """What a whole answer always holds."""
    event: Mapping[str, Schema] = field(default_factory=dict)
    """What each event of a stream always holds; empty: there are no streams."""
    without_effect: tuple[str, ...] = ()
    has_plain_errors: bool = False


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _object(parts: Mapping[str, Schema], needed: Iterable[str] | None = None) -> Schema:
    required = list(parts if needed is None else needed)
    return {"type": "object", "required": required, "properties": dict(parts)}


_COUNT: Schema = {"type": "integer", "minimum": 0}
_TEXT: Schema = {"type": "string"}
_USAGE = _object(dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _COUNT))
_ROLE: Mapping[str, Schema] = {"role": {"const": "assistant"}}
_ENDS = ("stop", "length")


def _head(
    kind: str, choice: Mapping[str, Schema], ends: Sequence[str | None]
) -> dict[str, Schema]:
    """What OpenAI's answers hold; a choice has an index and how its text ended besides."""
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
        summary="Write on after prompts, as Megatron's server does",
        paths=("/api",),
        methods=("PUT", "POST"),
        read=read_api,
        table=api_table,
        answer={
            "text": _list(_TEXT),
            "tokens": _list(_list(_COUNT)),
            "segments": _list(_list(_TEXT)),
        },
        has_plain_errors=True,
    ),
    Interface(
        summary="Write on after prompts",
        paths=("/v1/completions", "/completions"),
        methods=("POST",),
        read=read_completion,
        table=completion_table,
        answer={**_head("text_completion", {"text": _TEXT}, _ENDS), "usage": _USAGE},
        event=_head("text_completion", {"text": _TEXT}, (*_ENDS, None)),
        without_effect=WITHOUT_EFFECT,
    ),
    Interface(
        summary="Answer a chat",
        paths=("/v1/chat/completions", "/chat/completions"),
        methods=("POST",),
        read=read_chat,
        table=chat_table,
        answer={
            **_head(
                "chat.completion", {"message": _object({**_ROLE, "content": _TEXT})}, _ENDS
            ),
            "usage": _USAGE,
        },
        event=_head(
            "chat.completion.chunk",
            {"delta": _object({**_ROLE, "content": _TEXT}, needed=())},
            (*_ENDS, None),
        ),
        without_effect=WITHOUT_EFFECT,
    ),
)
_REFUSALS: Mapping[int, str] = {
    400: "A field is wrong or unknown, or the prompt too long.",
    401: "The API key is missing or wrong.",
    403: "This host is not served.",
    408: "The body did not come in time.",
    413: "The body is too long.",
    415: "The body is not application/json.",
    501: "The server lacks a library.",
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
                "code": {"type": "integer"},
            }
        )
    }
)


def openapi(served: ServedModel, *, has_key: bool) -> dict[str, Any]:
    """Describe a server's interfaces, with the limits of the model it runs.

    Args:
        served: the model.
        has_key: whether an API key is needed.
    """
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "mcore-infer", "version": package_version("mcore-infer")},
        "paths": {
            **{one.paths[0]: _path(one, served) for one in INTERFACES},
            "/v1/models": _reading("The model", {"type": "object"}),
            "/health": _reading("Whether the engine runs", {"type": "object"}),
            "/metrics": _reading("Counts and times for Prometheus", _TEXT, "text/plain"),
        },
        "components": {"schemas": {"Error": _ERROR}},
    }
    if has_key:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
        found["paths"]["/health"]["get"]["security"] = []
    return found


def _path(one: Interface, served: ServedModel) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _object(one.answer)}}
    # Who is not let in gets the same error everywhere.
    error = {"$ref": "#/components/schemas/Error"}
    if one.event:  # the schema is that of each event but the last, which is [DONE]
        event = _object({**one.event, "usage": _USAGE}, needed=one.event)
        content["text/event-stream"] = {"schema": {"anyOf": [event, error]}}
    plain = {"anyOf": [_TEXT, error]} if one.has_plain_errors else error
    refusals = {str(code): _reply(words, plain) for code, words in _REFUSALS.items()}
    body = object_schema(one.table(served), one.without_effect)
    return {
        method.lower(): {
            "summary": one.summary,
            "operationId": f"{method.lower()}{one.paths[0].replace('/', '_')}",
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": body}},
            },
            "responses": {"200": {"description": "The texts.", "content": content}, **refusals},
        }
        for method in one.methods
    }


def _reading(summary: str, schema: Schema, kind: str = "application/json") -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": {"200": _reply(summary, schema, kind)}}}


def _reply(words: str, schema: Schema, kind: str = "application/json") -> dict[str, Any]:
    return {"description": words, "content": {kind: {"schema": schema}}}
