"""Reads JSONL records of chats and preferences, checks their messages, collects the faults.

One error names the faulty lines of a whole file, each with what to change. Messages are brought
into the form that chat templates expect, for training as for serving: a content of text parts
becomes one text, and the arguments of a tool call become an object.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from mcore_data.preprocessing.records import parse_object

log = logging.getLogger(__name__)

T = TypeVar("T")

OnBadRecord = Literal["refuse", "skip"]
"""What to do with records that cannot be encoded."""

_MAX_SHOWN = 10


def encode_records(
    path: str | Path,
    encode: Callable[[dict[str, Any]], T],
    on_bad_record: OnBadRecord = "refuse",
) -> Iterator[T]:
    """Yield ``encode(record)`` for each record of a JSONL file; blank lines are passed over.

    Args:
        path: the file.
        encode: computes the result of one record; raises ``ValueError`` for a bad one.
        on_bad_record: raise after the last line, or leave bad records out with a warning.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: with the first ten faults and their lines, or if there is no good record.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"--input {path} is not a file.")
    faults: list[str] = []
    num_records = num_bad = 0
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if num_records == 0 and line.lstrip().startswith(b"["):
                raise ValueError(
                    f"--input {path} is a JSON array: write one object on each line (JSONL)."
                )
            num_records += 1
            try:
                result = encode(parse_object(line))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                num_bad += 1
                if num_bad <= _MAX_SHOWN:
                    faults.append(f"  line {number}: {error}")
                continue
            if not num_bad or on_bad_record == "skip":
                yield result
    if not num_records:
        raise ValueError(f"--input {path} has no records: write one JSON object on each line.")
    if not num_bad:
        return
    if num_bad > _MAX_SHOWN:
        faults.append(f"  and {num_bad - _MAX_SHOWN} more")
    text = f"{path}: {num_bad} of {num_records} records"
    if num_bad == num_records:
        raise ValueError("\n".join([f"{text} cannot be used:", *faults]))
    if on_bad_record == "refuse":
        hint = "Change these lines, or leave them out with --on-bad-record skip."
        raise ValueError("\n".join([f"{text} cannot be used:", *faults, hint]))
    log.warning("%s", "\n".join([f"{text} are left out:", *faults]))


def checked_messages(messages: object, name: str) -> list[dict[str, Any]]:
    """Return messages as templates expect them.

    Args:
        messages: value of a record.
        name: its key, for errors.

    Raises:
        ValueError: if it is no list of messages with a role and a text or tool calls.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"{name!r} is not a list of messages, each with role and content")
    for number, message in enumerate(messages, 1):
        place = f"message {number} of {name!r}"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            keys = f" (keys: {', '.join(message)})" if isinstance(message, Mapping) else ""
            raise ValueError(f"{place} has no role{keys}: a message has role and content")
        if message.get("content") is None and not message.get("tool_calls"):
            raise ValueError(f"{place} has no content (keys: {', '.join(message)})")
        if (
            message["role"] == "assistant"
            and message.get("learn", True)
            and not any(map(message.get, ("content", "tool_calls", "reasoning_content")))
        ):
            raise ValueError(
                f'{place} is an empty answer: leave it out, or add "learn": false to it'
            )
    return [template_message(message) for message in messages]


def template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message for a chat template: content as one string, arguments as objects.

    Raises:
        ValueError: for a content that is no text, or arguments of a call that are not JSON.
    """
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise ValueError(f"a part of a content is no text but {kind!r}: leave it out")
        content = "".join(part["text"] for part in content)
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"the content {content!r} is not a text: put it in quotes")
    values = {**message, "content": content or ""}
    if message.get("tool_calls"):
        values["tool_calls"] = [_with_arguments(call) for call in message["tool_calls"]]
    return values


def _with_arguments(call: Any) -> dict[str, Any]:
    """Return a tool call whose arguments are an object, not its JSON text."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise ValueError('a tool call is {"function": {"name": ..., "arguments": ...}}')
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, Mapping):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, TypeError, RecursionError):
            raise ValueError("arguments of tool_calls must be JSON.") from None
    return {**call, "function": {**call["function"], "arguments": arguments}}
