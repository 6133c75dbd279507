"""Engine requests of a valid body, and the base classes of all interfaces' replies.

Tokenizes prompts, applies defaults and limits of the served model, and raises ``RequestError``
with the wrong field.
"""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from json import dumps
from typing import Any

from mcore_data.tokenizers.protocol import Tokenizer
from mcore_infer.config import MAX_SEED, SamplingConfig
from mcore_infer.server.schemas import MAX_TEXTS, RequestError, TextBody
from mcore_infer.writing.chat_format import ChatFormat
from mcore_infer.writing.grammars import Structure
from mcore_infer.writing.sequence import ScoreRequest, TextRequest, TokenRules
from mcore_infer.writing.token_text import Answer, AnswerPiece, TokenTexts

_FALLBACKS = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Sampling of OpenAI's interfaces if neither the request nor the model sets a value."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """Names, tokenizer, limits and defaults of the model that the interfaces serve."""

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    max_tokens: int
    """Most tokens of a prompt and its text together."""
    ends: tuple[int, ...] = ()
    """Tokens that end a text, in addition to the tokenizer's end of document."""
    adapters: tuple[str, ...] = ()
    """Names of adapters, which requests give as their ``model``."""
    chat: ChatFormat | None = None
    """Chat template; None: jinja2 is missing."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Default sampling of OpenAI's interfaces: ``LoadedModel.sampling_defaults``."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model and of its adapters."""
        return (self.name, *self.adapters)

    @cached_property
    def texts(self) -> TokenTexts:
        """Bytes and names of the tokenizer's tokens."""
        return TokenTexts(self.tokenizer)


class Reply(ABC):
    """One HTTP request: its engine requests, their texts, and the answer built from them.

    Attributes:
        served: the model.
        requests: texts to write.
        answers: texts so far, one for each request.
        is_stream: whether the answer is sent event by event.
        has_plain_errors: whether errors are plain strings, as in Megatron's interface.
    """

    is_stream = has_plain_errors = False

    def __init__(
        self, served: ServedModel, requests: list[TextRequest], answers: list[Answer]
    ) -> None:
        self.served, self.requests, self.answers = served, requests, answers

    @property
    def num_written(self) -> int:
        """Tokens of all texts so far."""
        return sum(len(answer.written) for answer in self.answers)

    @property
    def structures(self) -> set[Structure]:
        """Structures of all texts."""
        return {request.structure for request in self.requests if request.structure}

    def first_events(self) -> Sequence[Any]:
        """Return the events of a stream before any text."""
        return ()

    def event(self, index: int, piece: AnswerPiece) -> Any:
        """Return the event of a new piece of text ``index``; None: no event."""
        del index, piece

    def last_events(self) -> Sequence[Any]:
        """Return the events of a stream after all texts."""
        return ()

    @abstractmethod
    def complete(self, pieces: Sequence[Sequence[AnswerPiece]]) -> Any:
        """Return the answer from all pieces of each text; long lists may be iterators."""


class OpenAIReply(Reply):
    """Base of replies in OpenAI's format; ``usage`` counts a prompt of several texts once."""

    def __init__(
        self,
        body: TextBody,
        served: ServedModel,
        requests: list[TextRequest],
        answers: list[Answer],
        *,
        kind: str,
        id_prefix: str,
    ) -> None:
        super().__init__(served, requests, answers)
        self.is_stream = body.stream
        self._sends_usage = body.stream_options.include_usage
        self._prompt_tokens = sum(len(request.prompt) for request in requests[:: body.n])
        self.head = {
            "id": f"{id_prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": body.model or served.name,
        }

    def last_events(self) -> Sequence[Any]:
        """Return the event of token counts, if ``include_usage`` is set."""
        return [{**self.head, "choices": [], "usage": self.usage()}] * self._sends_usage

    def usage(self) -> dict[str, int]:
        """Return the token counts."""
        written = self.num_written
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self._prompt_tokens + written,
        }


def check_model(body: TextBody, served: ServedModel) -> None:
    """Raise RequestError if the body names neither the model nor an adapter."""
    if body.model is not None and body.model not in served.names:
        raise unknown_model(body.model, served)


