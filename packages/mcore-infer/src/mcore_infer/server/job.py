"""What a request to the server becomes: texts to write, and how their reply looks."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol, runtime_checkable

from mcore_data.datasets.chat import Render
from mcore_data.tokenizers.protocol import Tokenizer
from mcore_infer.config import MAX_SEED, SamplingConfig
from mcore_infer.server.answer import Answer, AnswerPiece
from mcore_infer.server.fields import (
    Flag,
    Group,
    Integer,
    Number,
    Own,
    RequestError,
    Schema,
    Table,
    Text,
    Texts,
    Variants,
    as_object,
)
from mcore_infer.server.worker import TextRequest
from mcore_infer.structured import Structure
from mcore_infer.writing import TokenRules

MAX_TEXTS = 128
"""Texts of one request: prompts times ``n``."""
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

    def event(self, index: int, piece: AnswerPiece) -> Any:
        """Return the event of a new piece of text ``index``."""

    def end(self) -> Sequence[Any]:
        """Return the events behind all texts."""

    def whole(self, pieces: Sequence[Sequence[AnswerPiece]]) -> Any:
        """Return the answer from the pieces of each text."""


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


def options_table(served: ServedModel) -> Table:
    """Return the fields that completions and chats share."""

    def bias(given: Any) -> tuple[tuple[int, float], ...]:
        return _bias(given, served.vocab_size)

    return {
        "temperature": Number(1.0, 0, 100),
        "top_p": Number(1.0, 0, 1, above=True),
        "top_k": Integer(0, -1, served.vocab_size),
        "min_p": Number(0.0, 0, 1),
        "repetition_penalty": Number(1.0, 0, 10, above=True),
        "presence_penalty": Number(0.0, -2, 2),
        "frequency_penalty": Number(0.0, -2, 2),
        "stream": Flag(),
        "stream_options": Group({"include_usage": Flag()}, ("include_obfuscation",)),
        "logit_bias": Own(bias, _BIAS),
        "seed": Integer(None, 0, MAX_SEED),
        "stop": Texts(16),
        "n": Integer(1, 1, MAX_TEXTS),
        "ignore_eos": Flag(),
        "response_format": Variants(_FORMATS),
    }


def text_options(fields: Mapping[str, Any]) -> TextOptions:
    """Return what the fields of ``options_table`` mean together."""
    temperature, top_k, top_p = fields["temperature"], max(0, fields["top_k"]), fields["top_p"]
    if not temperature:  # the likeliest token always
        temperature, top_k, top_p = 1.0, 1, 1.0
    sampling = checked(
        lambda: SamplingConfig(
            temperature=temperature,
            top_k=top_k,
            top_p=0.0 if top_p == 1 else top_p,
            min_p=fields["min_p"],
            repetition_penalty=fields["repetition_penalty"],
            presence_penalty=fields["presence_penalty"],
            frequency_penalty=fields["frequency_penalty"],
        )
    )
    return TextOptions(
        sampling=sampling,
        rules=TokenRules(bias=fields["logit_bias"]),
        seed=seed_of(fields["seed"]),
        stop=fields["stop"],
        n=fields["n"],
        is_stream=fields["stream"],
        has_usage=fields["stream_options"]["include_usage"],
        ignore_eos=fields["ignore_eos"],
        structure=_structure(*fields["response_format"]),
    )


def seed_of(given: int | None) -> int:
    """Return the seed, or a random one."""
    return secrets.randbelow(MAX_SEED) if given is None else given


def _structure(kind: str, wanted: Mapping[str, Any]) -> Structure | None:
    """Return what ``response_format`` holds a text to; None: nothing."""
    if kind == "text":
        return None
    if find_spec("llguidance") is None:
        raise RequestError(
            400,
            "response_format needs a server with pip install 'mcore-infer[structured]'.",
            "response_format",
        )
    if kind == "regex":
        return Structure("regex", wanted["pattern"])
    if kind == "json_object":
        return Structure("json_schema", '{"type": "object"}')
    return Structure("json_schema", json.dumps(wanted["json_schema"]["schema"]))


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


def _bias(given: Any, vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases, name = as_object("logit_bias", given), "logit_bias"
    if len(biases) > _MAX_BIASES:
        raise RequestError(400, f"{name} has more than {_MAX_BIASES} tokens.", name)
    found = []
    for token, value in biases.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise RequestError(400, f"{name}: {token[:20]} is no token id.", name)
        if int(token) >= vocab_size:
            raise RequestError(400, f"{name}: {token} is no token id below {vocab_size}.", name)
        found.append((int(token), _BIAS_VALUE.read(token, value)))
    return tuple(found)


_BIAS_VALUE = Number(0.0, -100, 100)
_BIAS: Schema = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": _BIAS_VALUE.schema(),
    "maxProperties": _MAX_BIASES,
}
_SCHEMA = Own(partial(as_object, "schema"), {"type": "object"})
_FORMATS: Mapping[str, Table] = {
    "text": {},
    "json_object": {},
    "json_schema": {
        "json_schema": Group({"schema": _SCHEMA}, ("name", "description", "strict"))
    },
    "regex": {"pattern": Text()},
}
"""What ``response_format`` may be, by its type."""
