"""What a request to the server becomes: texts to write, and how their reply looks."""

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol, runtime_checkable

from mcore_data.datasets.chat import Render
from mcore_data.tokenizers.protocol import Tokenizer
from mcore_infer.config import SamplingConfig
from mcore_infer.server.answer import Answer, AnswerPiece
from mcore_infer.server.fields import Fields, RequestError
from mcore_infer.server.worker import TextRequest
from mcore_infer.structured import Structure
from mcore_infer.writing import TokenRules

MAX_TEXTS = 128
"""Texts of one request: prompts times ``n``."""
_MAX_SEED = 2**62
_MAX_BIASES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model that a server runs, as its interfaces know it."""

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    max_tokens: int
    """Of a prompt and its text together."""
    ends: tuple[int, ...] = ()
    """Tokens besides the tokenizer's end of document that end a text."""
    render: Render | None = None
    """Chat template; None: jinja2 is missing."""


@runtime_checkable
class Reply(Protocol):
    """How an interface writes its answers: whole, or event by event."""

    def begin(self) -> Sequence[Any]:
        """Return the events before any text."""
        ...

    def event(self, index: int, piece: AnswerPiece) -> Any:
        """Return the event of a new piece of text ``index``."""
        ...

    def end(self) -> Sequence[Any]:
        """Return the events behind all texts."""
        ...

    def whole(self, pieces: Sequence[Sequence[AnswerPiece]]) -> Any:
        """Return the answer from the pieces of each text."""
        ...


@dataclass(slots=True, kw_only=True)
class Job:
    """One request: what the engine writes, what becomes of it, and how it is answered."""

    requests: list[TextRequest]
    answers: list[Answer]
    reply: Reply
    is_stream: bool = False
    needs_result: bool = False
    """Whether scores of prompts are wanted, which come with the end of a text."""
    has_plain_errors: bool = False
    """Whether errors are plain strings, as Megatron's clients expect them."""

    @property
    def num_written(self) -> int:
        """Tokens of all texts so far."""
        return sum(len(answer.ids) for answer in self.answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How texts are written, as both OpenAI interfaces say it."""

    sampling: SamplingConfig
    rules: TokenRules
    seed: int
    stop: tuple[str, ...]
    n: int
    is_stream: bool
    has_usage: bool
    """Whether a stream ends with the counts."""
    ignore_eos: bool
    structure: Structure | None


WITHOUT_EFFECT = (
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention"),
)
"""Fields of OpenAI's interfaces that say nothing about the text."""


def read_options(fields: Fields, served: ServedModel) -> TextOptions:
    """Read the fields that completions and chats share."""
    temperature = fields.number("temperature", 1.0, 0, 100)
    top_p = fields.number("top_p", 1.0, 0, 1, above=True)
    top_k = max(0, fields.integer("top_k", 0, -1, served.vocab_size))
    if not temperature:  # the likeliest token always
        temperature, top_k, top_p = 1.0, 1, 1.0
    sampling = checked(
        lambda: SamplingConfig(
            temperature=temperature,
            top_k=top_k,
            top_p=0.0 if top_p == 1 else top_p,
            min_p=fields.number("min_p", 0.0, 0, 1),
            repetition_penalty=fields.number("repetition_penalty", 1.0, 0, 10, above=True),
            presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
            frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
        )
    )
    is_stream = fields.flag("stream")
    stream_options = Fields(fields.object("stream_options"))
    has_usage = stream_options.flag("include_usage")
    stream_options.finish(["include_obfuscation"])
    return TextOptions(
        sampling=sampling,
        rules=TokenRules(bias=_bias(fields, served.vocab_size)),
        seed=fields.integer("seed", secrets.randbelow(_MAX_SEED), 0, _MAX_SEED),
        stop=fields.texts("stop", 16),
        n=fields.integer("n", 1, 1, MAX_TEXTS),
        is_stream=is_stream,
        has_usage=has_usage,
        ignore_eos=fields.flag("ignore_eos"),
        structure=_structure(fields),
    )


def _structure(fields: Fields) -> Structure | None:
    """Read ``response_format``: text, json_object, json_schema, or regex with a pattern."""
    wanted, name = Fields(fields.object("response_format")), "response_format"
    kind = wanted.text("type", "text")
    found = None
    if kind == "json_object":
        found = Structure("json_schema", '{"type": "object"}')
    elif kind == "regex":
        found = Structure("regex", wanted.text("pattern"))
    elif kind == "json_schema":
        given = Fields(wanted.object("json_schema"))
        schema = given.object("schema")
        given.finish(["name", "description", "strict"])
        found = Structure("json_schema", json.dumps(schema))
    elif kind != "text":
        raise RequestError(
            400,
            f"{name}: type {kind[:40]} is none of text, json_object, json_schema, regex.",
            name,
        )
    wanted.finish()
    if found is not None and find_spec("llguidance") is None:
        raise RequestError(
            400, f"{name} needs a server with pip install 'mcore-infer[structured]'.", name
        )
    return found


def checked(build: Callable[[], SamplingConfig]) -> SamplingConfig:
    """Build a config; what it refuses is the client's fault."""
    try:
        return build()
    except ValueError as error:
        raise RequestError(400, str(error)) from None


def num_tokens_for(served: ServedModel, prompt: Sequence[int], wanted: int | None) -> int:
    """Return how many tokens a text gets: what is wanted, within the context.

    Args:
        served: says how long texts are.
        prompt: token ids.
        wanted: tokens to write; None: as many as fit.
    """
    room = served.max_tokens - len(prompt)
    if room < 0 or (room == 0 and wanted != 0):
        raise RequestError(
            400,
            f"the maximum context length was exceeded: the prompt has {len(prompt)} tokens, "
            f"and {served.max_tokens} are the most for a prompt and its text.",
            "prompt",
        )
    return room if wanted is None else min(wanted, room)


def encode(served: ServedModel, text: str, field: str = "prompt") -> list[int]:
    """Turn a prompt into tokens; an empty one begins a document."""
    tokenizer = served.tokenizer
    try:
        ids = tokenizer.encode(text)
    except ValueError as error:
        raise RequestError(400, str(error), field) from None
    begin = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
    if not ids and begin is None:
        raise RequestError(400, f"{field} is empty, and no token begins a document.", field)
    return ids or [begin]  # pyrefly: ignore


def check_count(num_texts: int) -> None:
    """Refuse requests for too many texts."""
    if num_texts > MAX_TEXTS:
        raise RequestError(
            400, f"{num_texts} texts are more than {MAX_TEXTS}: prompts times n."
        )


def _bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    given = fields.object("logit_bias")
    if len(given) > _MAX_BIASES:
        raise RequestError(400, f"logit_bias has more than {_MAX_BIASES} tokens.", "logit_bias")
    found, values = [], Fields(given)
    for token in given:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise RequestError(400, f"logit_bias: {token[:20]} is no token id.", "logit_bias")
        if int(token) >= vocab_size:
            raise RequestError(
                400, f"logit_bias: {token} is no token id below {vocab_size}.", "logit_bias"
            )
        found.append((int(token), values.number(token, 0.0, -100, 100)))
    return tuple(found)
