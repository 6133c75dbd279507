"""``POST /v1/chat/completions`` as OpenAI's clients know it."""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_infer.server.answer import Answer, AnswerPiece, ScoredToken
from mcore_infer.server.completions import MAX_TOP, text_answer, text_request, usage
from mcore_infer.server.fields import (
    Flag,
    Integer,
    Only,
    Own,
    RequestError,
    Schema,
    Table,
    as_object,
    read_fields,
)
from mcore_infer.server.job import (
    WITHOUT_EFFECT,
    Job,
    ServedModel,
    TextOptions,
    num_tokens_for,
    options_table,
    text_options,
)
from mcore_infer.writing import ScoreRequest

_RESERVED = ("messages", "add_generation_prompt", "tools")
_VARIABLES: Schema = {"type": "object", "propertyNames": {"not": {"enum": list(_RESERVED)}}}
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_TEXT: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}
_CALLS: Schema = {"type": "array", "items": {"type": "object"}, "minItems": 1}
_MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"role": {"type": "string"}, "content": _TEXT},
                "required": ["role", "content"],
            },
            {
                "type": "object",
                "properties": {
                    "role": {"type": "string"},
                    "content": {"anyOf": [_TEXT, {"type": "null"}]},
                    "tool_calls": _CALLS,
                },
                "required": ["role", "tool_calls"],
            },
        ]
    },
}


def chat_table(served: ServedModel) -> Table:
    """Return the fields of a body."""
    gone = Only("is no longer used: give tools and tool_choice.")
    return {
        "messages": Own(_messages, _MESSAGES, required=True),
        **options_table(served),
        "max_completion_tokens": Integer(None, 1, 2**31),
        "max_tokens": Integer(None, 1, 2**31),
        "logprobs": Flag(),
        "top_logprobs": Integer(0, 0, MAX_TOP),
        "functions": gone,
        "function_call": gone,
        "modalities": Only("must be text.", (["text"],)),
        "tools": Own(_tools, {"type": "array", "items": {"type": "object"}}),
        "tool_choice": Only(
            "must be auto or none: a call cannot be forced.", ("auto", "none"), "auto"
        ),
        "parallel_tool_calls": Only("cannot be turned off.", (True,)),
        "chat_template_kwargs": Own(_template_variables, _VARIABLES),
    }


def read_chat(body: dict[str, Any], served: ServedModel) -> Job:
    """Turn a body into a job.

    Raises:
        RequestError: with status 400, for a wrong or unknown field, or messages that the chat
            template refuses.
    """
    fields = read_fields(body, chat_table(served), WITHOUT_EFFECT)
    messages, options, is_scored = fields["messages"], text_options(fields), fields["logprobs"]
    num_top, wanted = fields["top_logprobs"], fields["max_tokens"]
    if num_top and not is_scored:
        raise RequestError(400, "top_logprobs needs logprobs=true.", "top_logprobs")
    if wanted is None:
        wanted = fields["max_completion_tokens"]
    tools = fields["tools"] if fields["tool_choice"] == "auto" else []
    variables = {**fields["chat_template_kwargs"], "tools": tools or None}
    ids = _rendered(served, messages, variables)
    room = num_tokens_for(served, ids, wanted)
    scores = ScoreRequest(log_probs=is_scored, num_top=num_top)
    requests = [
        text_request(served, ids, room, options, scores, index) for index in range(options.n)
    ]
    answers = [text_answer(served, options, is_scored) for _ in requests]
    reply = ChatReply(served, len(ids), answers, options, is_scored)
    return Job(requests=requests, answers=answers, reply=reply, is_stream=options.is_stream)


def _tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list | None) or not all(isinstance(t, dict) for t in tools or ()):
        raise RequestError(400, "tools must be a list of objects.", "tools")
    return tools or []


def _template_variables(given: Any) -> dict[str, Any]:
    """Return what a chat template sees besides messages."""
    name = "chat_template_kwargs"
    variables = as_object(name, given)
    for reserved in _RESERVED:
        if reserved in variables:
            raise RequestError(400, f"{name} must not hold {reserved}.", name)
    return variables


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise RequestError(400, "messages must be a list of at least one object.", "messages")
    found = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(400, "messages: each must be an object with a role.", "messages")
        content = _content(message.get("content"))
        if content is None and not message.get("tool_calls"):
            raise RequestError(400, "messages: each must have content.", "messages")
        found.append({**message, "content": content or ""})
        if message.get("tool_calls") is not None:
            found[-1]["tool_calls"] = _tool_calls(message["tool_calls"])
    return found


