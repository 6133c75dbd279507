"""One answer from tokens: its text without stop strings, its scores, and why it ended.

Text is released once no later token can change it: at whole characters, and not while it may
be the beginning of a stop string. A stream and a whole answer are the same pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mcore_data.tokenizers.protocol import Tokenizer
from mcore_infer.streaming import TextStream
from mcore_infer.writing import Generation, NewToken, Top


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer, for those who want log probabilities."""

    id: int
    text: str
    """By itself, which for a part of a character is a replacement character."""
    log_prob: float | None
    """None for the first token of a prompt."""
    top: tuple[tuple[str, float], ...]
    offset: int
    """Where it begins in the text."""


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """What became certain with a token."""

    text: str
    tokens: tuple[ScoredToken, ...]
    """Whose text begins in this piece."""


class Answer:
    """Collects the tokens of one text.

    Attributes:
        written: tokens of the engine, those of a stop string and an end included.
        finish_reason: why it ended; None while it goes on.
        result: of the engine, unless a stop string ended the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eod: int | None = None,
        stop: Sequence[str] = (),
        keeps_stop: bool = False,
        is_scored: bool = False,
        offset: int = 0,
    ) -> None:
        """Begin with no text.

        Args:
            tokenizer: whose tokens are coming.
            eod: token that ends the text and is no part of it.
            stop: strings that end the text.
            keeps_stop: whether the string that ended the text is a part of it.
            is_scored: whether pieces have tokens.
            offset: length of the text before.
        """
        self.written: list[NewToken] = []
        self.finish_reason: Literal["stop", "length"] | None = None
        self.result: Generation | None = None
        self._tokenizer, self._eod, self._stop = tokenizer, eod, stop
        self._keeps_stop, self._is_scored = keeps_stop, is_scored
        self._stream = TextStream(tokenizer)
        self._held = ""  # may be the beginning of a stop string
        self._held_tokens: list[ScoredToken] = []
        self._decoded = self._released = offset  # lengths of text

    @property
    def ids(self) -> list[int]:
        """Token ids of what was written."""
        return [token.id for token in self.written]

    def add(self, token: NewToken) -> AnswerPiece:
        """Take a token; return what became certain."""
        assert self.finish_reason is None
        self.written.append(token)
        if token.id == self._eod:
            return AnswerPiece("", ())
        if self._is_scored:
            scored = scored_token(self._tokenizer, token, self._decoded)
            self._held_tokens.append(scored)
        return self._take(self._stream.add(token.id))

    def finish(self, result: Generation) -> AnswerPiece:
        """Take the end of the text; return what is left of it."""
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
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda pair: pair[0])
            self.finish_reason = "stop"
            return self._release(at + len(stop) * self._keeps_stop)
        longest = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        return self._release(len(self._held) - longest)

    def _release(self, length: int) -> AnswerPiece:
        text, self._held = self._held[:length], self._held[length:]
        self._released += length
        count = sum(token.offset < self._released for token in self._held_tokens)
        tokens, self._held_tokens = self._held_tokens[:count], self._held_tokens[count:]
        return AnswerPiece(text, tuple(tokens))


def scored_token(tokenizer: Tokenizer, token: NewToken, offset: int) -> ScoredToken:
    """Put a token and its likeliest rivals into words."""
    top = tuple((tokenizer.decode([i]), value) for i, value in token.top)
    return ScoredToken(token.id, tokenizer.decode([token.id]), token.log_prob, top, offset)


def prompt_tokens(
    tokenizer: Tokenizer, prompt: Sequence[int], result: Generation
) -> list[ScoredToken]:
    """Put the tokens of a prompt into words, with the scores that were computed."""
    log_probs: list[float | None] = [None, *result.prompt_log_probs]
    top: list[Top] = [(), *(result.prompt_top or [()] * (len(prompt) - 1))]
    stream, offset, found = TextStream(tokenizer), 0, []
    for token, log_prob, its_top in zip(prompt, log_probs, top, strict=True):
        found.append(scored_token(tokenizer, NewToken(0, token, log_prob, its_top), offset))
        offset += len(stream.add(token))
    return found


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text with which a stop string begins."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