def unknown_model(name: str, served: ServedModel) -> RequestError:
    """Return the error of a name that is neither the model's nor an adapter's."""
    names = f"{', '.join(served.names)} {'are' if served.adapters else 'is'} served."
    message = f"the model {name[:100]} is not served: {names}"
    return RequestError(404, message, "model", "model_not_found")


def text_requests(
    body: TextBody,
    served: ServedModel,
    prompts: Sequence[tuple[Sequence[int], int]],
    *,
    scores: ScoreRequest,
    structure: Structure | None,
    end_texts: Sequence[str] = (),
    end_ids: Sequence[int] = (),
    offsets: Sequence[int] = (),
    kept: Mapping[int, str] | None = None,
) -> tuple[list[TextRequest], list[Answer]]:
    """Build engine requests and empty answers, ``n`` for each prompt; text i has seed + i.

    Args:
        body: sampling and stops.
        served: the model.
        prompts: token ids, and the number of tokens to write after them.
        scores: log probabilities to return.
        structure: grammar of the texts; None: any text.
        end_texts: strings that end a text without a structure, in addition to the body's.
        end_ids: tokens that end a text without a structure, in addition to the model's.
        offsets: length of the text before each prompt's answers; empty: 0.
        kept: names of special tokens that are part of the text, by id.
    """
    if len(prompts) * body.n > MAX_TEXTS:
        message = (
            f"{len(prompts)} prompts times n={body.n} are more than {MAX_TEXTS} texts: give "
            "fewer prompts or a smaller n."
        )
        raise RequestError(400, message)
    if structure is not None and body.min_tokens:
        message = "min_tokens and a structure exclude each other: the structure ends the text."
        raise RequestError(400, message, "min_tokens")
    eod = None if body.ignore_eos else served.tokenizer.eod
    strings, sequences = _split_stops(body.stop, served.tokenizer)
    sequences += [[token] for token in body.stop_token_ids]
    if not body.ignore_eos:
        sequences += [[token] for token in served.ends]
        # Inside a structure such marks may be part of a value, and the grammar ends the text.
        if structure is None:
            sequences += [[token] for token in end_ids]
            strings += end_texts
    ends = [sequence[0] for sequence in sequences if len(sequence) == 1]
    ends += [] if eod is None else [eod]
    if ends and max(ends) >= served.vocab_size:
        message = f"stop_token_ids must be token ids from 0 to {served.vocab_size - 1}."
        raise RequestError(400, message, "stop_token_ids")
    rules = TokenRules(bias=_bias(body, served.vocab_size))
    if body.min_tokens:
        rules = TokenRules(bias=rules.bias, min_tokens=body.min_tokens, ends=tuple(ends))
    sampling, seed = _sampling(body, served), seed_or_random(body.seed)
    adapter = body.model if body.model in served.adapters else ""
    requests, answers = [], []
    for number, (ids, num_tokens) in enumerate(prompts):
        for _ in range(body.n):
            requests.append(
                TextRequest(
                    prompt=ids,
                    sampling=sampling,
                    num_tokens=num_tokens,
                    seed=seed + len(requests),
                    eod=eod,
                    stop=sequences,
                    rules=rules,
                    scores=scores,
                    structure=structure,
                    adapter=adapter,
                )
            )
            answers.append(
                Answer(
                    served.texts,
                    eod=eod,
                    stop=strings,
                    min_tokens=body.min_tokens,
                    is_scored=scores.log_probs,
                    offset=offsets[number] if offsets else 0,
                    kept=kept,
                )
            )
    return requests, answers


def response_structure(body: TextBody) -> Structure | None:
    """Return the structure of a body's ``response_format``; None: any text."""
    format = body.response_format
    if format.type == "text":
        return None
    check_structured_output("response_format")
    if format.type == "regex":
        return Structure("regex", format.pattern or "")
    schema = format.json_schema.schema_ if format.json_schema else {"type": "object"}
    return Structure("json_schema", dumps(schema))


def check_structured_output(field: str) -> None:
    """Raise RequestError for a field that needs llguidance, if llguidance is not installed."""
    if find_spec("llguidance") is None:
        message = (
            f"{field} needs llguidance on the server: pip install 'mcore-infer[structured]'."
        )
        raise RequestError(400, message, field)


