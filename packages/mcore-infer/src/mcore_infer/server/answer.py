"""Builds an answer from tokens: text up to a stop string, log probabilities, finish reason.

Text is released once no later token can change it: after whole characters, and not while it may
be the start of a stop string. A stream and a whole answer consist of the same pieces.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mcore_infer.writing.sequence import FinishReason, Generation, NewToken, Top
from mcore_infer.writing.token_text import TextStream, TokenTexts, overlap, with_drawn


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer with its log probabilities."""

    id: int
    log_prob: float | None
    """None for the first token of a prompt."""
    top: Top
    """The likeliest tokens at its position, and the token itself."""
    offset: int
    """Position of its first character in the text."""


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """Text and tokens that a new token released."""

    text: str
    tokens: tuple[ScoredToken, ...]
    """Tokens whose text starts in this piece."""


class Answer:
    """Turns the tokens of one text into pieces.

    Attributes:
        written: all tokens of the engine, with stop string and end token.
        finish_reason: None while the text is being written.
        result: of the engine; None if a stop string ended the text.
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
            texts: decodes tokens.
            eod: token that ends the text and is not part of it.
            stop: strings that end the text.
            min_tokens: tokens before which stop strings are ignored.
            keeps_stop: whether the string that ended the text is a part of it.
            is_scored: whether pieces contain scored tokens.
            offset: length of the text before.
            kept: special tokens that are part of the text, by id, and their names.
        """
        self.written: list[NewToken] = []
        self.finish_reason: FinishReason | None = None
        self.result: Generation | None = None
        self._eod, self._stop, self._min_tokens = eod, stop, min_tokens
        self._keeps_stop, self._is_scored = keeps_stop, is_scored
        self._stream = TextStream(texts.tokenizer, kept)
        self._held = ""  # text that may be the start of a stop string
        self._held_tokens: list[ScoredToken] = []
        self._decoded = self._released = offset  # lengths of text

    @property
    def ids(self) -> list[int]:
        """Token ids of what was written."""
        return [token.id for token in self.written]

    def add(self, token: NewToken) -> AnswerPiece:
        """Add a token; return the piece that it released."""
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
        found = [(at, one) for one in stop if (at := self._held.find(one)) >= 0]
        if found:
            at, one = min(found, key=lambda pair: pair[0])
            self.finish_reason = "stop"
            return self._release(at + len(one) * self._keeps_stop)
        longest = max((overlap(self._held, one) for one in stop), default=0)
        return self._release(len(self._held) - longest)

    def _release(self, length: int) -> AnswerPiece:
        text, self._held = self._held[:length], self._held[length:]
        self._released += length
        count = sum(token.offset < self._released for token in self._held_tokens)
        tokens, self._held_tokens = self._held_tokens[:count], self._held_tokens[count:]
        return AnswerPiece(text, tuple(tokens))


def prompt_tokens(
    texts: TokenTexts, prompt: Sequence[int], result: Generation
) -> list[ScoredToken]:
    """Return the tokens of a prompt with the scores of a result."""
    log_probs: list[float | None] = [None, *result.prompt_log_probs]
    top: list[Top] = [(), *(result.prompt_top or [()] * (len(prompt) - 1))]
    stream, offset, found = TextStream(texts.tokenizer), 0, []
    for token, log_prob, its_top in zip(prompt, log_probs, top, strict=True):
        own = with_drawn(NewToken(0, token, log_prob, its_top))
        found.append(ScoredToken(token, log_prob, own, offset))
        offset += len(stream.add(token))
    return found