def _content(content: Any) -> str | None:
    """Return the text of a message, whose parts are joined."""
    if content is None or isinstance(content, str):
        return content
    is_text = isinstance(content, list) and all(
        isinstance(part, dict)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
        for part in content
    )
    if not is_text:
        raise RequestError(
            400, "messages: content must be a string or a list of parts of text.", "messages"
        )
    return "".join(part["text"] for part in content)


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    """Return earlier calls with their arguments as objects, which templates write as JSON."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RequestError(400, "messages: tool_calls must be a list of objects.", "messages")
    found = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError):
                raise RequestError(
                    400, "messages: arguments of tool_calls must be JSON.", "messages"
                ) from None
            call = {**call, "function": {**function, "arguments": arguments}}  # noqa: PLW2901
        found.append(call)
    return found


def _rendered(
    served: ServedModel, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> list[int]:
    if served.render is None:
        raise RequestError(
            501, "chats need jinja2: pip install 'mcore-infer[server]'.", "messages"
        )
    has_no_place = False
    try:
        text = served.render(messages, True, **variables)
        if variables["tools"]:
            has_no_place = text == served.render(messages, True, **{**variables, "tools": None})
        ids = served.tokenizer.encode(text, add_special_tokens=False)
    except ValueError as error:
        raise RequestError(400, str(error)[:500], "messages") from error
    if has_no_place:
        raise RequestError(
            400,
            "the chat template has no place for tools: send none, or serve with a "
            "--chat-template that has.",
            "tools",
        )
    if not ids:
        raise RequestError(400, "the chat template makes no text of these.", "messages")
    return ids


class ChatReply:
    """Messages in OpenAI's form."""

    def __init__(
        self,
        served: ServedModel,
        prompt_tokens: int,
        answers: Sequence[Answer],
        options: TextOptions,
        is_scored: bool,
    ) -> None:
        """Give the reply its id."""
        self.prompt_tokens, self.answers = prompt_tokens, answers
        self.options, self.is_scored = options, is_scored
        self.head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk" if options.is_stream else "chat.completion",
            "created": int(time.time()),
            "model": served.name,
        }

    def begin(self) -> Sequence[Any]:
        """Return the role of every text."""
        delta = {"role": "assistant", "content": ""}
        return [self._event(index, delta, None, None) for index in range(len(self.answers))]

    def event(self, index: int, piece: AnswerPiece) -> Any:
        """Return one choice with what is new."""
        delta = {"content": piece.text} if piece.text else {}
        reason = self.answers[index].finish_reason
        return self._event(index, delta, self._scores(piece.tokens), reason)

    def end(self) -> Sequence[Any]:
        """Return the counts where they are wanted."""
        if not self.options.has_usage:
            return ()
        return [{**self.head, "choices": [], "usage": self._usage()}]

    def whole(self, pieces: Sequence[Sequence[AnswerPiece]]) -> dict[str, Any]:
        """Return all messages and the counts."""
        choices = [
            {
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": "".join(piece.text for piece in of_one),
                    "refusal": None,
                },
                "logprobs": self._scores([t for piece in of_one for t in piece.tokens]),
                "finish_reason": self.answers[index].finish_reason,
            }
            for index, of_one in enumerate(pieces)
        ]
        return {**self.head, "choices": choices, "usage": self._usage()}

    def _event(
        self, index: int, delta: dict[str, Any], scores: Any, finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": scores,
            "finish_reason": finish_reason,
        }
        return {**self.head, "choices": [choice]}

    def _scores(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        if not self.is_scored:
            return None
        return {"content": [self._score(token) for token in tokens], "refusal": None}

    def _score(self, token: ScoredToken) -> dict[str, Any]:
        top = [_named(text, value) for text, value in token.top]
        return {**_named(token.text, token.log_prob), "top_logprobs": top}

    def _usage(self) -> dict[str, int]:
        return usage(self.prompt_tokens, self.answers)


def _named(text: str, log_prob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}
