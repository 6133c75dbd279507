"""Tokens to text: bytes of tokens, incremental decoding, answers up to a stop string.

``Answer`` releases text once no later token can change it: up to the last whole character, and
without a suffix that may be the start of a stop string. A stream and a complete answer consist
of the same pieces.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

from mcore_data.tokenizers.hf import HFTokenizer, byte_letters
from mcore_data.tokenizers.protocol import Tokenizer
from mcore_infer.writing.sequence import FinishReason, Generation, NewToken, Top


class TokenTexts:
    """Bytes and names of the tokens of one tokenizer.

    Attributes:
        tokenizer: tokenizer of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._names: dict[int, str] = {}  # cache of ``name``

    @cached_property
    def _known(self) -> Sequence[bytes | None]:
        if isinstance(self.tokenizer, HFTokenizer):
            return _hf_token_bytes(self.tokenizer)
        if isinstance(self.tokenizer, _HasTokenBytes):
            return self.tokenizer.token_bytes()
        return ()

    def of(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; for a special token, its name."""
        known = self._known[token] if token < len(self._known) else None
        return self.tokenizer.decode([token]).encode() if known is None else known

    def name(self, token: int) -> str:
        r"""Return a token's text; other bytes than UTF-8 as ``bytes:\xe4``, as OpenAI."""
        if token not in self._names:
            text = self.of(token)
            try:
                self._names[token] = text.decode()
            except UnicodeDecodeError:
                escaped = "".join(f"\\x{byte:02x}" for byte in text)
                self._names[token] = f"bytes:{escaped}"
        return self._names[token]

    @cached_property
    def longest(self) -> int:
        """Number of bytes of the longest token; 0: unknown."""
        return max((len(known) for known in self._known if known is not None), default=0)

    def fewest(self, text: str) -> int:
        """Return a lower bound of the number of a text's tokens, from the text's length."""
        return -(-len(text) // self.longest) if self.longest else 0

    def by_name(self, top: Top) -> dict[str, float]:
        """Return log probabilities by the names of their tokens, likeliest last.

        If two tokens have the same name, the less likely one is named ``token_id:`` and its id.
        """
        by_name: dict[str, float] = {}
        for token, value in top:
            name = self.name(token)
            by_name[f"token_id:{token}" if name in by_name else name] = value
        return dict(reversed(by_name.items()))


def with_drawn(token: NewToken) -> Top:
    """Return a token's likeliest alternatives, with the token itself appended if missing."""
    is_complete = token.log_prob is None or any(i == token.id for i, _ in token.top)
    return token.top if is_complete else (*token.top, (token.id, token.log_prob or 0.0))


@runtime_checkable
class _HasTokenBytes(Protocol):
    def token_bytes(self) -> list[bytes | None]: ...


def _hf_token_bytes(tokenizer: HFTokenizer) -> list[bytes | None]:
    """Return the bytes of every token: the piece after the steps of the tokenizer's decoder."""
    decoders = _parts(json.loads(tokenizer.text).get("decoder") or {})
    kinds = {decoder.get("type") for decoder in decoders}
    letters = {letter: byte for byte, letter in enumerate(byte_letters())}
    replacements = [
        (decoder["pattern"]["String"], decoder["content"])
        for decoder in decoders
        if decoder.get("type") == "Replace" and "String" in decoder.get("pattern", {})
    ]
    if "Metaspace" in kinds:
        replacements.append(("\u2581", " "))
    added = tokenizer.core.get_added_tokens_decoder()
    token_bytes: list[bytes | None] = [None] * tokenizer.vocab_size
    for piece, i in tokenizer.core.get_vocab().items():
        if i in added:
            token_bytes[i] = added[i].content.encode()
        elif "ByteFallback" in kinds and len(piece) == 6 and piece[:3] == "<0x":
            token_bytes[i] = bytes([int(piece[3:5], 16)])
        elif "ByteLevel" in kinds and all(letter in letters for letter in piece):
            token_bytes[i] = bytes(letters[letter] for letter in piece)
        elif "WordPiece" in kinds:
            token_bytes[i] = piece.removeprefix("##").encode()
        else:
            for old, new in replacements:
                piece = piece.replace(old, new)  # noqa: PLW2901
            token_bytes[i] = piece.encode()
    return token_bytes


def _parts(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder.get("type") == "Sequence":
        return [part for inner in decoder["decoders"] for part in _parts(inner)]
    return [decoder]


_INCOMPLETE = "\ufffd"


class TextStream:
    """Decodes the tokens of one text, as they arrive, into pieces of text.

    A token may be a part of a character, and decoders may join a token to its neighbours. Each
    token is therefore decoded together with earlier tokens, and a piece is returned once its
    last character is complete.
    """

    def __init__(self, tokenizer: Tokenizer, kept: Mapping[int, str] | None = None) -> None:
        """Start without tokens.

        Args:
            tokenizer: tokenizer of the text; special tokens have no text.
            kept: texts of special tokens that are part of the text, by id.
        """
        self.tokenizer, self._kept = tokenizer, kept or {}
        self._ids: list[int] = []
        self._context = 0  # returned tokens that are decoded again as context
        self._num_returned = 0  # tokens whose text has been returned

    def add(self, token: int) -> str:
        """Add a token; return the text of all tokens that became complete, possibly empty."""
        self._ids.append(token)
        piece = self._new_text()
        if not piece or piece.endswith(_INCOMPLETE):
            return ""
        self._advance()
        return piece

    def rest(self) -> str:
        """Return the remaining text after the last token."""
        piece = self._new_text()
        self._advance()
        return piece

    def _new_text(self) -> str:
        # Decode the context again: the difference is the text of the new tokens.
        returned = self._decode(self._context, self._num_returned)
        return self._decode(self._context, len(self._ids))[len(returned) :]

    def _advance(self) -> None:
        self._context, self._num_returned = self._num_returned, len(self._ids)

    def _decode(self, begin: int, end: int) -> str:
        ids = self._ids[begin:end]
        if self._kept.keys().isdisjoint(ids):
            return self.tokenizer.decode(ids, skip_special_tokens=True)
        parts = []
        for is_kept, run in groupby(ids, key=self._kept.__contains__):
            if is_kept:
                parts += [self._kept[token] for token in run]
            else:
                parts.append(self.tokenizer.decode(list(run), skip_special_tokens=True))
        return "".join(parts)


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of a text that is a prefix of a mark."""
    begin = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while begin >= 0:
        if mark.startswith(text[begin:]):
            return len(text) - begin
        begin = text.find(mark[0], begin + 1)
    return 0


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer with its log probabilities."""

    id: int
    log_prob: float | None
    """None for the first token of a prompt."""
    top: Top
    """The likeliest tokens at the token's position, including the token itself."""
    offset: int
    """Position of the token's first character in the text."""


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """Text and tokens that a new token released."""

    text: str
    tokens: tuple[ScoredToken, ...]
    """Tokens whose text starts in this piece."""


class Answer:
    """Decodes the tokens of one text into pieces, and ends the text at a stop string.

    Attributes:
        written: all tokens of the engine, with stop string and end token.
        finish_reason: None while the text is being written.
        result: result of the engine; None if a stop string ended the text.
    """

    def __init__(
        self,
        texts: TokenTexts,
        *,
        eod: int | None = None,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        keeps_stop: bool = False,
        is_scored: bool = False,
        offset: int = 0,
        kept: Mapping[int, str] | None = None,
    ) -> None:
        """Start with an empty text.

        Args:
            texts: bytes and names of the tokenizer's tokens.
            eod: token that ends the text and is not part of it.
            stop: strings that end the text.
            min_tokens: number of tokens before which stop strings are ignored.
            keeps_stop: whether a stop string is part of the text.
            is_scored: whether pieces contain scored tokens.
            offset: length of the text before the answer.
            kept: texts of special tokens that are part of the text, by id.
        """
        self.written: list[NewToken] = []
        self.finish_reason: FinishReason | None = None
        self.result: Generation | None = None
        self._eod, self._stop, self._min_tokens = eod, stop, min_tokens
        self._keeps_stop, self._is_scored = keeps_stop, is_scored
        self._stream = TextStream(texts.tokenizer, kept)
        self._held = ""  # text that may be the start of a stop string
        self._held_tokens: list[ScoredToken] = []
        self._decoded = self._released = offset  # lengths of decoded and of returned text

    @property
    def ids(self) -> list[int]:
        """Ids of the written tokens."""
        return [token.id for token in self.written]

    def add(self, token: NewToken) -> AnswerPiece:
        """Add a token; return the piece of text that became final."""
        assert self.finish_reason is None
        self.written.append(token)
        if token.id == self._eod:
            return AnswerPiece("", ())
        if self._is_scored:
            top = with_drawn(token)
            self._held_tokens.append(ScoredToken(token.id, token.log_prob, top, self._decoded))
        return self._take(self._stream.add(token.id))

    def finish(self, result: Generation) -> AnswerPiece:
        """Add the engine's result; return the rest of the text."""
        piece = self._take(self._stream.rest())
        if self.finish_reason:
            return piece
        self.result, self.finish_reason = result, result.finish_reason
        text, self._held = piece.text + self._held, ""
        tokens, self._held_tokens = (*piece.tokens, *self._held_tokens), []
        return AnswerPiece(text, tokens)

    def _take(self, text: str) -> AnswerPiece:
        self._held += text
        self._decoded += len(text)
        stop = self._stop if len(self.written) >= self._min_tokens else ()
        matches = [(begin, mark) for mark in stop if (begin := self._held.find(mark)) >= 0]
        if matches:
            begin, mark = min(matches, key=lambda match: match[0])  # the first in the text
            self.finish_reason = "stop"
            return self._release(begin + len(mark) * self._keeps_stop)
        longest = max((overlap(self._held, mark) for mark in stop), default=0)
        return self._release(len(self._held) - longest)

    def _release(self, length: int) -> AnswerPiece:
        text, self._held = self._held[:length], self._held[length:]
        self._released += length
        count = sum(token.offset < self._released for token in self._held_tokens)
        tokens, self._held_tokens = self._held_tokens[:count], self._held_tokens[count:]
        return AnswerPiece(text, tuple(tokens))


def prompt_tokens(
    texts: TokenTexts, prompt: Sequence[int], result: Generation
) -> Iterator[ScoredToken]:
    """Yield the tokens of a prompt with their scores in a result, and their text positions."""
    log_probs: list[float | None] = [None, *result.prompt_log_probs]
    top: list[Top] = [(), *(result.prompt_top or [()] * (len(prompt) - 1))]
    stream, offset = TextStream(texts.tokenizer), 0
    for token, log_prob, likeliest in zip(prompt, log_probs, top, strict=True):
        alternatives = with_drawn(NewToken(0, token, log_prob, likeliest))
        yield ScoredToken(token, log_prob, alternatives, offset)
        offset += len(stream.add(token))
