"""Request of one text, its state while the engine writes it, and its result.

Rank 0 sends a ``TextRequest`` to all ranks. A ``RunningSequence`` has the tokens written so
far, and returns each token once it is final.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from mcore_infer.config import SamplingConfig
from mcore_infer.writing.grammars import Structure
from mcore_infer.writing.structured import Matcher

Top = tuple[tuple[int, float], ...]
"""The likeliest tokens of one position, best first: ids and log probabilities."""


FinishReason = Literal["stop", "length", "error"]
"""Why a text ended. ``stop``: an end of document, a stop sequence, or the end of the structure;
``length``: the limit of tokens; ``error``: no token continues the text within its structure."""


@dataclass(frozen=True, slots=True)
class NewToken:
    """A final token of a text: no stop sequence can remove it any more."""

    row: int
    """Index of the prompt in a list, or the engine's request number."""
    id: int
    log_prob: float | None
    """Log probability before penalties, temperature and cut-off; None: not requested."""
    top: Top = ()
    """The likeliest tokens at its position; empty: not requested."""


@dataclass(frozen=True, slots=True)
class Beam:
    """One result of beam search."""

    ids: tuple[int, ...]
    score: float
    """Sum of log probabilities, divided by the length to the power of the length penalty."""
    has_end: bool
    """Whether the last token is an end token."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of one request."""

    ids: tuple[int, ...]
    """Token ids of the text, without the stop sequence; an end of document is included."""
    log_probs: tuple[float, ...]
    """Log probability of each id, before penalties, temperature and cut-off; empty: not
    requested."""
    finish_reason: FinishReason
    """Why the text ended."""
    top: tuple[Top, ...] = ()
    """The likeliest tokens at each position; empty: not requested."""
    prompt_log_probs: tuple[float, ...] = ()
    """Log probabilities of the prompt's tokens after the first; empty: not requested."""
    prompt_top: tuple[Top, ...] = ()
    """The likeliest tokens at the positions of ``prompt_log_probs``; empty: not requested."""
    beams: tuple[Beam, ...] = ()
    """Results of beam search, best first; ``ids`` is that of the first beam."""
    weights_versions: tuple[int, ...] = ()
    """Versions of the weights that wrote the tokens, in order; several if the weights changed
    while the text was written. Empty: beam search."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRules:
    """Changes to the logits of single tokens, on top of sampling and penalties."""

    bias: tuple[tuple[int, float], ...] = ()
    """Token ids, and the numbers added to their logits after penalties."""

    never_after: tuple[int, int] | None = None
    """A token, and the token that must not follow it."""

    min_tokens: int = 0
    """Tokens to write before any of ``ends`` is allowed."""

    ends: tuple[int, ...] = ()
    """Tokens that end a text; used with ``min_tokens``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRequest:
    """Log probabilities that a request returns; the engine computes no others."""

    log_probs: bool = True
    """Log probability of each written token."""

    num_top: int = 0
    """Likeliest tokens to return at each position."""

    prompt: bool = False
    """Also score the prompt's tokens; the prompt is then computed without shared pages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRequest:
    """One text to write after a prompt: sampling, limits, stops and scores."""

    prompt: Sequence[int]
    """Token ids, at least one."""

    sampling: SamplingConfig
    """How tokens are chosen; ``SamplingConfig.num_tokens`` is ignored."""

    num_tokens: int
    """Largest number of tokens to write; 0: only score the prompt."""

    seed: int
    """Seed of the random numbers that choose tokens."""

    eod: int | None = None
    """Token that ends the text; None: no token ends it."""

    stop: Sequence[Sequence[int]] = ()
    """Token sequences that end the text and are cut off."""

    rules: TokenRules = field(default_factory=TokenRules)
    """Changes to the logits of single tokens."""

    scores: ScoreRequest = field(default_factory=ScoreRequest)
    """Log probabilities to return."""

    structure: Structure | None = None
    """Grammar of the text; None: any text."""

    adapter: str = ""
    """Name of the adapter that writes the text; empty: the base model."""


class RunningSequence:
    """State of one text while the engine writes it: tokens, random numbers, structure.

    Attributes:
        request: the request of this text.
        prompt: token ids.
        sampling: how tokens are chosen.
        rules: changes to the logits of single tokens.
        matcher: state of the structure; None: any text.
        changes_scores: whether penalties or rules change the logits.
        needs_last_token: whether sampling itself, and not only the model, needs the previous
            token.
        ids: tokens so far, without stop sequences.
        prompt_log_probs: log probabilities of the prompt's tokens after the first; empty: not
            requested.
        prompt_top: the likeliest tokens at the positions of ``prompt_log_probs``.
        num_released: how many of ``ids`` were returned as final.
        weights_versions: versions of the weights that wrote the tokens, in order.
        finish_reason: None while the text is being written.
    """

    def __init__(self, request: TextRequest, matcher: Matcher | None = None) -> None:
        """Start an empty text.

        Args:
            request: prompt, sampling and limits.
            matcher: state at the start of the request's structure; None: any text.
        """
        self.request, self.matcher = request, matcher
        self.prompt, self.sampling = list(request.prompt), request.sampling
        self.rules = request.rules
        self.changes_scores = self.sampling.has_penalties or self.rules != TokenRules()
        self.needs_last_token = (
            self.changes_scores or matcher is not None or bool(self.sampling.top_p_decay)
        )
        self.num_tokens, self.eod = request.num_tokens, request.eod
        self.stop = [list(sequence) for sequence in request.stop if sequence]
        self.random = torch.Generator().manual_seed(request.seed)
        num_scored = len(self.prompt) - 1 if request.scores.prompt else 0
        self.prompt_log_probs = [math.nan] * num_scored  # NaN: not computed yet
        self.prompt_top: list[Top] = [()] * num_scored
        self._draws: list[float] = []  # random numbers drawn ahead and not consumed
        # Parallel lists of numbers instead of an object for each token: Python's garbage
        # collector would scan millions of objects while the device waits.
        self.ids: list[int] = []
        self._log_probs: list[float | None] = []
        self._tops: list[Top] = []
        self.num_released = 0
        self.weights_versions: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._cut = self.sampling.cut

    @property
    def cut(self) -> SamplingConfig:
        """Temperature, top-k and top-p of the next token, with the decay of top-p applied."""
        decay = self.sampling.top_p_decay
        if not decay:
            return self._cut
        top_p = self.sampling.top_p * decay ** len(self.ids)
        return replace(self._cut, top_p=max(top_p, self.sampling.top_p_bound))

    def draw(self) -> float:
        """Consume and return the next random number, uniform in [0, 1)."""
        number = self.draw_ahead(0)
        self.forget_draws(1)
        return number

    def draw_ahead(self, offset: int) -> float:
        """Return the random number ``offset`` positions after the next; consume none."""
        while len(self._draws) <= offset:
            number = torch.rand((), generator=self.random, dtype=torch.float64)
            self._draws.append(number.item())
        return self._draws[offset]

    def forget_draws(self, count: int) -> None:
        """Consume numbers that ``draw_ahead`` returned."""
        del self._draws[:count]

    def add(self, token: NewToken) -> list[NewToken]:
        """Append a token, end the text if due, and return the tokens that are now final.

        A token is final once no stop sequence can remove it.
        """
        if not self.num_tokens:
            self.finish_reason = "length"
            return []
        self.ids.append(token.id)
        self._log_probs.append(token.log_prob)
        self._tops.append(token.top)
        for sequence in self.stop:
            if self._ends_with(sequence):
                self._drop(len(sequence))
                self.finish_reason = "stop"
                break
        else:
            matcher = self.matcher
            if matcher is not None and not matcher.take(token.id):
                self._drop(1)
                self.finish_reason = "error"
            elif token.id == self.eod or (matcher is not None and matcher.is_over):
                self.finish_reason = "stop"
            elif len(self.ids) == self.num_tokens:
                self.finish_reason = "length"
        if not self.stop and self.matcher is None:
            return [token]
        # Hold back the last tokens while they may be the start of a stop sequence.
        num_held = 0 if self.finish_reason else self._undecided()
        new = slice(self.num_released, len(self.ids) - num_held)
        self.num_released = max(new.start, new.stop)
        parts = zip(self.ids[new], self._log_probs[new], self._tops[new], strict=True)
        return [NewToken(token.row, *part) for part in parts]

    def note_weights(self, version: int) -> None:
        """Record the version of the weights that wrote the next token."""
        if self.weights_versions[-1:] != [version]:
            self.weights_versions.append(version)

    def _drop(self, count: int) -> None:
        for values in (self.ids, self._log_probs, self._tops):
            del values[-count:]

    def _ends_with(self, sequence: Sequence[int]) -> bool:
        return self.ids[-len(sequence) :] == sequence

    def _undecided(self) -> int:
        """Return the number of last tokens that may be the start of a stop sequence."""
        longest = 0
        for sequence in self.stop:
            for length in range(1, min(len(sequence), len(self.ids) + 1)):
                if self._ends_with(sequence[:length]):
                    longest = max(longest, length)
        return longest

    def result(self) -> Generation:
        """Return the result of a finished text."""
        assert self.finish_reason is not None
        log_probs = tuple(number for number in self._log_probs if number is not None)
        top = tuple(self._tops) if any(self._tops) else ()
        return Generation(
            tuple(self.ids),
            log_probs,
            self.finish_reason,
            top,
            prompt_log_probs=tuple(self.prompt_log_probs),
            prompt_top=tuple(self.prompt_top) if self.request.scores.num_top else (),
            weights_versions=tuple(self.weights_versions),
        )