def seed_or_random(seed: int | None) -> int:
    """Return a seed from 0 to ``MAX_SEED``; None: a random seed."""
    return secrets.randbelow(MAX_SEED) if seed is None else seed % (MAX_SEED + 1)


def build_sampling(build: Callable[[], SamplingConfig]) -> SamplingConfig:
    """Return the result of ``build``; a ValueError becomes a RequestError."""
    try:
        return build()
    except ValueError as error:
        raise RequestError(400, str(error)) from None


def num_tokens_for(served: ServedModel, prompt: Sequence[int], max_tokens: int | None) -> int:
    """Return the number of tokens to write after a prompt, limited by the context length.

    Args:
        served: model with the context length ``max_tokens``.
        prompt: token ids.
        max_tokens: requested number of tokens; None: as many as fit.

    Raises:
        RequestError: if the prompt leaves no room for a token.
    """
    num_free = served.max_tokens - len(prompt)
    if num_free < 0 or (num_free == 0 and max_tokens != 0):
        raise _too_long(served, f"{len(prompt)}")
    return num_free if max_tokens is None else min(max_tokens, num_free)


def encode(
    served: ServedModel, text: str, field: str = "prompt", *, is_rendered: bool = False
) -> list[int]:
    """Tokenize a prompt and return its ids.

    An empty prompt becomes the token that starts a document, unless a template rendered the
    prompt. A prompt with too many characters for the context is refused before tokenization.
    """
    tokenizer = served.tokenizer
    if (fewest := served.texts.fewest(text)) > served.max_tokens:
        raise _too_long(served, f"{fewest} or more", field)
    try:
        # The tokenizer libraries release the interpreter lock for batches only.
        (ids,) = tokenizer.encode_batch([text], add_special_tokens=not is_rendered)
    except (ValueError, TypeError) as error:
        raise RequestError(400, str(error), field) from None
    begin = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
    if ids or is_rendered:
        return ids
    if begin is None:
        raise RequestError(400, f"{field} is empty, and no token begins a document.", field)
    return [begin]


def _too_long(served: ServedModel, num_tokens: str, field: str = "prompt") -> RequestError:
    message = (
        f"the maximum context length was exceeded: the prompt has {num_tokens} tokens, and "
        f"{served.max_tokens} is the maximum for prompt and text together."
    )
    return RequestError(400, message, field, "context_length_exceeded")


def _sampling(body: TextBody, served: ServedModel) -> SamplingConfig:
    values: dict[str, Any] = {}
    for name, fallback in _FALLBACKS.items():
        value = getattr(body, name)
        values[name] = served.defaults.get(name, fallback) if value is None else value
    values["top_k"] = max(0, values["top_k"])
    if not values["temperature"]:  # greedy decoding
        values |= {"temperature": 1.0, "top_k": 1, "top_p": 1.0}
    if values["top_p"] == 1:
        values["top_p"] = 0.0
    return build_sampling(
        lambda: SamplingConfig(
            **values,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
        )
    )


def _bias(body: TextBody, vocab_size: int) -> tuple[tuple[int, float], ...]:
    for token in body.logit_bias:
        if int(token) >= vocab_size:
            message = f"logit_bias: {token} is not a token id from 0 to {vocab_size - 1}."
            raise RequestError(400, message, "logit_bias")
    return tuple((int(token), float(value)) for token, value in body.logit_bias.items())


def _split_stops(
    stop: str | Sequence[str], tokenizer: Tokenizer
) -> tuple[list[str], list[list[int]]]:
    """Split stops into strings and token sequences.

    A stop with special tokens becomes a token sequence, because decoding removes their text.
    """
    strings, sequences = [], []
    for text in [stop] if isinstance(stop, str) else stop:
        token = tokenizer.token_id(text)
        ids = tokenizer.encode(text, add_special_tokens=False) if token is None else [token]
        if tokenizer.decode(ids) != tokenizer.decode(ids, skip_special_tokens=True):
            sequences.append(ids)
        else:
            strings.append(text)
    return strings, sequences
