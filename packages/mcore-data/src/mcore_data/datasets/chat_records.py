"""Reads JSONL records of chats and preferences, checks their messages, collects the faults.

One error lists the faulty lines of a whole file, each with what to change. Messages are
converted to the form that chat templates expect, in training and in serving: a content of text
parts becomes one text, and the arguments of a tool call become an object.
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
    flag: str = "--input",
) -> Iterator[T]:
    """Yield ``encode(record)`` for each record of a JSONL file; blank lines are ignored.

    Args:
        path: the file.
        encode: computes the result of one record; raises ``ValueError`` for a bad one.
        on_bad_record: raise after the last line, or leave bad records out with a warning.
        flag: option that names the file, for errors.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: with the first ten faults and their lines, or if there is no good record.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{flag} {path} is not a file.")
    faults: list[str] = []
    num_records = num_bad = 0
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if num_records == 0 and line.lstrip().startswith(b"["):
                raise ValueError(
                    f"{flag} {path} is a JSON array: write one object on each line (JSONL)."
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
        raise ValueError(f"{flag} {path} has no records: write one JSON object on each line.")
    if not num_bad:
        return
    if num_bad > _MAX_SHOWN:
        faults.append(f"  and {num_bad - _MAX_SHOWN} more")
    text = f"{path}: {num_bad} of {num_records} records"
    if num_bad == num_records:
        raise ValueError("\n".join([f"{text} cannot be used:", *faults]))
    if on_bad_record == "refuse":
        if flag == "--input":
            faults.append("Change these lines, or leave them out with --on-bad-record skip.")
        raise ValueError("\n".join([f"{text} cannot be used:", *faults]))
    log.warning("%s", "\n".join([f"{text} are left out:", *faults]))


_ROLES = {"human": "user", "gpt": "assistant", "function_response": "tool"}
"""ShareGPT's names of roles that differ from the usual ones."""


def messages_of(record: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the checked messages of a record in one of the usual forms of chat datasets.

    A record has messages under ``key``; or ``conversations`` with from and value (ShareGPT),
    ``instruction``, ``input`` and ``output`` (Alpaca), or ``prompt`` and ``completion``.

    Raises:
        ValueError: if the record has another form, or its messages are wrong.
    """
    system = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    if key in record:
        return checked_messages(record[key], key)
    if "conversations" in record:
        turns = record["conversations"]
        if isinstance(turns, list):
            turns = [*system, *map(_from_sharegpt, turns)]
        return checked_messages(turns, "conversations")
    if "instruction" in record and "output" in record:
        question = "\n\n".join(filter(None, (record["instruction"], record.get("input"))))
        return checked_messages([*system, *_ask(question, record["output"])], "instruction")
    if "prompt" in record and "completion" in record:
        prompt, answer = record["prompt"], record["completion"]
        if isinstance(prompt, list) != isinstance(answer, list):
            raise ValueError(
                "one of prompt and completion is a text, the other a list: give both as texts "
                "or both as lists of messages"
            )
        turns = [*prompt, *answer] if isinstance(prompt, list) else _ask(prompt, answer)
        return checked_messages([*system, *turns], "prompt")
    raise ValueError(
        f"no key {key!r} (keys: {', '.join(record) or 'none'}); --json-key names the key of "
        "the list of messages"
    )


def _ask(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _from_sharegpt(turn: Any) -> Any:
    """Convert a ShareGPT turn to role and content; return any other value unchanged."""
    if not isinstance(turn, Mapping) or "from" not in turn or "role" in turn:
        return turn
    role = turn["from"]
    return {"role": _ROLES.get(role, role), "content": turn.get("value")}


def checked_messages(messages: object, name: str) -> list[dict[str, Any]]:
    """Return messages as templates expect them.

    Args:
        messages: value of a record.
        name: its key, for errors.

    Raises:
        ValueError: if the value is not a list of messages with a role and a text or tool calls.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"{name!r} is not a list of messages, each with role and content")
    for number, message in enumerate(messages, 1):
        where = f"message {number} of {name!r}"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            keys = f" (keys: {', '.join(message)})" if isinstance(message, Mapping) else ""
            raise ValueError(f"{where} has no role{keys}: a message has role and content")
        if message.get("content") is None and not message.get("tool_calls"):
            raise ValueError(f"{where} has no content (keys: {', '.join(message)})")
        if (
            message["role"] == "assistant"
            and message.get("learn", True)
            and not any(map(message.get, ("content", "tool_calls", "reasoning_content")))
        ):
            raise ValueError(
                f'{where} is an empty answer: leave it out, or add "learn": false to it'
            )
    return [template_message(message) for message in messages]


def template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message for a chat template: content as one string, arguments as objects.

    Raises:
        ValueError: if the content is not a text, or the arguments of a call are not JSON.
    """
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise ValueError(
                    f"a part of a content has the type {kind!r}: only texts are supported, "
                    "leave the part out"
                )
        content = "".join(part["text"] for part in content)
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"the content {content!r} is not a text: put it in quotes")
    values = {**message, "content": content or ""}
    if message.get("tool_calls"):
        values["tool_calls"] = [_with_arguments(call) for call in message["tool_calls"]]
    return values


def _with_arguments(call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments parsed to an object."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise ValueError(
            f"the tool call {call!r} has no function: write "
            '{"function": {"name": "...", "arguments": {}}}'
        )
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, Mapping):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, TypeError, RecursionError):
            raise ValueError(
                f"the arguments {arguments!r} of a tool call are not JSON: give an object"
            ) from None
    return {**call, "function": {**call["function"], "arguments": arguments}}
