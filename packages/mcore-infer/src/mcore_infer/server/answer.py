"""One answer from tokens: its text without stop strings, its scores, and why it ended.

Text is released once no later token can change it: at whole characters, and not while it may
be the beginning of a stop string. A stream and a whole answer are the same pieces.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mcore_infer.writing.sequence import FinishReason, Generation, NewToken, Top
from mcore_infer.writing.token_text import TextStream, TokenTexts, overlap, with_drawn


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer, for those who want log probabilities."""

    id: int
    log_prob: float | None
    """None for the first token of a prompt."""
    top: Top
    """The likeliest tokens of its place, and itself."""
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
        """Begin with no text.

        Args:
            texts: of the tokens that are coming.
            eod: token that ends the text and is no part of it.
            stop: strings that end the text.
            min_tokens: before so many tokens no stop string counts.
            keeps_stop: whether the string that ended the text is a part of it.
            is_scored: whether pieces have tokens.
            offset: length of the text before.
            kept: special tokens that are part of the text, by id, and their names.
        """
        self.written: list[NewToken] = []
        self.finish_reason: FinishReason | None = None
        self.result: Generation | None = None
        self._eod, self._stop, self._min_tokens = eod, stop, min_tokens
        self._keeps_stop, self._is_scored = keeps_stop, is_scored
        self._stream = TextStream(texts.tokenizer, kept)
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
            top = with_drawn(token)
            self._held_tokens.append(ScoredToken(token.id, token.log_prob, top, self._decoded))
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
    """Return the tokens of a prompt with the scores that were computed."""
    log_probs: list[float | None] = [None, *result.prompt_log_probs]
    top: list[Top] = [(), *(result.prompt_top or [()] * (len(prompt) - 1))]
    stream, offset, found = TextStream(texts.tokenizer), 0, []
    for token, log_prob, its_top in zip(prompt, log_probs, top, strict=True):
        own = with_drawn(NewToken(0, token, log_prob, its_top))
        found.append(ScoredToken(token, log_prob, own, offset))
        offset += len(stream.add(token))
    return found
